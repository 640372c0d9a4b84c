"""Bringing one tier what it is owed, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from ckptstore.environment import Environment
from ckptstore.errors import BackendError, BusyError, CkptstoreError
from ckptstore.model.history import Entry
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.replicate.copying import Copied, CopyStopped, copy_checkpoint
from ckptstore.replicate.debt import Owed, Wanted, debt
from ckptstore.replicate.documents import carry_policies, catch_up
from ckptstore.replicate.pace import Pace, Saves
from ckptstore.replicate.reports import Passed, Report, Sent, Status
from ckptstore.replicate.source import Source, bases_of
from ckptstore.save.work import Progress
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

LOUD_CHECKPOINTS, LOUD_SECONDS = 20, 6 * 3600.0
"""A debt of more checkpoints, or of an older one, is said loudly when copying fails."""

Runs = str | Collection[str] | None
"""Names of runs; None: all."""


class Rounds:
    """Copies what a tier is owed, newest first, and counts how that goes.

    Args:
        source: the store.
        destination: the tier.
        wanted: what retention keeps there of the run of a name; None of a run whose checkpoints all stay.
        on_sent: told of each checkpoint that was copied.
        saves: those of this process, which copies give way to.
    """

    def __init__(
        self,
        source: Source,
        destination: Tier,
        *,
        wanted: Callable[[str], Wanted | None] | None = None,
        on_sent: Callable[[Sent], None] | None = None,
        saves: Saves | None = None,
    ) -> None:
        self._source = source
        self.destination = destination
        self._wanted = wanted
        self._on_sent = on_sent
        self._environment: Environment = destination.environment
        rate = destination.limits.max_bytes_per_second
        self._pace = Pace(rate, self._environment.monotonic, saves=saves)
        self._known: dict[str, Copy] = {}  # run key -> what was copied last: its tables need not be read
        self._changed = threading.Condition()
        self._stopping = False
        self._done: set[str] = set()
        self._passed_over: dict[str, Owed] = {}  # by checkpoint: with why it is not copied
        self._missed_notes = True  # those of the time before, or while the tier was away
        self._behind: set[str] = set()  # runs of which something was owed when the last round ended
        self._copying: tuple[str, float] | None = None  # (checkpoint, since when)
        self.new_progress: Callable[[], Progress] = Progress
        self.progress = Progress()
        self.owed: int | None = None
        self.owed_since: float | None = None
        self.failures = 0
        self.last_error: CkptstoreError | None = None

    # --- one round ------------------------------------------------------------------------------

    def owing(self, runs: Runs = None, *, is_fresh: bool = False) -> list[tuple[str, str, Owed]]:
        """(run, run key, what is owed), runs by name, each newest first; passed over ones included.

        Args:
            runs: only these are looked at in the tiers; all unless given.
            is_fresh: what is known of the tiers is from this moment.
        """
        names = _names(runs)
        tiers = list(self._source.tiers)
        place = [tier.uuid for tier in tiers].index(self.destination.uuid)
        hotter = [tier.uuid for tier in tiers[:place]]
        for key in [] if is_fresh else [None] if names is None else sorted(map(run_key_of, names)):
            self._source.refresh(key)
        found = []
        for name, run_key in self._source.run_names():
            if names is None or name in names:
                replicas = self._source.replicas(run_key)
                owed = debt(
                    replicas,
                    hotter,
                    self.destination.uuid,
                    self._source.sessions(run_key),
                    None if self._wanted is None else self._wanted(name),
                )
                with self._changed:
                    self._done |= replicas.get(self.destination.uuid, {}).keys()  # others copy, too
                    self._passed_over |= {item.entry.checkpoint: item for item in owed if item.why}
                    self._changed.notify_all()
                found += [(name, run_key, item) for item in owed]
        return found

    def run_once(self, runs: Runs = None) -> Report:
        """Copies what is owed now; one that fails does not stop the others, unless the tier is away.

        Args:
            runs: only of these; all unless given.

        Raises:
            BackendError: a tier does not answer at all.
        """
        started = self._environment.monotonic()
        owing = self.owing(runs)
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
        self._behind = {name for name, _, _ in todo}
        if self._missed_notes:
            self._catch_up(_names(runs))
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
        done = {one.checkpoint for one in sent}
        self._behind = {name for name, _, item in todo if item.entry.checkpoint not in done}
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

    def _catch_up(self, runs: Collection[str] | None) -> None:
        """Retention policies that the tier missed, and notes about checkpoints that it has."""
        destination = self.destination
        others = [tier for tier in self._source.tiers if tier.uuid != destination.uuid]
        for tier in others:
            carry_policies(tier, destination, None)
        for name, run_key in self._source.run_names():
            there = self._source.replicas(run_key).get(destination.uuid, {})
            for tier in others if runs is None or name in runs else ():
                carry_policies(tier, destination, run_key)
                if there:
                    catch_up(tier, destination, run_key, there)
        self._missed_notes = runs is not None

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
        self._known[run_key] = Copy.of(self.destination, copied.contents)
        self._source.note_committed(self.destination, run_key, copied.contents.record.attempt)
        return copied

    def _bases(self, run_key: str, copy: Copy) -> list[Copy]:
        known = self._known.get(run_key)
        found = bases_of(self._source, self.destination, run_key, copy)
        if known is None:
            return found
        return [known, *(base for base in found if base.attempt != known.attempt)]

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


def _names(runs: Runs) -> Collection[str] | None:
    return [runs] if isinstance(runs, str) else runs


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
