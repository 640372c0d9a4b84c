"""The torch side: what a training is made of, as a tree that a checkpoint can hold.

Importing this package imports torch; ``import ckptstore`` alone does not.
"""

from typing import TYPE_CHECKING, Any

from ckptstore.torch.loader import ResumableLoader
from ckptstore.torch.sampler import ResumableSampler
from ckptstore.torch.train_state import TrainState

if TYPE_CHECKING:
    from ckptstore.torch.dcp import StoreReader, StoreWriter

__all__ = ["ResumableLoader", "ResumableSampler", "StoreReader", "StoreWriter", "TrainState"]


def __getattr__(name: str) -> Any:
    # torch.distributed.checkpoint takes a second to import, and not every torch has it.
    if name in ("StoreReader", "StoreWriter"):
        from ckptstore.torch import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
