"""One rank's share of an attempt: what it wrote, as the part that it tells."""

from __future__ import annotations

import numpy as np

from ckptstore.save.parts import COMPARED, LEFT, WRITTEN, Part
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.work import Work
from ckptstore.save.write import write_chunks
from ckptstore.tier.tier import Tier


def write_part(tier: Tier, rank: int, work: Work, index: ReuseIndex) -> Part:
    """Writes or reuses what a rank has to; it is durable on return."""
    writer = write_chunks(tier, index, rank, work)
    tier.backend.sync()
    attempt, flat, share = work.attempt, work.flat, work.share
    keys = writer.places.key_list()
    locations = writer.places.locations(keys)
    state = np.where(share.duty, WRITTEN, np.where(share.compare, COMPARED, LEFT)).astype(np.uint8)
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
        plan=work.plan,
    )
