"""Which boxes of the logical tensor a DTensor's local part holds.

torch's own helpers give one offset and one size per rank, which is wrong where a shard is no rectangle
(``_StridedShard`` after a reshape holds rows 0, 4 and 8). So the boxes are computed here from mesh and
placements: per dimension, the indices that stay after each mesh dimension has taken its share.

Source of the rules: ``torch.chunk`` for ``Shard`` (pieces of ``ceil(n / k)``, the last ones short or
empty), and the left-to-right reading of ``_StridedShard`` given in its docstring.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UnsupportedValueError
from ckptstore.model.boxes import Box

Indices = npt.NDArray[np.int64]
LocalBox = tuple[Box, tuple[slice, ...]]


def is_dtensor(value: Any) -> bool:
    """Whether it is a DTensor; torch.distributed.tensor is not imported to find out."""
    return type(value).__module__.startswith("torch.distributed.tensor") and hasattr(value, "device_mesh")


def boxes_of(tensor: Any, where: str) -> list[LocalBox]:
    """The boxes of a DTensor's local part, and where each lies in it.

    Args:
        where: names the tensor in errors.

    Returns:
        Disjoint boxes in row-major order, with the slices of the local tensor that hold them; empty when
        this rank holds nothing of it.

    Raises:
        UnsupportedValueError: a ``Partial`` or unknown placement, by name.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    return local_boxes(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements, where)


def local_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    where: str,
) -> list[LocalBox]:
    """See :func:`boxes_of`; from plain numbers, so that any rank's boxes can be asked for."""
    splits = tuple(_split_of(placement, len(shape), where) for placement in placements)
    return list(_local_boxes(tuple(shape), tuple(mesh_shape), tuple(coordinate), splits))


def _split_of(placement: Any, ndim: int, where: str) -> tuple[int, int] | None:
    """(dimension, split factor); None if it cuts nothing. Placements themselves are equal too easily."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise UnsupportedValueError(
            f"{where} is a DTensor with the placement {placement!r}, whose value is spread over ranks",
            path=where,
            hint="redistribute it to Replicate() or Shard(...) before saving",
        )
    return placement.dim % max(ndim, 1), int(placement.split_factor) if kind == "_StridedShard" else 1


@functools.lru_cache(maxsize=4096)  # a model has thousands of DTensors, of a few shapes
def _local_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    splits: tuple[tuple[int, int] | None, ...],
) -> tuple[LocalBox, ...]:
    indices: list[Indices] = [np.arange(n, dtype=np.int64) for n in shape]
    for size, place, split in zip(mesh_shape, coordinate, splits, strict=True):
        if split is None:
            continue
        dim, factor = split
        pieces = [_chunk(part, size, place) for part in _chunks(indices[dim], factor)]
        indices[dim] = np.concatenate(pieces) if pieces else indices[dim][:0]
    spans = [_intervals(index) for index in indices]
    return tuple(
        (
            Box(tuple(start for start, _, _ in combination), tuple(size for _, size, _ in combination)),
            tuple(slice(local, local + size) for _, size, local in combination),
        )
        for combination in itertools.product(*spans)
    )


def _chunks(indices: Indices, count: int) -> list[Indices]:
    """As ``torch.chunk``: pieces of ceil(n / count), as many as there are."""
    size = -(-len(indices) // count) or 1
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _chunk(indices: Indices, count: int, number: int) -> Indices:
    size = -(-len(indices) // count)
    return indices[number * size : (number + 1) * size]


def _intervals(indices: Indices) -> list[tuple[int, int, int]]:
    """(start, size, position in the local tensor) of each run of consecutive indices."""
    if not len(indices):
        return []
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    starts = np.concatenate([[0], breaks])
    ends = np.concatenate([breaks, [len(indices)]])
    return [(int(indices[a]), int(b - a), int(a)) for a, b in zip(starts, ends, strict=True)]
