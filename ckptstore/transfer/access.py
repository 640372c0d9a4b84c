"""What a transfer needs of a checkpoint beyond its public face; nothing else here looks inside one."""

from __future__ import annotations

import contextlib

from ckptstore.checkpoint import Checkpoint
from ckptstore.tier.tier import Tier


def tier_of(checkpoint: Checkpoint) -> Tier:
    """The tier that it is read from."""
    return checkpoint._tier


def reading(checkpoint: Checkpoint) -> contextlib.AbstractContextManager[None]:
    """Holds it against garbage collection for as long as it is being read."""
    return checkpoint._reading()
