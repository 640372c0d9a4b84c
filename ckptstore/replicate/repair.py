"""Repair: a damaged record's next generation, from good copies, under new keys (DESIGN part 10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ckptstore.replicate.copying import Copied, copy_checkpoint
from ckptstore.save.work import Progress
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Repair:
    """One record to be replaced.

    Attributes:
        damaged: the record that is damaged.
        reason: what is wrong with it.
        sources: copies to read from, the best first; what one has not good comes from the next.
    """

    run: str
    step: int
    checkpoint: str
    damaged: Copy
    reason: str
    sources: tuple[Copy, ...]


def apply(repair: Repair, bases: Sequence[Copy] = (), progress: Progress | None = None) -> Copied:
    """Commits the next generation in the tier of the damaged record; that record is superseded by it.

    Bad objects stay where they are, named by damaged records only, so that nothing ever reuses them.

    Args:
        bases: good records of that tier, whose chunks may be reused.

    Raises:
        ChunkDamagedError: no copy has a chunk good; says which. Nothing was changed.
    """
    tier: Tier = repair.damaged.tier
    generation = 1 + max(copy.record.generation for copy in repair.sources)
    return copy_checkpoint(
        repair.sources, tier, kind="repair", generation=generation, bases=bases, progress=progress
    )
