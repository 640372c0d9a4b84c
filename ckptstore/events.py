"""What a store tells its hooks about saves and restores, and the log line of a save."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from ckptstore.errors import SaveFailedError, UsageError, kind_of
from ckptstore.manifest.text import iso
from ckptstore.model.record import CommitRecord

if TYPE_CHECKING:
    from ckptstore.checkpoint import RestoreReport

log = logging.getLogger("ckptstore")

SaveOutcome = Literal["committed", "failed", "skipped"]
RestoreOutcome = Literal["restored", "failed"]

CAPTURE = "capture"
"""The phase that training waits for; all others go on in the background."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclasses.dataclass(frozen=True, slots=True)
class SaveEvent:
    """How one save ended, told once by each rank.

    Attributes:
        run, step: of the save.
        rank, world_size: of the process that tells it.
        outcome: "skipped": it was not begun, because others were still under way.
        error_kind: of a failed one: ``CkptstoreError.kind`` of its cause, else the name of the exception's
            class; the same word as in the VOID that the attempt left.
        blocked_seconds: how long training waited inside ``save`` on this rank.
        seconds: by phase, as in the record's ``timings``; without :data:`CAPTURE`, training waited for all.
            Empty where this rank does not know.
        logical_bytes: of all tensors of the checkpoint, each counted once; 0 unless committed.
        new_bytes, reused_bytes: what the save of all ranks together wrote, and what it did not have to.
        tier: URL of the tier, without credentials.
        committed_at: ISO 8601 in UTC, by the writer's clock.
        checkpoint: its id.
    """

    run: str
    step: int
    rank: int
    world_size: int
    outcome: SaveOutcome
    error_kind: str | None
    blocked_seconds: float
    seconds: Mapping[str, float]
    logical_bytes: int
    new_bytes: int
    reused_bytes: int
    tier: str
    committed_at: str | None
    checkpoint: str | None

    @property
    def background_seconds(self) -> float:
        """Sum of the phases that training did not wait for; 0 for a save that was waited for."""
        if CAPTURE not in self.seconds:
            return 0.0
        return sum(spent for phase, spent in self.seconds.items() if phase != CAPTURE)


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreEvent:
    """How one restore ended, told once by each rank.

    Attributes:
        run: that was restored.
        step: of the checkpoint; None where it failed before one was chosen.
        rank: of the process that tells it.
        error_kind: as in :class:`SaveEvent`.
        seconds: that it took.
        bytes_read: by this rank.
        tier: URL of the tier, without credentials.
    """

    run: str
    step: int | None
    rank: int
    outcome: RestoreOutcome
    error_kind: str | None
    seconds: float
    bytes_read: int
    tier: str


def save_event(
    run: str,
    step: int,
    *,
    rank: int,
    world_size: int,
    tier: str,
    blocked_seconds: float,
    record: CommitRecord | None = None,
    error: BaseException | None = None,
    seconds: Mapping[str, float] | None = None,
) -> SaveEvent:
    """The event of a save: committed with a `record`, failed with an `error`, skipped with neither.

    Args:
        tier: its URL; credentials are taken off.
        blocked_seconds: how long the caller of ``save`` waited.
        record: of the checkpoint, on every rank.
        error: what ended it.
        seconds: by phase, of this rank; without it those of the record, on rank 0.
    """
    # The record's timings are those of rank 0.
    spent = seconds if seconds is not None else (record.timings if record is not None and rank == 0 else {})
    outcome: SaveOutcome = "skipped"
    if record is not None:
        outcome = "committed"
    elif error is not None:
        outcome = "failed"
    return SaveEvent(
        run=run,
        step=step,
        rank=rank,
        world_size=world_size,
        outcome=outcome,
        error_kind=error_kind(error) if outcome == "failed" and error is not None else None,
        blocked_seconds=blocked_seconds,
        seconds={phase: float(value) for phase, value in spent.items()},
        logical_bytes=record.logical_bytes if record is not None else 0,
        new_bytes=record.new_bytes if record is not None else 0,
        reused_bytes=record.reused_bytes if record is not None else 0,
        tier=public_url(tier),
        committed_at=iso(record.created_at) if record is not None else None,
        checkpoint=record.checkpoint if record is not None else None,
    )


def restore_event(
    run: str,
    *,
    rank: int,
    tier: str,
    report: RestoreReport | None = None,
    error: BaseException | None = None,
    step: int | None = None,
    seconds: float = 0.0,
) -> RestoreEvent:
    """The event of a restore: restored with a `report`, else failed.

    Args:
        tier: its URL; credentials are taken off.
        error: what ended it.
        step, seconds: of a failed one, as far as known; else those of the report.
    """
    return RestoreEvent(
        run=run,
        step=report.step if report is not None else step,
        rank=rank,
        outcome="restored" if report is not None else "failed",
        error_kind=error_kind(error) if report is None and error is not None else None,
        seconds=report.seconds if report is not None else seconds,
        bytes_read=report.bytes_read if report is not None else 0,
        tier=public_url(tier),
    )


