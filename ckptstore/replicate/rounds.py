"""Bringing one tier what it is owed, once."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ckptstore.environment import Environment
from ckptstore.errors import BackendError, BusyError, CkptstoreError
from ckptstore.model.history import Entry
from ckptstore.model.record import EpochDoc
from ckptstore.replicate.copying import Copied, CopyStopped, copy_checkpoint
from ckptstore.replicate.debt import Owed, Wanted, debt
from ckptstore.replicate.documents import catch_up
from ckptstore.replicate.pace import Pace
from ckptstore.save.work import Progress
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

MOST_BASES = 3
"""So many of the destination's newest checkpoints may be reused, besides parents."""
LOUD_CHECKPOINTS, LOUD_SECONDS = 20, 6 * 3600.0
"""A debt of more checkpoints, or of an older one, is said loudly when copying fails."""


class Source(Protocol):
    """What a replicator asks of its store."""

    @property
    def tiers(self) -> Sequence[Tier]: ...
    def refresh(self, run_key: str | None = None) -> None: ...
    def run_names(self) -> list[tuple[str, str]]: ...
    def replicas(self, run_key: str) -> Mapping[str, Mapping[str, Entry]]: ...
    def sessions(self, run_key: str) -> list[EpochDoc]: ...
    def copies_of(self, run_key: str, entry: Entry) -> list[Copy]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A checkpoint that was copied."""

    run: str
    step: int
    checkpoint: str
    new_bytes: int
    sent_bytes: int
    reused_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """A checkpoint that was not copied, and why.

    Attributes:
        exit_code: of the error, as a command ends with it; 0 where nothing is wrong.
    """

    run: str
    step: int
    checkpoint: str
    reason: str
    exit_code: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What one round did.

    Attributes:
        sent: copied, in this order.
        skipped: not wanted there, damaged, or being copied by another process.
        failed: tried in vain.
        owed: checkpoints still to be copied.
        is_cut_short: it ended before all were tried: something newer came, or it was stopped.
    """

    tier: str
    sent: tuple[Sent, ...]
    skipped: tuple[Passed, ...]
    failed: tuple[Passed, ...]
    owed: int
    seconds: float
    is_cut_short: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """How copying to a tier goes in this process.

    Attributes:
        owed: checkpoints still to be copied, as last counted; None before the first round.
        copying: the checkpoint under way.
        done_bytes, total_bytes: of its chunks.
        bytes_per_second: of it, so far; 0 before the first.
        seconds_left: for it, at that rate; None when that cannot be said.
        failures: in a row.
        last_error: what the last of them was.
    """

    owed: int | None
    copying: str | None
    done_bytes: int
    total_bytes: int
    bytes_per_second: float
    seconds_left: float | None
    failures: int
    last_error: str | None


