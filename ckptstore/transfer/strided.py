"""Views of a larger storage in a file, read as if they were contiguous, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.model.boxes import Box

SPAN_BYTES = 16 << 20

ReadRange = Callable[[int, int], memoryview]


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements [start, stop), counted row-major, are made of; in that order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for box in boxes_of(shape[1:], start - first * inner, stop - first * inner):
            yield Box((first, *box.offsets), (1, *box.sizes))
        return
    if start % inner:
        yield from boxes_of(shape, start, (first + 1) * inner)
        first += 1
    whole = stop // inner
    if whole > first:
        yield Box((first, *(0 for _ in shape[1:])), (whole - first, *shape[1:]))
    if stop % inner:
        yield from boxes_of(shape, whole * inner, stop)


def read_strided(
    read: ReadRange,
    itemsize: int,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    span: tuple[int, int],
) -> memoryview:
    """Row-major bytes of a part of a strided view.

    Args:
        read: ranges of bytes of the storage.
        strides, offset: in elements.
        span: (start, stop), bytes of the view as if it were contiguous.
    """
    out = memoryview(bytearray(span[1] - span[0]))
    raw = np.frombuffer(out, arrays.raw_dtype(itemsize))
    position = 0
    for box in boxes_of(shape, span[0] // itemsize, span[1] // itemsize):
        target = raw[position : position + box.numel].reshape(box.sizes)
        first = offset + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        gather(read, target, first, strides)
        position += box.numel
    return out


def gather(read: ReadRange, target: npt.NDArray[np.generic], first: int, strides: Sequence[int]) -> None:
    """Fills `target` from a storage; halves what lies too far apart to be read at once.

    Args:
        first: the element of the storage that comes first.
        strides: there, in elements.
    """
    itemsize = target.dtype.itemsize
    reach = [(size - 1) * stride for size, stride in zip(target.shape, strides, strict=True)]
    count = 1 + sum(reach)
    if count * itemsize <= SPAN_BYTES or count == 1:
        data = np.frombuffer(read(first * itemsize, (first + count) * itemsize), target.dtype)
        steps = tuple(stride * itemsize for stride in strides)
        target[...] = np.lib.stride_tricks.as_strided(data, target.shape, steps)
        return
    dim = reach.index(max(reach))
    half = target.shape[dim] // 2
    low = tuple(slice(half) if i == dim else slice(None) for i in range(target.ndim))
    high = tuple(slice(half, None) if i == dim else slice(None) for i in range(target.ndim))
    gather(read, target[low], first, strides)
    gather(read, target[high], first + half * strides[dim], strides)
