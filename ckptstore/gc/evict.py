"""Evicting: a round on a hot tier, with proof from a colder one *now* (DESIGN part 10).

The proof is not that a replication once ended. Each colder record is read, each object that it names is
asked for with its size, and a read intent holds it there until the hot copy is gone. Deletions never
propagate: what is evicted here stays everywhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from ckptstore.backend import ObjectInfo
from ckptstore.errors import (
    DamageError,
    FormatTooNewError,
    NotAnObjectError,
    ObjectNotFoundError,
)
from ckptstore.gc.collect import Report, collect
from ckptstore.gc.guards import KeepsRestorable, View
from ckptstore.model.ids import Attempt
from ckptstore.model.record import CommitRecord
from ckptstore.pool import Pool, default_threads
from ckptstore.tier import commits, layout, notes
from ckptstore.tier.contents import Contents
from ckptstore.tier.copies import Copy
from ckptstore.tier.intents import Intent, Pin
from ckptstore.tier.tier import Tier

KEPT = "kept: among the newest"
"""Why a record stays that was not to go."""

_MISSING_SHOWN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Eviction:
    """One record in the hot tier, and what is to become of it.

    Attributes:
        checkpoint: its id, the same in every tier.
        run_key, attempt: of the record in the hot tier.
        size_bytes: of all objects that it names; those that others name too are not freed.
        proof: (tier name, attempt) of the colder record that stands in for it; None: it stays.
        why: why it stays; empty if it goes.
    """

    run: str
    step: int
    checkpoint: str
    run_key: str
    attempt: str
    size_bytes: int
    proof: tuple[str, str] | None
    why: str

    @property
    def goes(self) -> bool:
        """Whether it is to be evicted."""
        return self.proof is not None and not self.why


@dataclasses.dataclass(frozen=True, slots=True)
class EvictPlan:
    """What an eviction would do; :func:`apply` does it.

    Attributes:
        tier: name of the hot tier.
        evictions: in the order in which they were asked for.
    """

    tier: str
    evictions: tuple[Eviction, ...]


def plan(
    tier: Tier,
    tiers: Sequence[Tier],
    wanted: Sequence[Sequence[Copy]],
    keep: Mapping[Pin, str] | None = None,
) -> EvictPlan:
    """Looks for a colder record for each checkpoint; writes nothing and asks for no object yet.

    Args:
        tier: the hot one.
        tiers: all of the store, hottest first: those after `tier` are colder, and only they are proof.
        wanted: of each checkpoint its copies; those in `tier` are to go.
        keep: (run key, attempt) in `tier` -> why it stays whatever proof there is.

    Raises:
        DamageError: a record in `tier` cannot be read.
    """
    uuids = [one.uuid for one in tiers]
    colder = set(uuids[uuids.index(tier.uuid) + 1 :])
    evictions = []
    for copies in wanted:
        # Of each tier the one that counts there: an older generation of it is about to go.
        first = {copy.tier.uuid: copy for copy in reversed(copies) if copy.tier.uuid in colder}
        proofs = [copy for copy in copies if copy in first.values()]
        for own in copies:
            if own.tier.uuid == tier.uuid:
                why = (keep or {}).get((own.run_key, own.attempt), "")
                evictions.append(_planned(own, proofs, why))
    return EvictPlan(tier.name, tuple(evictions))


def _planned(own: Copy, colder: Sequence[Copy], keep: str) -> Eviction:
    record, size, why = own.record, 0, keep
    try:
        size = sum(own.contents.object_sizes.values())
    except DamageError as error:  # a broken copy may go all the same, if the other one is whole
        why = why or ("" if colder else f"its own copy is damaged: {error.message}")
    proof = None
    reasons = []
    for copy in colder:
        problem = _problem(copy, record)
        if problem is None:
            proof = (copy.tier.name, copy.attempt)
            break
        reasons.append(f"in tier {copy.tier.name!r}: {problem}")
    if proof is None:
        why = why or "; ".join(reasons) or "no colder tier has it"
    return Eviction(
        run=record.run,
        step=record.step,
        checkpoint=record.checkpoint,
        run_key=own.run_key,
        attempt=own.attempt,
        size_bytes=size,
        proof=proof,
        why=why,
    )


def apply(tier: Tier, tiers: Sequence[Tier], plan: EvictPlan, *, reason: str = "evicted") -> Report:
    """Proves each colder record anew, holds it, and runs a round on the hot tier.

    Args:
        tiers: all of the store, to find those of the proofs in.

    Returns:
        The round's report; what lost its proof since it was planned is among those that stay.

    Raises:
        As :func:`ckptstore.gc.collect.collect`; and BackendError or PermissionDeniedError, with nothing
        deleted, where a colder tier cannot be asked or no read intent be written there.
    """
    by_name = {one.name: one for one in tiers}
    proofs: dict[Pin, _Proof] = {}
    with contextlib.ExitStack() as held:
        for eviction in plan.evictions:
            if eviction.goes and eviction.proof is not None:
                colder, attempt = eviction.proof
                own = Copy(tier, eviction.run_key, eviction.attempt)
                proof = _Proof(own, Copy(by_name[colder], eviction.run_key, attempt))
                held.enter_context(proof)
                proofs[eviction.run_key, eviction.attempt] = proof
        return collect(tier, proofs, reason=reason, guards=(ProvenElsewhere(proofs),))


class _Proof:
    """A colder record that stands in for a hot one, held by a read intent while it is entered."""

    def __init__(self, own: Copy, other: Copy) -> None:
        self._own = own
        self._other = other
        self._intent: Intent | None = None

    def __enter__(self) -> _Proof:
        tier, record = self._other.tier, self._own.record
        tier.check_marker()
        attempt = str(Attempt(tier.environment.new_ulid(), record.step, 1))
        pin = (self._other.run_key, self._other.attempt)
        self._intent = Intent.announce(tier, "read", attempt, record.run, [pin], "proof for evict")
        self._intent.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._intent is not None
        self._intent.stop()
        self._intent.remove()

    @functools.cached_property
    def missing(self) -> str | None:
        """What the colder record names and the tier does not have, asked once; None if all is there."""
        try:
            sizes = Contents(self._other.tier, self._fresh()).object_sizes
        except (DamageError, FormatTooNewError) as error:
            return error.message
        return _missing(self._other.tier, sizes)

    def problem(self) -> str | None:
        """Why it is no proof at this moment; None if it is one."""
        # The intent first, then the doom, then the record: as every reader does.
        if self._intent is None or not self._other.tier.exists(
            layout.intent_key(self._intent.document.attempt)
        ):
            return "it is not held there any more"
        problem = _problem(self._other, self._own.record) or self.missing
        return None if problem is None else f"in tier {self._other.tier.name!r}: {problem}"

    def _fresh(self) -> CommitRecord:
        return Copy(self._other.tier, self._other.run_key, self._other.attempt).record


class ProvenElsewhere:
    """A guard that lets go what a colder tier is proven to have; of anything else it keeps the last copy."""

    def __init__(self, proofs: Mapping[Pin, _Proof]) -> None:
        self._proofs = proofs
        self._otherwise = KeepsRestorable()

    def before_doom(self, view: View, target: Pin) -> str | None:
        """See :class:`ckptstore.gc.guards.Guard`."""
        return (
            self._asked(view, target) if target in self._proofs else self._otherwise.before_doom(view, target)
        )

    def before_gone(self, view: View, target: Pin) -> str | None:
        """See :class:`ckptstore.gc.guards.Guard`."""
        return (
            self._asked(view, target) if target in self._proofs else self._otherwise.before_gone(view, target)
        )

    def _asked(self, view: View, target: Pin) -> str | None:
        return self._proofs[target].problem()


def _problem(copy: Copy, own: CommitRecord) -> str | None:
    """Why a record cannot stand in for `own`, looked at now and without its objects; None if it can."""
    tier, pin = copy.tier, (copy.run_key, copy.attempt)
    if tier.exists(layout.doom_key(*pin)):
        return "it is being deleted there"
    try:
        record = commits.read_commit(tier, *pin)
    except (DamageError, FormatTooNewError) as error:
        return error.message
    if not isinstance(record, CommitRecord):
        return "it is gone there"
    if notes.is_damaged(tier, copy.run_key, record):
        return "it is damaged there"
    same = ("layout", "tree", "digests")
    # One that has lost fewer components holds all that this one has, in tables of its own.
    has_more = set(record.trimmed) < set(own.trimmed)
    if record.checkpoint != own.checkpoint or not (
        has_more or all(record.tables[name].digest == own.tables[name].digest for name in same)
    ):
        return "its content there is not the same"
    return None


def _missing(tier: Tier, sizes: Mapping[str, int]) -> str | None:
    """What of these objects is not there with its size; None if all are."""
    wrong: list[str] = []

    def look(key: str, size_bytes: int) -> None:
        try:
            found: ObjectInfo = tier.backend.head(key)
        except (ObjectNotFoundError, NotAnObjectError):
            wrong.append(f"{key} is missing")
            return
        if found.size_bytes != size_bytes:
            wrong.append(f"{key} has {found.size_bytes} bytes instead of {size_bytes}")

    with Pool(default_threads(tier.backend.capabilities.concurrency), name="ckptstore-evict") as pool:
        for key, size_bytes in sizes.items():
            pool.submit(look, key, size_bytes)
        pool.drain()
    if not wrong:
        return None
    more = f" and {len(wrong) - _MISSING_SHOWN} more" if len(wrong) > _MISSING_SHOWN else ""
    return "; ".join(sorted(wrong)[:_MISSING_SHOWN]) + more
