"""The torch side: what a training is made of, as a tree that a checkpoint can hold.

Importing this package imports torch; ``import ckptstore`` alone does not.
"""

from ckptstore.torch.loader import ResumableLoader
from ckptstore.torch.sampler import ResumableSampler
from ckptstore.torch.train_state import TrainState

__all__ = ["ResumableLoader", "ResumableSampler", "TrainState"]
