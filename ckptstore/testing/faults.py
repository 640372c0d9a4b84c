"""A backend that fails on purpose, as a script says: for tests of what stands on backends.

Every call gets a number, 1, 2, 3, ..., and a line in :attr:`FaultBackend.log`. A :class:`Fault` says which
calls it strikes and what happens then. To try a crash at every point of some work:

    def work(backend): ...                                  # for instance, one save

    total = count_calls(work, MemoryBackend("count"))
    for n in range(1, total + 2):                           # the last n: after the last call
        inner = fresh_place()
        with contextlib.suppress(SimulatedCrash):
            work(FaultBackend(inner, [crash_at(n)]))
        check_what_is_left(inner)

A dead process runs no handlers; so after a crash every call of that backend raises SimulatedCrash too, and
whatever cleaning up the code under test attempts has no effect on the place.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias, TypeVar

from ckptstore.backend import (
    Backend,
    Capabilities,
    DeleteResult,
    DeleteResults,
    Look,
    ObjectInfo,
    ReadableBuffer,
    open_backend,
)
from ckptstore.errors import BackendError, ShortReadError

T = TypeVar("T")

Kind: TypeAlias = Literal["error", "error_after", "crash", "crash_after", "hang", "late", "truncate", "flip"]

HANG_SECONDS = 60.0
"""A hang that nobody ends is an error after this long, so that a broken test fails and does not stall."""


class SimulatedCrash(Exception):
    """The process is dead from this call on. No handler for backend errors catches it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One line of the log: the `n`-th call was `op` for `key` (a prefix for lists, ``""`` for none)."""

    n: int
    op: str
    key: str


@dataclasses.dataclass(eq=False)
class Fault:
    """What happens, and to which calls. All given conditions must hold.

    Args:
        kind: ``error`` raises `error` before the inner call; ``error_after`` after it succeeded (a lost
            reply); ``crash`` and ``crash_after`` end the "process" there; ``hang`` waits for `event` and then
            goes on; ``late`` raises `error` now and keeps the call for :meth:`FaultBackend.release` (a
            request stuck in the network); ``truncate`` makes a read see only the first `at` bytes of the
            object; ``flip`` inverts one bit of byte `at` of the object in what a read gives.
        n: strikes the call of this number.
        op: strikes calls of this method: ``put``, ``read_into``, ``get``, ``head``, ``list``, ...
        key: strikes keys that match this pattern (``commits/*``; ``*`` matches ``/`` too).
        skip: lets that many calls pass first.
        times: strikes that often; None for ever.
        error: what to raise; a transient BackendError if not given.
        event: ends a hang.
        at: position in the object, for ``truncate`` and ``flip``.

    Example:
        >>> lost_reply = Fault("error_after", op="put", key="commits/*")
        >>> disk_full = Fault("error", op="put", error=OutOfSpaceError("disk full"), times=None)
    """

    kind: Kind
    n: int | None = None
    op: str | None = None
    key: str = "*"
    skip: int = 0
    times: int | None = 1
    error: Exception | None = None
    event: threading.Event | None = None
    at: int = 0

    def strikes(self, call: Call) -> bool:
        """Whether it strikes `call`; counts down `skip` and `times`."""
        wrong_call = (self.n is not None and self.n != call.n) or (self.op is not None and self.op != call.op)
        if wrong_call or not fnmatch.fnmatchcase(call.key, self.key) or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


def crash_at(n: int) -> Fault:
    """The process dies when it is about to make its `n`-th call."""
    return Fault("crash", n=n)


def count_calls(work: Callable[[FaultBackend], object], inner: Backend) -> int:
    """How many calls `work` makes of the backend that it is given; none of them fails."""
    backend = FaultBackend(inner)
    work(backend)
    return len(backend.log)


class FaultBackend(Backend):
    """Passes calls to `inner`, except those that `script` strikes; the first fault that matches wins.

    Args:
        inner: the backend that does the work.
        script: the faults; more can be put into :attr:`script` while a test runs.

    Attributes:
        log: every call in order.
        crashed: whether the "process" is dead.

    Example:
        >>> backend = FaultBackend(inner, [Fault("error", op="put", key="chunks/*", skip=2)])
        >>> save(backend)          # its third chunk fails
        >>> backend.log[0]
        Call(n=1, op='put', key='intents/01...')
    """

    schemes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inner: Backend, script: Iterable[Fault] = ()) -> None:
        self.inner = inner
        self.script = list(script)
        self.log: list[Call] = []
        self.crashed = False
        self._held: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> FaultBackend:
        """The installed backend for `url`, without faults yet."""
        return cls(open_backend(url, options))

    @property
    def url(self) -> str:
        """The inner backend's."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """The inner backend's."""
        return self.inner.capabilities

    def release(self) -> None:
        """Lets the calls that ``late`` faults kept reach the inner backend now, whatever became of us.

        Their errors are lost, as their replies are.
        """
        with self._lock:
            held, self._held = self._held, []
        for call in held:
            try:
                call()
            except BackendError:
                continue  # nobody waits for the answer any more

    def create_root(self) -> None:
        """Passed on, or struck."""
        self._call("create_root", "", self.inner.create_root)

    def make_prefixes(self, prefixes: Iterable[str]) -> None:
        """Passed on, or struck."""
        wanted = list(prefixes)
        self._call("make_prefixes", "", lambda: self.inner.make_prefixes(wanted))

    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Passed on, or struck."""
        # A late put must store what was given now: its caller may use the buffers again at once.
        content = [bytes(buffer) for buffer in buffers] if self._may_be_late() else buffers
        self._call("put", key, lambda: self.inner.put(key, content, if_absent=if_absent))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Passed on, or struck; ``truncate`` and ``flip`` count from the start of the object."""
        fault = self._call("read_into", key, lambda: self.inner.read_into(key, offset, buffer))
        if fault is None:
            return
        view = buffer.cast("B") if buffer.nbytes else buffer
        if fault.kind == "truncate" and offset + len(view) > fault.at:
            raise ShortReadError(f"read {key!r}: the object ends at {fault.at} (made to)")
        if fault.kind == "flip" and 0 <= fault.at - offset < len(view):
            view[fault.at - offset] ^= 1

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Passed on, or struck."""
        found: list[bytes] = []
        fault = self._call("get", key, lambda: found.append(self.inner.get(key, max_bytes=max_bytes)))
        content = found[0]
        if fault is not None and fault.kind == "truncate":
            content = content[: fault.at]
        if fault is not None and fault.kind == "flip" and fault.at < len(content):
            content = content[: fault.at] + bytes([content[fault.at] ^ 1]) + content[fault.at + 1 :]
        return content

    def head(self, key: str) -> ObjectInfo:
        """Passed on, or struck."""
        found: list[ObjectInfo] = []
        self._call("head", key, lambda: found.append(self.inner.head(key)))
        return found[0]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """One call, counted now; struck at its first step."""
        return self._list("list", prefix, self.inner.list)

    def list_temporaries(self, prefix: str) -> Iterator[ObjectInfo]:
        """One call, counted now; struck at its first step."""
        return self._list("list_temporaries", prefix, self.inner.list_temporaries)

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """One call for all keys; a fault's pattern is tried on the first key."""
        results: list[DeleteResult] = []
        wanted = list(keys)
        self._call("delete", wanted[0] if wanted else "", lambda: results.extend(self.inner.delete(wanted)))
        return results

    def sync(self) -> None:
        """Passed on, or struck."""
        self._call("sync", "", self.inner.sync)

    def examine(self) -> Iterator[Look]:
        """The inner backend's; neither counted nor struck."""
        return self.inner.examine()

    def close(self) -> None:
        """Passed on, neither counted nor struck; nothing after a crash."""
        if not self.crashed:
            self.inner.close()

    # --- helpers -------------------------------------------------------------------------------

    def _may_be_late(self) -> bool:
        return any(fault.kind == "late" for fault in self.script)

    def _enter(self, op: str, key: str) -> tuple[Call, Fault | None]:
        with self._lock:
            self._check_alive(op, key)
            call = Call(len(self.log) + 1, op, key)
            self.log.append(call)
            for fault in self.script:
                if fault.strikes(call):
                    return call, fault
            return call, None

    def _check_alive(self, op: str, key: str) -> None:
        if self.crashed:
            raise SimulatedCrash(f"{op} {key!r} by a process that has crashed")

    def _die(self, call: Call) -> SimulatedCrash:
        self.crashed = True
        return SimulatedCrash(f"crash at call {call.n}: {call.op} {call.key!r}")

    def _call(self, op: str, key: str, inner: Callable[[], object]) -> Fault | None:
        call, fault = self._enter(op, key)
        if fault is not None:
            self._before(call, fault, inner)
        inner()
        if fault is not None:
            self._after(call, fault)
        self._check_alive(op, key)  # another thread's call may have been the last of this "process"
        return fault

    def _before(self, call: Call, fault: Fault, inner: Callable[[], object]) -> None:
        if fault.kind == "crash":
            raise self._die(call)
        if fault.kind == "late":
            with self._lock:
                self._held.append(inner)
        if fault.kind in ("error", "late"):
            raise self._error(call, fault)
        if fault.kind == "hang":
            event = fault.event
            if event is None or not event.wait(HANG_SECONDS):
                raise TimeoutError(f"nobody ended the hang of call {call.n}: {call.op} {call.key!r}")
            self._check_alive(call.op, call.key)

    def _after(self, call: Call, fault: Fault) -> None:
        if fault.kind == "crash_after":
            raise self._die(call)
        if fault.kind == "error_after":
            raise self._error(call, fault)

    @staticmethod
    def _error(call: Call, fault: Fault) -> Exception:
        return fault.error or BackendError(f"{call.op} {call.key!r} failed (made to)", transient=True)

    def _list(
        self, op: str, prefix: str, lister: Callable[[str], Iterator[ObjectInfo]]
    ) -> Iterator[ObjectInfo]:
        call, fault = self._enter(op, prefix)
        return self._steps(call, fault, lister)

    def _steps(
        self, call: Call, fault: Fault | None, lister: Callable[[str], Iterator[ObjectInfo]]
    ) -> Iterator[ObjectInfo]:
        if fault is not None:
            self._before(call, fault, lambda: None)
        for info in lister(call.key):
            self._check_alive(call.op, call.key)
            yield info
        if fault is not None:
            self._after(call, fault)
