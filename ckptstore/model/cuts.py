"""The arithmetic of :mod:`ckptstore.model.boxes` on columns: millions of boxes without an object for each.

Boxes are rows of two int64 arrays, offsets and sizes, both (n, ndim), non-negative and inside of their
tensors; `shapes` and `shifts` have the shape and the cell of each row's tensor. A cell is a power of two of
elements in every dimension that the grid cuts, so it is given by its exponent, and divided by shifting.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

UNCUT = 63
"""The shift of a dimension that the grid does not cut."""


def spread(counts: Int64s) -> Int64s:
    """``0 .. counts[0] - 1``, then ``0 .. counts[1] - 1``, and so on."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)


def starts(counts: Int64s) -> Int64s:
    """int64, (n + 1,): where each of `counts` items begins when they stand end to end."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def every(columns: Bools) -> Bools:
    """bool, (n,): true in all columns; numpy's ``all(axis=1)`` is slow where there are few."""
    out = np.ones(len(columns), bool)
    for column in columns.T:
        out &= column
    return out


def product(columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(n,): the product of all columns."""
    out = np.ones(len(columns), columns.dtype)
    for column in columns.T:
        out *= column
    return out


def lines(offsets: Int64s, sizes: Int64s, shifts: Int64s) -> tuple[Int64s, Int64s]:
    """Per row and dimension: the first cell that a box meets, and how many it meets; 0 where it is empty."""
    first = offsets >> shifts
    met = ((offsets + sizes - 1) >> shifts) - first + 1
    met[sizes == 0] = 0
    return first, met


def pieces(offsets: Int64s, sizes: Int64s, shifts: Int64s, most: int) -> Int64s:
    """int64, (n,): into how many pieces each box is cut.

    Raises:
        OverflowError: into more than `most` all together.
    """
    met = lines(offsets, sizes, shifts)[1]
    # In floating point first: hostile sizes have products beyond 64 bits.
    if len(met) and float(product(met.astype(np.float64)).sum()) > most:
        raise OverflowError(f"more than {most} chunks")
    return product(met)


def piece_numels(offsets: Int64s, sizes: Int64s, shifts: Int64s, counts: Int64s) -> Int64s:
    """int64, (sum of counts,): elements of the pieces of all boxes, in table order.

    Args:
        counts: of :func:`pieces`.
    """
    whole = product(sizes)  # right for a box in one piece; the others follow
    out = np.repeat(whole, counts)
    many = counts > 1
    if not many.any():
        return out
    offsets, sizes, shifts = offsets[many], sizes[many], shifts[many]
    first, met = lines(offsets, sizes, shifts)
    count = counts[many]
    left = spread(count)
    numels = np.ones(len(left), np.int64)
    for dim in reversed(range(offsets.shape[1])):
        met_here = np.repeat(met[:, dim], count)
        at = left % met_here
        left //= met_here
        shift = np.repeat(shifts[:, dim], count)
        cell = np.repeat(first[:, dim], count) + at
        begin = np.where(at == 0, np.repeat(offsets[:, dim], count), cell << shift)
        is_last = at == met_here - 1
        end = np.where(is_last, np.repeat(offsets[:, dim] + sizes[:, dim], count), (cell + 1) << shift)
        numels *= end - begin
    out[np.repeat(many, counts)] = numels
    return out


def tiles(owner: Int64s, offsets: Int64s, sizes: Int64s, shapes: Int64s) -> Int64s:
    """Tensors whose boxes are seen to cover them exactly once; of the others nothing is said.

    Seen are boxes that in the order of their offsets follow one another in slabs that are tiled alike: cut
    along one dimension, or by a mesh along several.

    Args:
        owner: tensor of each row, ascending.
    """
    present = every(sizes != 0)
    if not present.all():
        owner, offsets, sizes, shapes = owner[present], offsets[present], sizes[present], shapes[present]
    bad = _broken(owner, offsets, sizes, shapes)
    if len(bad):
        again = np.flatnonzero(np.isin(owner, bad))
        order = again[np.lexsort((*offsets[again].T[::-1], owner[again]))]
        bad = _broken(owner[order], offsets[order], sizes[order], shapes[order])
    return np.setdiff1d(owner, bad)


def _broken(owner: Int64s, offsets: Int64s, sizes: Int64s, shapes: Int64s) -> Int64s:
    """Tensors whose boxes, in the order given, do not follow one another in row-major order."""
    count, ndim = offsets.shape
    if not count:
        return owner
    ends = offsets + sizes
    at_end = ends == shapes
    follows = np.zeros(count - 1, bool)
    alike = np.ones(count - 1, bool)  # in the dimensions before
    for dim in range(ndim):
        steps = offsets[1:, dim] == ends[:-1, dim]
        for later in range(dim + 1, ndim):
            steps &= at_end[:-1, later] & (offsets[1:, later] == 0)
        follows |= alike & steps
        alike &= (offsets[1:, dim] == offsets[:-1, dim]) & (sizes[1:, dim] == sizes[:-1, dim])
    is_last = np.ones(count, bool)
    is_last[:-1] = owner[1:] != owner[:-1]
    is_first = np.ones(count, bool)
    is_first[1:] = is_last[:-1]
    good = ~is_last | every(at_end)
    good[:-1] &= is_last[:-1] | follows
    good &= ~is_first | every(offsets == 0)
    return np.unique(owner[~good])
