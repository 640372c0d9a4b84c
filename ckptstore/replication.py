"""A store's copies of itself: what its tiers are owed, and bringing it to them."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence

from ckptstore.errors import (
    ConflictError,
    DamageError,
    DeadlineError,
    FormatTooNewError,
    SaveFailedError,
    UsageError,
)
from ckptstore.model.history import Entry
from ckptstore.model.retention import Candidate, decide
from ckptstore.replicate import fetch as fetching
from ckptstore.replicate import repair as repairing
from ckptstore.replicate.copying import Copied
from ckptstore.replicate.debt import Wanted
from ckptstore.replicate.pace import Saves
from ckptstore.replicate.replicator import STOP_SECONDS, Replicator
from ckptstore.replicate.reports import Report
from ckptstore.replicate.source import Source
from ckptstore.save.work import Progress
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


def wanted_in(source: Source, tier: Tier, run: str) -> Wanted | None:
    """What retention keeps of a run in a tier; None where it keeps all."""
    try:
        policy = source.keep_in(tier, run)
    except (DamageError, FormatTooNewError) as error:
        log.error("all of run %r is copied: %s", run, error.message)
        return None
    if policy is None:
        return None

    def wanted(entries: Sequence[Entry]) -> set[str]:
        candidates = [Candidate(entry) for entry in entries]
        return {
            decision.checkpoint
            for decision in decide(policy, candidates, tier.environment.now())
            if decision.keep
        }

    return wanted


class Replication:
    """The replicators of one open store, in this process.

    Args:
        source: the store.

    Attributes:
        saves: those that write now, which copies give way to.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.saves = Saves()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._replicators: dict[str, Replicator] = {}

    def to(self, tier: Tier) -> Replicator:
        """The replicator of a tier; a forked child has its own.

        Raises:
            UsageError: it is the first tier, where saves go.
        """
        if tier.uuid == self._source.tiers[0].uuid:
            raise UsageError(
                f"tier {tier.name!r} is where saves go: nothing is copied to it unasked",
                hint="`ckptstore fetch REF` fills it from a colder one",
            )
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._replicators = os.getpid(), {}
                self.saves = Saves()  # the parent's were not this process's
            if tier.uuid not in self._replicators:
                self._replicators[tier.uuid] = Replicator(
                    self._source,
                    tier,
                    wanted=functools.partial(wanted_in, self._source, tier),
                    saves=self.saves,
                )
            return self._replicators[tier.uuid]

    @property
    def required(self) -> list[Tier]:
        """The tiers that checkpoints must reach, hottest first."""
        return [tier for tier in self._source.tiers[1:] if tier.requirement != "manual"]

    @property
    def must_reach(self) -> bool:
        """Whether a save counts only when it is in further tiers, too."""
        return any(tier.requirement == "commit" for tier in self.required)

    # --- by hand --------------------------------------------------------------------------------

    def run(self, to: Sequence[Tier] = (), run: str | None = None) -> list[Report]:
        """Copies what is owed, to these tiers or to all that require it; one round.

        Raises:
            BackendError: a tier does not answer.
        """
        return [self.to(tier).run_once(run) for tier in to or self.required]

    def fetch(self, run_key: str, entry: Entry, progress: Progress | None = None) -> Copied | None:
        """Copies a checkpoint to the first tier; see :func:`ckptstore.replicate.fetch.fetch`."""
        return fetching.fetch(self._source, run_key, entry, progress)

    def plan_repairs(self, tier: Tier, checkpoints: Collection[str] | None = None) -> list[repairing.Repair]:
        """What is marked damaged in a tier; see :func:`ckptstore.replicate.repair.plan`."""
        return repairing.plan(self._source, tier, checkpoints)

    def repair(
        self,
        tier: Tier,
        checkpoints: Collection[str] | None = None,
        new_progress: Callable[[], Progress] = Progress,
    ) -> repairing.RepairReport:
        """Repairs what is marked damaged; see :func:`ckptstore.replicate.repair.carry_out`."""
        return repairing.carry_out(self._source, tier, checkpoints, new_progress)

    # --- while a training goes on ---------------------------------------------------------------

    def committed(self, run: str) -> None:
        """A checkpoint of a run was committed: copying begins in the background."""
        for tier in self.required:
            self.to(tier).wake(run)

    def wait_required(self, checkpoint: str, what: str, seconds: float, *, run: str | None = None) -> None:
        """Waits until a checkpoint is in every tier that a save must reach to count as committed.

        Args:
            run: whose it is; None looks through all.

        Raises:
            SaveFailedError: it is not in `seconds` in all; it stays owed, and restorable from the first tier.
        """
        left = _left(seconds)
        for tier in self.required:
            if tier.requirement == "commit" and not self.to(tier).wait_for(checkpoint, left(), run=run):
                owed = self.to(tier).passed_over(checkpoint)
                if owed is not None and not owed.is_damaged:
                    log.warning("%s is not copied to tier %s: %s", what, tier.name, owed.why)
                    continue
                last = self.to(tier).last_error
                raise SaveFailedError(
                    f"{what} is committed in tier {self._source.tiers[0].name!r}, and not in "
                    f"{tier.name!r} after {seconds:g} s" + ("" if last is None else f": {last.message}"),
                    hint="copying goes on; `ckptstore status` shows what is owed",
                )

    def wait_for(
        self,
        checkpoint: str,
        tier: Tier | None,
        timeout: float | None,
        what: str,
        *,
        run: str | None = None,
        copies: bool = True,
    ) -> None:
        """Waits until a checkpoint is in a tier, or in all that require it.

        Args:
            timeout: seconds in all; None waits without end.
            run: whose it is; None looks through all.
            copies: this process does; of several ranks only rank 0.

        Raises:
            DeadlineError: not in `timeout` seconds; copying goes on.
            ConflictError: nothing copies it there, or it is passed over.
        """
        wanted = self.required if tier is None else [tier]
        left = _left(timeout)
        for each in wanted:
            if each.requirement == "manual":
                raise ConflictError(
                    f'nothing is copied to tier {each.name!r} unasked: it has replicate = "manual"',
                    hint="`ckptstore replicate --to` copies by hand",
                )
            replicator = self.to(each)
            wait = replicator.wait_for if copies else replicator.watch_for
            if not wait(checkpoint, left(), run=run):
                owed = replicator.passed_over(checkpoint)
                if owed is not None:
                    raise ConflictError(
                        f"{what} is not copied to tier {each.name!r}: {owed.why}",
                        hint="`ckptstore status` shows what is where",
                    )
                last = replicator.last_error
                raise DeadlineError(
                    f"{what} is not in tier {each.name!r} after {timeout} s"
                    + ("" if last is None else f": {last.message}"),
                    hint="copying goes on",
                )

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is owed, or a tier fails; whether nothing is owed.

        Args:
            timeout: seconds, for all tiers together; without it as long as something moves, see
                :meth:`ckptstore.replicate.replicator.Replicator.drain`.
        """
        if self._pid != os.getpid():
            return True
        left = _left(timeout)
        behind = [each for each in list(self._replicators.values()) if not each.drain(left())]
        for replicator in behind:
            self._say_owed(replicator, "is still owed")
        return not behind

    def stop(self, timeout: float | None = STOP_SECONDS) -> None:
        """Ends what runs in the background; what is owed stays owed.

        Args:
            timeout: seconds, for all tiers together; None waits without end. What has not ended by then is
                left to itself: it ends with the process, and a later call copies with a thread of its own.
        """
        if self._pid != os.getpid():
            return
        left = _left(timeout)
        for uuid, replicator in list(self._replicators.items()):
            if not replicator.stop(left()):
                self._say_owed(replicator, "does not answer, a copy to it is broken off; it is owed")
                with self._lock:
                    self._replicators.pop(uuid, None)

    def _say_owed(self, replicator: Replicator, what: str) -> None:
        last = replicator.last_error
        log.error(
            "tier %s %s checkpoints (%s): the next session or `ckptstore replicate` pays%s",
            replicator.destination.name,
            what,
            "not counted yet" if replicator.owed is None else replicator.owed,
            "" if last is None else f"; last it said: {last.message}",
        )


def _left(timeout: float | None) -> Callable[[], float | None]:
    """What is left of a time-out that begins now, in seconds; None of none."""
    end = None if timeout is None else time.monotonic() + timeout
    return lambda: None if end is None else max(0.0, end - time.monotonic())
