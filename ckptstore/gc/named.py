"""What live records name, so that it stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ckptstore.gc import listing
from ckptstore.model.record import CommitRecord
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier


def subtract(tier: Tier, garbage: dict[str, int], alive: Sequence[CommitRecord]) -> None:
    """Takes out of `garbage` what live records name.

    Raises:
        DamageError: what one of them names cannot be read.
    """
    if not garbage or not alive:
        return
    written_by = {key.split(".")[1] for key in garbage}

    def take_out(record: CommitRecord) -> None:
        for key in named_of(tier, record, written_by.__contains__):
            garbage.pop(key, None)

    listing.for_all(tier, alive, take_out)


def named_of(tier: Tier, record: CommitRecord, is_of: Callable[[str], bool]) -> Iterator[str]:
    """Keys that a record names, of objects that these attempts wrote; perhaps further ones.

    Args:
        is_of: attempt -> whether it is one of them.

    Raises:
        DamageError: its key list cannot be read.
    """
    keys = Contents(tier, record).keys
    rows = [row for row, attempt in enumerate(keys.attempts) if is_of(attempt)]
    if rows:
        yield from map(keys.key, np.flatnonzero(np.isin(keys.attempt, rows)).tolist())
    for ref in record.tables.values():
        yield from (piece.key for piece in ref.pieces)