def error_kind(error: BaseException) -> str:
    """A word for what went wrong: the kind of a SaveFailedError's cause, where it has one."""
    while isinstance(error, SaveFailedError) and error.__cause__ is not None:
        error = error.__cause__
    return kind_of(error)


def public_url(url: str) -> str:
    """`url` without user, password, query and fragment; a path as it is."""
    if "://" not in url:
        return url
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return f"{url.partition('://')[0]}://"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def save_line(event: SaveEvent) -> str:
    """The one log line of a save.

    Example:
        ``saved 'llama-8b' step 500: 1.5 GiB, 312.0 MiB new, blocked 0.21 s, 1.90 s in the background``
    """
    what = f"{event.run!r} step {event.step}"
    if event.outcome == "skipped":
        return f"skipped the save of {what}: earlier saves are still under way"
    blocked = f"blocked {event.blocked_seconds:.2f} s"
    if event.outcome == "failed":
        return f"save of {what} failed: {event.error_kind}, {blocked}"
    line = f"saved {what}: {_size(event.logical_bytes)}, {_size(event.new_bytes)} new, {blocked}"
    if CAPTURE in event.seconds:
        line += f", {event.background_seconds:.2f} s in the background"
    return line


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


class Hook(Protocol):
    """What wants to be told of saves and restores. A class that derives from it need not define both.

    Calls come from the thread that ended the save: mostly a run's background thread, whose next save waits
    for them; where several runs of a process save at once, from several threads at once.
    """

    def saved(self, event: SaveEvent) -> None:
        """A save has ended, one way or the other."""

    def restored(self, event: RestoreEvent) -> None:
        """A restore has ended."""


class Hooks:
    """The hooks of a store. What one of them raises is logged, and goes no further.

    A pickled collection comes back empty: hooks hold sockets, files and locks of their process.

    Raises:
        UsageError: one of the hooks lacks a method.

    Example:
        >>> hooks = Hooks()
        >>> len(hooks)
        0
    """

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._own_lock = (os.getpid(), threading.Lock())
        self._hooks: tuple[Hook, ...] = ()
        self._has_failed: set[int] = set()
        for hook in hooks:
            self.add(hook)

    @property
    def _lock(self) -> threading.Lock:
        """Of this process: in a forked child a thread that has stayed in the parent may seem to hold it."""
        if self._own_lock[0] != os.getpid():
            self._own_lock = (os.getpid(), threading.Lock())
        return self._own_lock[1]

    def add(self, hook: Hook) -> None:
        """One more, to be told of what ends from now on.

        Raises:
            UsageError: it has no ``saved`` or ``restored`` method, or is a class.
        """
        if isinstance(hook, type):
            raise UsageError(
                f"a hook must be an object, not the class {hook.__name__}", hint=f"give {hook.__name__}(...)"
            )
        missing = [name for name in ("saved", "restored") if not callable(getattr(hook, name, None))]
        if missing:
            raise UsageError(
                f"a hook of type {type(hook).__name__} has no method {' and no method '.join(missing)}",
                hint="derive its class from ckptstore.events.Hook",
            )
        with self._lock:
            self._hooks = (*self._hooks, hook)

    def saved(self, event: SaveEvent) -> None:
        """Tells all; never raises what a hook raised."""
        self._tell("saved", event)

    def restored(self, event: RestoreEvent) -> None:
        """Tells all; never raises what a hook raised."""
        self._tell("restored", event)

    def _tell(self, method: str, event: SaveEvent | RestoreEvent) -> None:
        for hook in self._hooks:
            try:
                getattr(hook, method)(event)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - not even SystemExit of a hook ends a training
                self._log(hook, method, error)

    def _log(self, hook: Hook, method: str, error: BaseException) -> None:
        with self._lock:
            is_first = id(hook) not in self._has_failed
            self._has_failed.add(id(hook))
        log.log(
            logging.ERROR if is_first else logging.DEBUG,
            "hook %s failed in %s(): %s: %s (training goes on; its further failures are logged as debug)",
            type(hook).__qualname__,
            method,
            type(error).__name__,
            error,
            exc_info=error,
        )

    def __len__(self) -> int:
        return len(self._hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def __reduce__(self) -> tuple[type[Hooks], tuple[()]]:
        return (Hooks, ())
