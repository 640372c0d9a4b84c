"""What a rank holds of a logical tensor: DTensors, and explicit shards for everybody else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ckptstore import arrays, dtensors
from ckptstore.errors import UnsupportedValueError
from ckptstore.model.boxes import Box, Shape
from ckptstore.model.plain import StatePath, show_path

Part = tuple[Box, Any]
"""A box in global indices, and the array of its shape that holds it."""


class LocalShard:
    """This rank's rectangle of a tensor that several ranks hold together.

    Works with numpy, torch, JAX (through numpy) and any launcher: no torch.distributed is needed. A list of
    LocalShards of one global shape stands for several rectangles of one tensor.

    Args:
        array: the elements, of any strides.
        global_shape: of the whole tensor.
        offsets: where `array` begins in it, one per dimension.

    Raises:
        UnsupportedValueError: the array does not lie inside the global shape.

    Example:
        >>> state = {"model": {"w": ckptstore.LocalShard(rows, global_shape=(24, 8), offsets=(3 * rank, 0))}}
    """

    is_shard_of_tensor = True

    def __init__(self, array: Any, *, global_shape: Sequence[int], offsets: Sequence[int]) -> None:
        if not arrays.is_array(array):
            raise UnsupportedValueError(
                f"LocalShard wants a numpy array or torch tensor, not {type(array).__name__}",
                hint="numpy.asarray(...) makes one of a JAX array",
            )
        self.array = array
        self.global_shape: Shape = tuple(int(n) for n in global_shape)
        self.box = Box(tuple(int(n) for n in offsets), tuple(int(n) for n in array.shape))
        inside = len(self.global_shape) == len(self.box.offsets) == len(self.box.sizes) and all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(self.box.offsets, self.box.sizes, self.global_shape, strict=True)
        )
        if not inside:
            raise UnsupportedValueError(
                f"a shard of shape {list(self.box.sizes)} at {list(self.box.offsets)} does not lie in "
                f"a tensor of shape {list(self.global_shape)}"
            )

    def __repr__(self) -> str:
        return f"LocalShard({list(self.box.sizes)} at {list(self.box.offsets)} of {list(self.global_shape)})"


@dataclasses.dataclass(frozen=True, slots=True)
class PerRank:
    """A value that every rank keeps its own of: each gets back what it saved.

    Attributes:
        value: any subtree of a state.
        key: whose value it is, if not the rank's: ranks that give the same key share one value.
    """

    value: Any
    key: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MayDiffer:
    """A replicated tensor whose bytes may differ between its holders by design, as BatchNorm's statistics.

    Attributes:
        value: the tensor; of several ranks' the lowest rank's is kept.
    """

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A tensor of which this rank holds some boxes.

    Attributes:
        array: the local array, for dtype and kind.
        parts: disjoint boxes with their arrays; none if this rank holds nothing of it.
    """

    array: Any
    shape: Shape
    parts: tuple[Part, ...]


def held_of(value: Any, path: StatePath) -> Held | None:
    """What is held of a sharded value; None for all else.

    Raises:
        UnsupportedValueError: a DTensor that cannot be stored, or shards that contradict each other.
    """
    if dtensors.is_dtensor(value):
        local = value.to_local()
        boxes = dtensors.boxes_of(value, show_path(path))
        return Held(local, tuple(value.shape), tuple((box, local[place]) for box, place in boxes))
    shards = _shards(value)
    if shards is None:
        return None
    shapes = {shard.global_shape for shard in shards}
    dtypes = {str(shard.array.dtype) for shard in shards}
    if len(shapes) > 1 or len(dtypes) > 1:
        where = show_path(path)
        raise UnsupportedValueError(
            f"{where}: its shards are of different tensors ({shapes or dtypes})", path=where
        )
    parts = tuple((shard.box, shard.array) for shard in shards if shard.box.numel)
    return Held(shards[0].array, shards[0].global_shape, parts)


def _shards(value: Any) -> list[LocalShard] | None:
    if isinstance(value, LocalShard):
        return [value]
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, LocalShard) for item in value):
        return list(value)
    return None
