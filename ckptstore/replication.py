"""A store's copies of itself: what its tiers are owed, and bringing it to them."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterable, Sequence

from ckptstore.errors import ConflictError, DeadlineError, NotFoundError, SaveFailedError, UsageError
from ckptstore.model.history import Entry
from ckptstore.replicate import repair as repairing
from ckptstore.replicate.copying import Copied, copy_checkpoint
from ckptstore.replicate.replicator import MOST_BASES, Replicator, Report, Source
from ckptstore.save.work import Progress
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


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
                self._replicators[tier.uuid] = Replicator(self._source, tier)
            return self._replicators[tier.uuid]

    @property
    def _required(self) -> list[Tier]:
        return [tier for tier in self._source.tiers[1:] if tier.requirement != "manual"]

    # --- by hand --------------------------------------------------------------------------------

    def run(self, to: Sequence[Tier] = (), run: str | None = None) -> list[Report]:
        """Copies what is owed, to these tiers or to all that require it; one round.

        Raises:
            BackendError: a tier does not answer.
        """
        return [self.to(tier).run_once(run) for tier in to or self._required]

    def debt(self, tier: Tier) -> Debt:
        """What a tier is owed now, by the records of all tiers."""
        owing = [owed for _, _, owed in self.to(tier).owing()]
        due = [owed for owed in owing if not owed.why]
        oldest = min((owed.entry.created_at for owed in due), default=None)
        return Debt(len(due), oldest, len(owing) - len(due))

    def fetch(self, run_key: str, entry: Entry, progress: Progress | None = None) -> Copied | None:
        """Copies a checkpoint to the first tier; None when it is there.

        Raises:
            NotFoundError: no tier that answers has it.
            ChunkDamagedError: no copy has a chunk good.
        """
        hot = self._source.tiers[0]
        copies = self._source.copies_of(run_key, entry)
        if any(copy.tier.uuid == hot.uuid for copy in copies) and entry.tier == hot.uuid:
            return None
        copies = [copy for copy in copies if copy.tier.uuid != hot.uuid]
        if not copies:
            raise NotFoundError(f"checkpoint {entry.checkpoint} is in no tier that answers")
        return copy_checkpoint(copies, hot, bases=self._near(hot, run_key, entry), progress=progress)

    # --- repair ---------------------------------------------------------------------------------

    def plan_repairs(self, tier: Tier, runs: Iterable[tuple[str, str]]) -> list[repairing.Repair]:
        """What is marked damaged in a tier, and the copies that could mend it.

        Args:
            runs: (name, key) of the runs to look at.
        """
        self._source.refresh()
        found = []
        for name, run_key in runs:
            replicas = self._source.replicas(run_key)
            for entry in replicas.get(tier.uuid, {}).values():
                if not entry.facts.damaged or entry.facts.doomed:
                    continue
                damaged = Copy(tier, run_key, entry.attempt)
                others = [
                    Copy(other, run_key, replicas[other.uuid][entry.checkpoint].attempt)
                    for other in self._source.tiers
                    if other.uuid != tier.uuid and entry.checkpoint in replicas.get(other.uuid, {})
                ]
                # What is good of the damaged record need not come from far.
                found.append(
                    repairing.Repair(
                        name,
                        entry.step,
                        entry.checkpoint,
                        damaged,
                        entry.facts.damaged_reason or "damaged",
                        (*others, damaged),
                    )
                )
        return found

    def repair(self, plan: repairing.Repair, progress: Progress | None = None) -> Copied:
        """Carries out one repair; see :func:`ckptstore.replicate.repair.apply`."""
        tier, run_key = plan.damaged.tier, plan.damaged.run_key
        entry = self._source.replicas(run_key)[tier.uuid][plan.checkpoint]
        return repairing.apply(plan, self._near(tier, run_key, entry), progress)

    def _near(self, tier: Tier, run_key: str, entry: Entry) -> list[Copy]:
        """Good records of a tier that may share chunks with a checkpoint: the nearest in time."""
        there = self._source.replicas(run_key).get(tier.uuid, {}).values()
        good = [other for other in there if other.facts.restorable and other.checkpoint != entry.checkpoint]
        good.sort(key=lambda other: abs(other.created_at - entry.created_at))
        return [Copy(tier, run_key, other.attempt) for other in good[:MOST_BASES]]

    # --- while a training goes on ---------------------------------------------------------------

    def committed(self) -> None:
        """A checkpoint was committed: copying begins in the background."""
        for tier in self._required:
            self.to(tier).wake()

    def wait_required(self, checkpoint: str, what: str, seconds: float) -> None:
        """Waits until a checkpoint is in every tier that a save must reach to count as committed.

        Raises:
            SaveFailedError: it is not in `seconds`; it stays owed, and restorable from the first tier.
        """
        for tier in self._required:
            if tier.requirement == "commit" and not self.to(tier).wait_for(checkpoint, seconds):
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
            ConflictError: nothing copies it there.
        """
        wanted = self._required if tier is None else [tier]
        for each in wanted:
            if each.requirement == "manual":
                raise ConflictError(
                    f'nothing is copied to tier {each.name!r} unasked: it has replicate = "manual"',
                    hint="`ckptstore replicate --to` copies by hand",
                )
            replicator = self.to(each)
            if not replicator.wait_for(checkpoint, timeout):
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
        drained = [replicator.drain() for replicator in list(self._replicators.values())]
        return all(drained)

    def stop(self) -> None:
        """Ends what runs in the background; what is owed stays owed."""
        if self._pid == os.getpid():
            for replicator in list(self._replicators.values()):
                replicator.stop()
