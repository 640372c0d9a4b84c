"""Keeping one tier up to date: once, or in the background of a training."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ckptstore.environment import Environment
from ckptstore.errors import BackendError, BusyError, CkptstoreError
from ckptstore.model.history import Entry
from ckptstore.model.record import EpochDoc
from ckptstore.replicate.copying import Copied, copy_checkpoint
from ckptstore.replicate.debt import Owed, Wanted, debt
from ckptstore.replicate.pace import Pace
from ckptstore.save.lane import step_back
from ckptstore.save.work import Progress
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

MOST_BASES = 3
"""So many of the destination's newest checkpoints may be reused, besides parents."""
FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 1.0, 300.0
LOUD_CHECKPOINTS = 20
"""A debt of more checkpoints is said loudly."""


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
    """A checkpoint that was not copied, and why."""

    run: str
    step: int
    checkpoint: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What one round did.

    Attributes:
        sent: copied, in this order.
        skipped: not wanted there, damaged, or being copied by another process.
        failed: tried in vain.
        owed: checkpoints still to be copied.
    """

    tier: str
    sent: tuple[Sent, ...]
    skipped: tuple[Passed, ...]
    failed: tuple[Passed, ...]
    owed: int
    seconds: float


class Replicator:
    """Copies what a tier is owed, newest first.

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
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self.destination = destination
        self._wanted = wanted
        self._on_sent = on_sent
        self._jitter = jitter
        self._environment: Environment = destination.environment
        self._pace = Pace(
            destination.limits.max_bytes_per_second, self._environment.monotonic, self._environment.sleep
        )
        self._known: dict[str, Copy] = {}  # run key -> what was copied last: its tables need not be read
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._asked = self._answered = 0
        self._done: set[str] = set()
        self.progress = Progress()
        self.owed: int | None = None
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
                with self._changed:  # others copy, too
                    self._done |= replicas.get(self.destination.uuid, {}).keys()
                    self._changed.notify_all()
                owed = debt(
                    replicas,
                    hotter,
                    self.destination.uuid,
                    self._source.sessions(run_key),
                    self._wanted,
                )
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
        skipped = [Passed(name, o.entry.step, o.entry.checkpoint, o.why) for name, _, o in owing if o.why]
        failed: list[Passed] = []
        todo = [item for item in owing if not item[2].why]
        # The newest of every run first: a restart wants those.
        todo.sort(key=lambda item: item[2].entry.created_at, reverse=True)
        self.owed = len(todo)
        for name, run_key, owed in todo:
            if self._stopping:
                break
            entry = owed.entry
            try:
                copied = self._copy(run_key, owed)
            except BusyError as error:
                skipped.append(Passed(name, entry.step, entry.checkpoint, error.message))
                continue
            except CkptstoreError as error:
                failed.append(Passed(name, entry.step, entry.checkpoint, error.message))
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
        )

    def _copy(self, run_key: str, owed: Owed) -> Copied:
        copies = [
            copy for copy in self._source.copies_of(run_key, owed.entry) if copy.tier is not self.destination
        ]
        copies.sort(key=lambda copy: copy.tier.uuid != owed.source)
        self.progress = Progress()
        copied = copy_checkpoint(
            copies,
            self.destination,
            bases=self._bases(run_key, copies[0]),
            progress=self.progress,
            pace=self._pace,
        )
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
        for parent in copy.record.parents:
            for _, key in self._source.run_names():
                entry = self._source.replicas(key).get(uuid, {}).get(parent)
                if entry is not None and not (entry.facts.damaged or entry.facts.doomed):
                    chosen[entry.attempt] = key
        known = self._known.get(run_key)
        bases = [] if known is None else [known]
        bases += [
            Copy(self.destination, key, attempt)
            for attempt, key in chosen.items()
            if known is None or attempt != known.attempt
        ]
        return bases

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
        if (self.owed or 0) > LOUD_CHECKPOINTS and level == logging.WARNING:
            log.error("tier %s is behind by %d checkpoints", self.destination.name, self.owed)

    # --- in the background ----------------------------------------------------------------------

    def wake(self) -> None:
        """Something was committed: copies it in a thread of its own, which is started if there is none."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._work, name=f"ckptstore-replicate-{self.destination.name}", daemon=True
                )
                self._thread.start()

    def wait_for(self, checkpoint: str, timeout: float | None = None) -> bool:
        """Waits until this replicator has copied a checkpoint; False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: checkpoint in self._done, timeout)

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is owed; False when a try fails first, or the time is over."""
        with self._changed:
            if self._thread is None:
                return True
            self._changed.wait_for(lambda: self.failures > 0 or self._is_idle, timeout)
            return self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self._answered >= self._asked

    def stop(self) -> None:
        """Ends the thread after the checkpoint that it is copying; what is owed stays owed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._changed:
            self._thread, self._stopping = None, False

    def _work(self) -> None:
        step_back()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not self._is_idle)
                if self._stopping:
                    return
                asked = self._asked
            is_done = self._try()
            with self._changed:
                if is_done:
                    self._answered = asked
                    self._changed.notify_all()
                else:
                    self._changed.wait_for(lambda: self._stopping, self._wait_seconds())

    def _try(self) -> bool:
        """One round; whether nothing is left to be tried again."""
        try:
            report = self.run_once()
        except CkptstoreError as error:
            self._note_failure(error, "what is owed")
            return False
        except Exception:
            log.exception("copying to tier %s failed by a fault of its own", self.destination.name)
            with self._changed:
                self.failures += 1
                self._changed.notify_all()
            return False
        return report.owed == 0

    def _wait_seconds(self) -> float:
        doubled = FIRST_WAIT_SECONDS * 2.0 ** min(self.failures, 20)
        return min(doubled, MOST_WAIT_SECONDS) * (0.5 + self._jitter())


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
