"""Trying a place out, through the backend that saves and loads use."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptstore.backend import Backend, ReadableBuffer
from ckptstore.doctor.findings import Finding, judged
from ckptstore.environment import Environment
from ckptstore.errors import BackendError, CkptstoreError, ObjectExistsError, PermissionDeniedError

PREFIX = "doctor/"
RACERS = 16
ROUND_TRIP_BYTES = (1 << 20) + 12_345
MAX_CLOCK_SECONDS = 5.0
_LISTED = 8
_DIRECT_BYTES = 4096

_CONSERVATIVE = (
    "one training at a time may write a run, which nothing here can enforce; `gc` leaves alone what killed "
    "ones left until it is told whose. Use a place with create-if-absent (docs/providers.md) for more"
)


def reading(backend: Backend) -> Iterator[Finding]:
    """Whether listing is allowed; that reading is, the marker has shown."""
    try:
        next(iter(backend.list(PREFIX)), None)
    except PermissionDeniedError as error:
        yield Finding("list", "fail", error.message, "without it no checkpoint is found: allow listing")
    else:
        yield Finding("list", "ok", "allowed")


def writing(backend: Backend, environment: Environment) -> Iterator[Finding]:
    """All that must be written to know it; deleted at the end, whatever happened."""
    trial = _Trial(backend, f"{PREFIX}{environment.new_ulid()}")
    try:
        yield from trial.permissions()
        if trial.may_write:
            if trial.may_read:
                yield trial.clock(environment)
                yield trial.round_trip(environment.random_bytes(ROUND_TRIP_BYTES))
                yield from trial.race()
            with contextlib.suppress(PermissionDeniedError):  # `reading` has said so
                yield trial.listing()
            yield from trial.direct()
    finally:
        left = trial.clean()
    if left and trial.may_delete:
        yield Finding("delete", "fail", f"{left[0]} stays", "`gc` could free nothing here")


class _Trial:
    """Objects under one fresh name.

    Attributes:
        may_write, may_read, may_delete: as found by :meth:`permissions`.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend = backend
        self.name = name
        self.keys: list[str] = []
        self.may_write = self.may_read = self.may_delete = False

    def put(self, end: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> str:
        key = f"{self.name}.{end}"
        if key not in self.keys:
            self.keys.append(key)  # first: it may be there after an error, too
        self.backend.put(key, buffers, if_absent=if_absent)
        return key

    def clean(self) -> list[str]:
        """Deletes everything that was or may have been written; what stays."""
        # By their names, not by a listing, which may lag.
        results = self.backend.delete(self.keys) if self.keys else []
        path = self.backend.capabilities.local_path
        if path is not None:
            with contextlib.suppress(OSError):  # another doctor is at work, or it was never made
                os.rmdir(os.path.join(path, PREFIX))
        return [result.key for result in results if result.error is not None]

    # --- permissions ------------------------------------------------------------------------------

    def permissions(self) -> Iterator[Finding]:
        """Writing, reading and deleting, each by itself."""
        try:
            key = self.put("first", [b"x"])
        except PermissionDeniedError as error:
            self.keys.clear()
            meaning = "loading and looking work, saving does not; `--no-write` leaves this out"
            yield Finding("write", "fail", error.message, meaning)
            return
        self.may_write = True
        yield Finding("write", "ok", "allowed")
        try:
            self.backend.get(key, max_bytes=1)
        except PermissionDeniedError as error:
            yield Finding("read", "fail", error.message, "what is saved here cannot be restored")
        else:
            self.may_read = True
            yield Finding("read", "ok", "allowed")
        error_of = self.backend.delete([key])[0].error
        self.may_delete = error_of is None
        meaning = "saving and loading work; `gc` frees nothing, and what doctor wrote stays under doctor/"
        found = "allowed" if error_of is None else error_of.message
        yield judged("delete", found, meaning, bad=not self.may_delete, status="fail")

    # --- one after the other ----------------------------------------------------------------------

    def clock(self, environment: Environment) -> Finding:
        """The backend's clock against this machine's."""
        before = environment.now()
        key = self.put("clock", [b"tick"])
        after = environment.now()
        there = self.backend.head(key).modified
        # File systems keep times of a tick (some 4 ms) ago, object stores whole seconds.
        offset = min(0.0, there - before + 1.0) + max(0.0, there - after)
        return judged(
            "clock",
            f"the store's clock and this machine's are {abs(offset):.1f} s apart",
            "no data is at risk; ages and grace periods are off by that much: set the clocks (NTP)",
            bad=abs(offset) > MAX_CLOCK_SECONDS,
        )

    def round_trip(self, data: bytes) -> Finding:
        """Every byte, whole and from the middle."""
        backend = self.backend
        key = self.put("bytes", [data[:4097], memoryview(data)[4097:]])
        backend.sync()
        middle = bytearray(len(data) // 3)
        backend.read_into(key, 1001, memoryview(middle))
        exact = (
            backend.head(key).size_bytes == len(data)
            and backend.get(key, max_bytes=2 * len(data)) == data
            and middle == data[1001 : 1001 + len(middle)]
        )
        if exact:
            return Finding("round trip", "ok", f"{len(data)} bytes came back exact")
        return Finding(
            "round trip", "fail", "other bytes came back than were written", "do not use this place"
        )

    def listing(self) -> Finding:
        """Whether it shows what was written a moment ago, and not what was deleted."""
        keys = [self.put(f"list{number}", [b"x"]) for number in range(_LISTED)]
        there = {info.key for info in self.backend.list(PREFIX)}
        unseen = set(keys) - there
        gone = keys[::2] if self.may_delete else []
        ghosts: set[str] = set()
        if gone:
            self.backend.delete(gone)
            ghosts = {info.key for info in self.backend.list(PREFIX)} & set(gone)
        if unseen:
            meaning = "a checkpoint could be overlooked for a while: use another place"
            found = f"it lags behind writes: {len(unseen)} of {len(keys)} new objects are not in it"
            return Finding("listing", "fail", found, meaning)
        if ghosts:
            meaning = "what was collected could seem to be there for a while: use another place"
            found = f"it lags behind deletes: {len(ghosts)} of {len(gone)} deleted objects are in it"
            return Finding("listing", "fail", found, meaning)
        return Finding("listing", "ok", "shows what was written, and not what was deleted")

    # --- create if absent -------------------------------------------------------------------------

    def race(self) -> Iterator[Finding]:
        """Threads that create one key at once: one must win, and its bytes must stay."""
        won, failures = self._race("race")
        if not won and not failures:  # the winner's reply was lost, and its next try met its own object
            won, failures = self._race("race-again")
        exclusive = self.backend.capabilities.create_if_absent
        if not exclusive:
            yield Finding("create if absent", "warn", "not to be had here", "see the commit mode")
        elif failures:
            yield Finding("create if absent", "fail", failures[0].message, failures[0].hint or "")
        elif len(won) != 1 or self._content() != _bytes_of(won[0]):
            found = f"{len(won)} of {RACERS} threads were told that they had created the same object"
            meaning = (
                "two trainings could take one run over: use another place, or see to it that only one writes "
                "(for s3, create_if_absent = false in [tiers.options] says so)"
            )
            yield Finding("create if absent", "fail", found, meaning)
            return
        else:
            yield Finding("create if absent", "ok", f"one of {RACERS} threads won")
        if exclusive:
            yield Finding("commit mode", "ok", "exclusive: a record is created only where none is")
        else:
            yield Finding("commit mode", "warn", "conservative: records are put plainly", _CONSERVATIVE)

    def _race(self, end: str) -> tuple[list[int], list[CkptstoreError]]:
        barrier = threading.Barrier(RACERS)
        won: list[int] = []
        failures: list[CkptstoreError] = []
        self._raced = f"{self.name}.{end}"
        self.keys.append(self._raced)

        def create(number: int) -> None:
            barrier.wait()
            try:
                self.backend.put(self._raced, [_bytes_of(number)], if_absent=True)
            except ObjectExistsError:
                return
            except CkptstoreError as error:
                failures.append(error)
                return
            won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return won, failures

    def _content(self) -> bytes | None:
        try:
            return self.backend.get(self._raced, max_bytes=100)
        except BackendError:
            return None

    # --- local ------------------------------------------------------------------------------------

    def direct(self) -> Iterator[Finding]:
        """O_DIRECT, in a file that counts as a temporary one should this process die now."""
        path = self.backend.capabilities.local_path
        if path is None:
            return
        flag = getattr(os, "O_DIRECT", 0)
        base = os.path.basename(self.name)
        file = os.path.join(path, PREFIX, f".{base}.direct.{os.urandom(8).hex()}.tmp")
        buffer = mmap.mmap(-1, _DIRECT_BYTES)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600)
            try:
                works = bool(flag) and os.write(descriptor, buffer) == _DIRECT_BYTES
            finally:
                os.close(descriptor)
        except OSError:
            works = False
        finally:
            buffer.close()
            Path(file).unlink(missing_ok=True)
        if works:
            yield Finding("direct I/O", "ok", "works")
        else:
            meaning = "saves go through the page cache: right, but slower"
            yield Finding("direct I/O", "warn" if sys.platform == "linux" else "ok", "not here", meaning)


def _bytes_of(number: int) -> bytes:
    return f"racer {number}".encode()
