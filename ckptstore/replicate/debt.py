"""What a tier is owed: checkpoints committed in a hotter tier, required here, not here yet. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ckptstore.errors import DamageError
from ckptstore.model.history import Entry, effective_order
from ckptstore.model.record import EpochDoc

Wanted = Callable[[Sequence[Entry]], set[str]]
"""Ids that a tier's own retention would keep, of a run's entries from oldest to newest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Owed:
    """A checkpoint that a tier does not have yet.

    Attributes:
        entry: its record in the hottest tier that has it good.
        source: uuid of that tier.
        why: empty, or why it is not copied all the same.
        is_damaged: that is why.
    """

    entry: Entry
    source: str
    why: str = ""
    is_damaged: bool = False

    @property
    def exit_code(self) -> int:
        """Of a command that found it; 0 where nothing is wrong."""
        return DamageError.exit_code if self.is_damaged else 0


def _has_less(entry: Entry, copy: Entry) -> bool:
    return not copy.facts.damaged and bool(set(entry.trimmed) - set(copy.trimmed))


def debt(
    replicas: Mapping[str, Mapping[str, Entry]],
    hotter: Sequence[str],
    destination: str,
    epochs: Sequence[EpochDoc],
    wanted: Wanted | None = None,
) -> list[Owed]:
    """What a tier is owed of one run, newest first; what is passed over comes with its reason.

    Args:
        replicas: tier uuid -> checkpoint id -> the record that counts there.
        hotter: uuids of the tiers before the destination, hottest first.
        destination: uuid of the tier.
        epochs: the run's sessions.
        wanted: of all that would be there, what the destination's own retention keeps; None keeps all.
    """
    there = replicas.get(destination, {})
    owed: dict[str, Owed] = {}
    for uuid in hotter:
        for checkpoint, entry in replicas.get(uuid, {}).items():
            copy = there.get(checkpoint)
            found = owed.get(checkpoint)
            is_better = found is None or (found.entry.facts.damaged and not entry.facts.damaged)
            if not is_better or entry.facts.doomed or entry.facts.forgotten:
                continue
            # A later generation is copied, too; a damaged one is not replaced by the same again: that is what
            # `repair` does. One that only has less is not: each tier trims by itself, as it deletes.
            if copy is None or (copy.generation < entry.generation and not _has_less(entry, copy)):
                why = "" if not entry.facts.damaged else f"damaged: {entry.facts.damaged_reason}"
                if not why and entry.facts.invalid_reason is not None:
                    why = f"invalid: {entry.facts.invalid_reason}"
                owed[checkpoint] = Owed(entry, uuid, why, entry.facts.damaged)
    ordered = effective_order([item.entry for item in owed.values()], epochs)
    if wanted is not None:
        would_be = {**there, **{checkpoint: item.entry for checkpoint, item in owed.items() if not item.why}}
        kept = wanted(effective_order(list(would_be.values()), epochs))
        for checkpoint, item in owed.items():
            if not item.why and checkpoint not in kept:
                owed[checkpoint] = dataclasses.replace(item, why="superseded: its retention keeps newer ones")
    return [owed[entry.checkpoint] for entry in reversed(ordered)]
