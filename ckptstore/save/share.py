"""One rank's share of an attempt: what it wrote, as the part that it tells."""

from __future__ import annotations

import numpy as np

from ckptstore.model.ids import Attempt
from ckptstore.save.agree import Bools
from ckptstore.save.flatten import FlatState
from ckptstore.save.parts import COMPARED, LEFT, WRITTEN, Part
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.write import write_chunks
from ckptstore.tier.tier import Tier


def write_part(
    tier: Tier,
    attempt: Attempt,
    rank: int,
    flat: FlatState,
    index: ReuseIndex,
    share: tuple[Bools, Bools] | None = None,
) -> Part:
    """Writes or reuses what a rank has to; it is durable on return.

    Args:
        share: bool, (chunks,) each: what this rank writes, and what it only compares; it writes everything
            if not given.
    """
    writer = write_chunks(tier, index, str(attempt), rank, flat, share)
    tier.backend.sync()
    keys = writer.key_list()
    locations = writer.locations(keys)
    state = np.full(len(flat.layout.chunks), WRITTEN, np.uint8)
    if share is not None:
        duty, compare = share
        state[~duty] = np.where(compare[~duty], COMPARED, LEFT)
    return Part(
        rank=rank,
        step=attempt.step,
        counter=attempt.number,
        error=None,
        layout=flat.layout,
        state=state,
        digests=writer.digests,
        objects=locations.object,
        offsets=locations.offset,
        keys=keys,
        tree=flat.tree,
        components=flat.components,
        may_differ=flat.may_differ,
    )
