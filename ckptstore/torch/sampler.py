"""A sampler that knows where it stands, in samples of the whole training, and can start there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.torch.permutation import Permutation, derive

logger = logging.getLogger(__name__)

STATE_FORMAT = 1
_BLOCK = 4096  # indices computed at once; small enough that the first batch comes at once
_WORKER_ITERATOR = "_MultiProcessingDataLoaderIter"


def distributed_place() -> tuple[int, int]:
    """``(rank, world size)`` as torch.distributed says, ``(0, 1)`` without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _read_ahead_by_workers() -> bool:
    # A DataLoader with workers asks for indices long before training sees their batch, and nothing tells
    # the sampler: without this look at who asks, it would save a position that is too far.
    frame = sys._getframe(1)
    for _ in range(12):
        caller = frame.f_back
        if caller is None:
            return False
        if type(caller.f_locals.get("self")).__name__ == _WORKER_ITERATOR:
            return True
        frame = caller
    return False


class ResumableSampler(Sampler[Any]):
    """Yields the indices of this rank, in an order that depends only on seed and epoch.

    The position is counted in *global* samples. In every global batch, sample ``k`` goes to rank
    ``k % world_size``; so a training that keeps its global batch sees the same batches, in the same order, on
    any number of ranks. Each iteration goes on at the position and ends with the epoch; after the last
    sample of an epoch the position is the start of the next one (there is no `set_epoch` to call).

    Use it as ``sampler=`` (it yields indices), or give `batch_size` and use it as ``batch_sampler=`` (it
    yields lists). The position is what has been handed out: right for a `DataLoader` without workers, too
    far for one with workers, whose `state_dict` is therefore refused. Use
    :class:`~ckptstore.torch.ResumableLoader` there.

    Args:
        dataset: the dataset, or its length.
        seed: decides all orders.
        shuffle: False for 0, 1, 2, ...
        batch_size: samples per rank and batch; then lists of indices are yielded.
        rank: of this process; by default what torch.distributed says.
        world_size: number of data-parallel ranks; by default what torch.distributed says.
        drop_last: leave out what does not fill a whole global batch (without `batch_size`: one sample for
            every rank) at the end of an epoch. Otherwise all ranks get equally many there: up to
            ``world_size - 1`` samples of the epoch come a second time.
        infinite: never end; batches go over the end of an epoch, and none is short.

    Raises:
        UsageError: an argument cannot be used.

    Example:
        >>> sampler = ResumableSampler(10, shuffle=False)
        >>> order = iter(sampler)
        >>> [next(order) for _ in range(3)]
        [0, 1, 2]
        >>> later = ResumableSampler(10, shuffle=False)
        >>> later.load_state_dict(sampler.state_dict())
        >>> next(iter(later))
        3
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        infinite: bool = False,
    ) -> None:
        here, world = distributed_place()
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.seed = seed
        self.shuffle = shuffle
        self.batch_size = batch_size
        self.rank = here if rank is None else rank
        self.world_size = world if world_size is None else world_size
        self.drop_last = drop_last
        self.infinite = infinite
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"seed={seed} must be in range(2**64)")
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size={batch_size} must be at least 1")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank={self.rank} must be in range({self.world_size}), the world size")
        smallest = self._unit if drop_last and not infinite else 1
        if self.length < smallest:
            raise UsageError(
                f"a dataset of {self.length} samples gives no batch: at least {smallest} are needed",
                hint="a smaller batch_size, or drop_last=False" if self.length else "the dataset is empty",
            )
        self._epoch = 0
        self._offset = 0
        self._generation = 0  # counts changes of the position from outside
        self._attached = False  # a ResumableLoader moves the position
        self._read_ahead = False
        self._orders: dict[int, Permutation] = {}

    # --- where it stands -----------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to, from 0."""
        return self._epoch

    @property
    def offset(self) -> int:
        """Global samples of this epoch that are behind."""
        return self._offset

    @property
    def global_position(self) -> int:
        """Global samples behind since the start, a whole epoch counting as the dataset's length."""
        return self._epoch * self.length + self._offset

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together take at a time."""
        return self._unit

    @property
    def _unit(self) -> int:
        return self.world_size * (self.batch_size or 1)

    def __len__(self) -> int:
        """Batches (without `batch_size`: indices) that a whole epoch has for this rank."""
        if self.infinite:
            raise TypeError("an infinite sampler has no length")
        size = self.batch_size or 1
        return (self._items_left(0) + size - 1) // size

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in.

        Raises:
            UsageError: a DataLoader with workers has read ahead, so the position is not what training saw.
        """
        if self._read_ahead:
            raise UsageError(
                "this sampler feeds a DataLoader with workers, which read ahead of the training: "
                "its position is not what has been trained on",
                hint="use ckptstore.torch.ResumableLoader in place of DataLoader, or num_workers=0",
            )
        return {
            "format": STATE_FORMAT,
            "epoch": self._epoch,
            "offset": self._offset,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "global_batch": self._unit,
        }

    def state_problems(self, state: Any) -> list[str]:
        """Why a saved position cannot be taken up here, one line each; empty if it can."""
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            return ["what was saved is not the state of a ResumableSampler of this format"]
        return [
            f"{key} was {state.get(key)!r}, here it is {getattr(self, key)!r}: it would mean other samples"
            for key in ("length", "seed", "shuffle")
            if state.get(key) != getattr(self, key)
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position, whatever the world size was.

        Raises:
            StateMismatchError: it is a position in another order; this sampler is unchanged.
        """
        problems = self.state_problems(state)
        if problems:
            raise StateMismatchError(
                "the data position does not fit: " + "; ".join(problems), problems=problems
            )
        if state["global_batch"] != self._unit:
            logger.warning(
                "the global batch was %d samples and is %d now: the order of samples stays, cut differently",
                state["global_batch"],
                self._unit,
            )
        self._seek(state["epoch"], state["offset"])

    def skip(self, samples: int) -> None:
        """Goes on as if the next `samples` global samples had been trained on.

        Raises:
            UsageError: the number is negative.
        """
        if samples < 0:
            raise UsageError(f"skip({samples}): cannot go back")
        epoch, offset = self._epoch, self._offset
        while samples:
            room = self._epoch_end(offset) - offset
            step = min(room, samples)
            samples -= step
            epoch, offset = self._normal(epoch, offset + step)
        self._seek(epoch, offset)

    def _seek(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        self._generation += 1
        self._read_ahead = False

    # --- arithmetic ----------------------------------------------------------------------------

    def _epoch_end(self, offset: int) -> int:
        """Where an epoch that has come to `offset` ends, in global samples."""
        if self.infinite or not self.drop_last:
            return self.length
        return offset + max(self.length - offset, 0) // self._unit * self._unit

    def _normal(self, epoch: int, offset: int) -> tuple[int, int]:
        """The same position, as the start of the next epoch when nothing of this one is left."""
        if self.infinite:
            return epoch + offset // self.length, offset % self.length
        return (epoch, offset) if offset < self._epoch_end(offset) else (epoch + 1, 0)

    def _items_left(self, offset: int) -> int:
        """Indices that this rank still gets in an epoch that has come to `offset`."""
        return -(-max(self._epoch_end(offset) - offset, 0) // self.world_size)

    def _after(self, epoch: int, offset: int, items: int) -> tuple[int, int]:
        """Where the training stands when every rank has taken `items` more indices."""
        return self._normal(epoch, offset + items * self.world_size)

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._orders:
            self._orders = {old: order for old, order in self._orders.items() if old == epoch - 1}
            self._orders[epoch] = Permutation(self.length, derive(self.seed, epoch))
        return self._orders[epoch]

    def _elements(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Dataset indices at `positions` of an epoch's order; beyond its end they wrap, or go to the next."""
        epochs, inside = positions // self.length, positions % self.length
        if not self.shuffle:
            return inside
        if not self.infinite or not epochs.any():
            return self._order(epoch)(inside)
        result = np.empty_like(inside)
        for ahead in np.unique(epochs):
            here = epochs == ahead
            result[here] = self._order(epoch + int(ahead))(inside[here])
        return result

    # --- handing out ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Goes on at the position; see the class."""
        return self._hand_out()

    def _hand_out(self) -> Iterator[Any]:
        generation = self._generation
        self._read_ahead = not self._attached and _read_ahead_by_workers()
        epoch, offset = self._normal(self._epoch, self._offset)
        for chunk in self._chunks(epoch, offset):
            if generation != self._generation:
                raise UsageError(
                    "the data position was changed while an iteration was under way",
                    hint="restore or skip before the loop, or begin a new one",
                )
            epoch, offset = self._after(epoch, offset, len(chunk))
            if not self._attached:
                self._epoch, self._offset = epoch, offset
            yield chunk if self.batch_size is not None else chunk[0]

    def _chunks(self, epoch: int, offset: int) -> Iterator[list[int]]:
        size = self.batch_size or 1
        left = None if self.infinite else self._items_left(offset)
        first = offset + self.rank
        block = max(min(_BLOCK, self.length) // size, 1) * size
        while left is None or left:
            count = block if left is None else min(block, left)
            elements = self._elements(
                epoch, first + self.world_size * np.arange(count, dtype=np.int64)
            ).tolist()
            for start in range(0, count, size):
                yield elements[start : start + size]
            first += self.world_size * count
            left = None if left is None else left - count
            if self.infinite:
                epoch, first = epoch + first // self.length, first % self.length