class Rounds:
    """Copies what a tier is owed, newest first, and counts how that goes.

    Args:
        source: the store.
        destination: the tier.
        wanted: what the tier's own retention keeps.
        on_sent: told of each checkpoint that was copied.
    """

    def __init__(
        self,
        source: Source,
        destination: Tier,
        *,
        wanted: Wanted | None = None,
        on_sent: Callable[[Sent], None] | None = None,
    ) -> None:
        self._source = source
        self.destination = destination
        self._wanted = wanted
        self._on_sent = on_sent
        self._environment: Environment = destination.environment
        self._pace = Pace(
            destination.limits.max_bytes_per_second, self._environment.monotonic, self._environment.sleep
        )
        self._known: dict[str, Copy] = {}  # run key -> what was copied last: its tables need not be read
        self._changed = threading.Condition()
        self._stopping = False
        self._done: set[str] = set()
        self._passed_over: dict[str, Owed] = {}  # by checkpoint: with why it is not copied
        self._missed_notes = True  # those of the time before, or while the tier was away
        self._copying: tuple[str, float] | None = None  # (checkpoint, since when)
        self.new_progress: Callable[[], Progress] = Progress
        self.progress = Progress()
        self.owed: int | None = None
        self.owed_since: float | None = None
        self.failures = 0
        self.last_error: CkptstoreError | None = None

    # --- one round ------------------------------------------------------------------------------

    def owing(self, run: str | None = None) -> list[tuple[str, str, Owed]]:
        """(run, run key, what is owed), runs by name, each newest first; passed over ones included."""
        tiers = list(self._source.tiers)
        place = [tier.uuid for tier in tiers].index(self.destination.uuid)
        hotter = [tier.uuid for tier in tiers[:place]]
        self._source.refresh()
        found = []
        for name, run_key in self._source.run_names():
            if run in (None, name):
                replicas = self._source.replicas(run_key)
                owed = debt(
                    replicas,
                    hotter,
                    self.destination.uuid,
                    self._source.sessions(run_key),
                    self._wanted,
                )
                with self._changed:
                    self._done |= replicas.get(self.destination.uuid, {}).keys()  # others copy, too
                    self._passed_over |= {item.entry.checkpoint: item for item in owed if item.why}
                    self._changed.notify_all()
                found += [(name, run_key, item) for item in owed]
        return found

    def run_once(self, run: str | None = None) -> Report:
        """Copies what is owed now; one that fails does not stop the others, unless the tier is away.

        Raises:
            BackendError: a tier does not answer at all.
        """
        started = self._environment.monotonic()
        owing = self.owing(run)
        sent: list[Sent] = []
        skipped = [
            Passed(name, owed.entry.step, owed.entry.checkpoint, owed.why, owed.exit_code)
            for name, _, owed in owing
            if owed.why
        ]
        failed: list[Passed] = []
        is_cut_short = False
        todo = [item for item in owing if not item[2].why]
        # The newest of every run first: a restart wants those.
        todo.sort(key=lambda item: item[2].entry.created_at, reverse=True)
        self.owed = len(todo)
        self.owed_since = min((item[2].entry.created_at for item in todo), default=None)
        if self._missed_notes:
            self._catch_up(run)
        for name, run_key, owed in todo:
            if self._stopping or (sent and self._has_news()):
                is_cut_short = True
                break
            entry = owed.entry
            try:
                copied = self._copy(run_key, owed)
            except CopyStopped:
                is_cut_short = True
                break
            except BusyError as error:
                skipped.append(Passed(name, entry.step, entry.checkpoint, error.message))
                continue
            except CkptstoreError as error:
                failed.append(Passed(name, entry.step, entry.checkpoint, error.message, error.exit_code))
                self._note_failure(error, f"step {entry.step} of run {name!r}")
                if isinstance(error, BackendError):
                    break  # it is away for the others, too
                continue
            sent.append(_sent(name, entry, copied))
            self._note_sent(sent[-1])
        return Report(
            self.destination.name,
            tuple(sent),
            tuple(skipped),
            tuple(failed),
            len(todo) - len(sent),
            self._environment.monotonic() - started,
            is_cut_short,
        )

    def _has_news(self) -> bool:
        """Something newer may be owed by now, and comes first."""
        return False

    def _catch_up(self, run: str | None) -> None:
        """Notes that the tier missed about checkpoints that it has."""
        destination = self.destination
        for name, run_key in self._source.run_names():
            there = self._source.replicas(run_key).get(destination.uuid, {})
            if there and run in (None, name):
                for tier in self._source.tiers:
                    if tier.uuid != destination.uuid:
                        catch_up(tier, destination, run_key, there)
        self._missed_notes = run is not None

    def _copy(self, run_key: str, owed: Owed) -> Copied:
        copies = [
            copy for copy in self._source.copies_of(run_key, owed.entry) if copy.tier is not self.destination
        ]
        copies.sort(key=lambda copy: copy.tier.uuid != owed.source)
        self.progress = self.new_progress()
        self._copying = (owed.entry.checkpoint, self._environment.monotonic())
        try:
            copied = copy_checkpoint(
                copies,
                self.destination,
                bases=self._bases(run_key, copies[0]),
                progress=self.progress,
                pace=self._pace,
                is_stopped=lambda: self._stopping,
            )
        finally:
            self._copying = None
        made = Copy(self.destination, run_key, copied.contents.record.attempt)
        made.__dict__.update(record=copied.contents.record, contents=copied.contents)
        self._known[run_key] = made
        return copied

    def _bases(self, run_key: str, copy: Copy) -> list[Copy]:
        """Records of the destination that may hold chunks of a checkpoint: the newest, and its parents."""
        uuid = self.destination.uuid
        there = self._source.replicas(run_key).get(uuid, {})
        usable = [entry for entry in there.values() if not (entry.facts.damaged or entry.facts.doomed)]
        usable.sort(key=lambda entry: abs(entry.created_at - copy.record.created_at))
        chosen = {entry.attempt: run_key for entry in usable[:MOST_BASES]}
        # A parent in the same run is near in time; one of another run, of a fork, is looked for.
        parents = {parent for parent in copy.record.parents if not self._is_of(run_key, parent)}
        for key in [key for _, key in self._source.run_names() if key != run_key] if parents else []:
            entries = self._source.replicas(key).get(uuid, {})
            for entry in (entries[parent] for parent in parents & entries.keys()):
                if not (entry.facts.damaged or entry.facts.doomed):
                    chosen[entry.attempt] = key
        known = self._known.get(run_key)
        bases = [] if known is None else [known]
        bases += [
            Copy(self.destination, key, attempt)
            for attempt, key in chosen.items()
            if known is None or attempt != known.attempt
        ]
        return bases

    def _is_of(self, run_key: str, checkpoint: str) -> bool:
        return any(checkpoint in entries for entries in self._source.replicas(run_key).values())

    def _note_sent(self, sent: Sent) -> None:
        log.info(
            "copied step %d of run %r to tier %s: %.3g MiB in %.3g s, %.3g MiB were there",
            sent.step,
            sent.run,
            self.destination.name,
            sent.sent_bytes / (1 << 20),
            sent.seconds,
            sent.reused_bytes / (1 << 20),
        )
        with self._changed:
            self._done.add(sent.checkpoint)
            self.owed = max(0, (self.owed or 0) - 1)
            self.failures, self.last_error = 0, None
            self._changed.notify_all()
        if self._on_sent is not None:
            self._on_sent(sent)

    def _note_failure(self, error: CkptstoreError, what: str) -> None:
        with self._changed:
            self.failures += 1
            self._missed_notes = True
            self.last_error = error
            self._changed.notify_all()
        # Loud at first and then ever more seldom: a bucket may be away for a weekend.
        level = logging.WARNING if self.failures & (self.failures - 1) == 0 else logging.DEBUG
        log.log(
            level,
            "copying %s to tier %s failed (%d in a row), trying on: %s",
            what,
            self.destination.name,
            self.failures,
            error.message,
        )
        age = 0.0 if self.owed_since is None else self._environment.now() - self.owed_since
        if ((self.owed or 0) > LOUD_CHECKPOINTS or age > LOUD_SECONDS) and level == logging.WARNING:
            log.error(
                "tier %s is behind by %d checkpoints, the oldest of them %.3g h old",
                self.destination.name,
                self.owed or 0,
                age / 3600,
            )

    def status(self) -> Status:
        """How it goes now."""
        copying, progress = self._copying, self.progress
        seconds = 0.0 if copying is None else self._environment.monotonic() - copying[1]
        rate = progress.done_bytes / seconds if seconds > 0 else 0.0
        left = None
        if copying is not None and rate > 0:
            left = (progress.total_bytes - progress.done_bytes) / rate
        return Status(
            self.owed,
            None if copying is None else copying[0],
            progress.done_bytes,
            progress.total_bytes,
            rate,
            left,
            self.failures,
            None if self.last_error is None else self.last_error.message,
        )


def _sent(run: str, entry: Entry, copied: Copied) -> Sent:
    return Sent(
        run,
        entry.step,
        entry.checkpoint,
        copied.new_bytes,
        copied.sent_bytes,
        copied.reused_bytes,
        copied.seconds,
    )
