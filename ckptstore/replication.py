"""A store's copies of itself: what its tiers are owed, and bringing it to them."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence

from ckptstore.errors import ConflictError, DeadlineError, SaveFailedError, UsageError
from ckptstore.model.history import Entry
from ckptstore.model.retention import Candidate, decide
from ckptstore.replicate import fetch as fetching
from ckptstore.replicate import repair as repairing
from ckptstore.replicate.copying import Copied
from ckptstore.replicate.debt import Wanted
from ckptstore.replicate.replicator import Replicator
from ckptstore.replicate.rounds import Report, Source
from ckptstore.save.work import Progress
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


def _wanted(tier: Tier) -> Wanted | None:
    """What the tier's own retention keeps of a run; None where it keeps all."""
    policy = tier.retention
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


@dataclasses.dataclass(frozen=True, slots=True)
class Debt:
    """What one tier is owed.

    Attributes:
        checkpoints: how many are to be copied.
        oldest_at: when the longest owed one was committed, seconds since the epoch; None without debt.
        passed_over: how many are not copied, by reason (superseded, damaged, invalid).
    """

    checkpoints: int
    oldest_at: float | None
    passed_over: int


class Replication:
    """The replicators of one open store, in this process.

    Args:
        source: the store.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
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
            if tier.uuid not in self._replicators:
                self._replicators[tier.uuid] = Replicator(self._source, tier, wanted=_wanted(tier))
            return self._replicators[tier.uuid]

    @property
    def required(self) -> list[Tier]:
        """The tiers that checkpoints must reach, hottest first."""
        return [tier for tier in self._source.tiers[1:] if tier.requirement != "manual"]

    # --- by hand --------------------------------------------------------------------------------

    def run(self, to: Sequence[Tier] = (), run: str | None = None) -> list[Report]:
        """Copies what is owed, to these tiers or to all that require it; one round.

        Raises:
            BackendError: a tier does not answer.
        """
        return [self.to(tier).run_once(run) for tier in to or self.required]

    def debt(self, tier: Tier) -> Debt:
        """What a tier is owed now, by the records of all tiers."""
        owing = [owed for _, _, owed in self.to(tier).owing()]
        due = [owed for owed in owing if not owed.why]
        oldest = min((owed.entry.created_at for owed in due), default=None)
        return Debt(len(due), oldest, len(owing) - len(due))

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

    def committed(self) -> None:
        """A checkpoint was committed: copying begins in the background."""
        for tier in self.required:
            self.to(tier).wake()

    def wait_required(self, checkpoint: str, what: str, seconds: float) -> None:
        """Waits until a checkpoint is in every tier that a save must reach to count as committed.

        Raises:
            SaveFailedError: it is not in `seconds`; it stays owed, and restorable from the first tier.
        """
        for tier in self.required:
            if tier.requirement == "commit" and not self.to(tier).wait_for(checkpoint, seconds):
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

    def wait_for(self, checkpoint: str, tier: Tier | None, timeout: float | None, what: str) -> None:
        """Waits until a checkpoint is in a tier, or in all that require it.

        Raises:
            DeadlineError: not in `timeout` seconds; copying goes on.
            ConflictError: nothing copies it there, or it is passed over.
        """
        wanted = self.required if tier is None else [tier]
        for each in wanted:
            if each.requirement == "manual":
                raise ConflictError(
                    f'nothing is copied to tier {each.name!r} unasked: it has replicate = "manual"',
                    hint="`ckptstore replicate --to` copies by hand",
                )
            replicator = self.to(each)
            if not replicator.wait_for(checkpoint, timeout):
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

    def drain(self) -> bool:
        """Waits until nothing is owed, or a tier fails; whether nothing is owed."""
        if self._pid != os.getpid():
            return True
        behind = [each for each in list(self._replicators.values()) if not each.drain()]
        for replicator in behind:
            log.warning(
                "tier %s is still owed checkpoints (%s): the next session or `ckptstore replicate` pays",
                replicator.destination.name,
                "not counted yet" if replicator.owed is None else replicator.owed,
            )
        return not behind

    def stop(self) -> None:
        """Ends what runs in the background; what is owed stays owed."""
        if self._pid == os.getpid():
            for replicator in list(self._replicators.values()):
                replicator.stop()
