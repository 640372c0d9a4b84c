"""The arithmetic of :mod:`ckptstore.model.boxes` on columns: millions of boxes without an object for each.

Boxes are rows of two int64 arrays, offsets and sizes, both (n, ndim), non-negative and inside of their
tensors; `cells` and `shapes` have the cell and the shape of each row's tensor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


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


def lines(offsets: Int64s, sizes: Int64s, cells: Int64s) -> tuple[Int64s, Int64s]:
    """Per row and dimension: the first cell that a box meets, and how many it meets; 0 where it is empty."""
    cells = np.maximum(cells, 1)
    first = offsets // cells
    met = (offsets + sizes - 1) // cells - first + 1
    met[sizes == 0] = 0
    return first, met


def pieces(offsets: Int64s, sizes: Int64s, cells: Int64s, most: int) -> Int64s:
    """int64, (n,): into how many pieces each box is cut.

    Raises:
        OverflowError: into more than `most` all together.
    """
    met = lines(offsets, sizes, cells)[1]
    # In floating point first: hostile sizes have products beyond 64 bits.
    if len(met) and float(met.astype(np.float64).prod(axis=1).sum()) > most:
        raise OverflowError(f"more than {most} chunks")
    found: Int64s = met.prod(axis=1)
    return found


def piece_numels(offsets: Int64s, sizes: Int64s, cells: Int64s, counts: Int64s) -> Int64s:
    """int64, (sum of counts,): elements of the pieces of all boxes, in table order.

    Args:
        counts: of :func:`pieces`.
    """
    whole = sizes.prod(axis=1)  # right for a box in one piece; the others follow
    out = np.repeat(whole, counts)
    many = counts > 1
    if not many.any():
        return out
    offsets, sizes, cells = offsets[many], sizes[many], cells[many]
    first, met = lines(offsets, sizes, cells)
    count = counts[many]
    left = spread(count)
    numels = np.ones(len(left), np.int64)
    for dim in reversed(range(offsets.shape[1])):
        met_here = np.repeat(met[:, dim], count)
        at = left % met_here
        left //= met_here
        line = (np.repeat(first[:, dim], count) + at) * np.repeat(cells[:, dim], count)
        begin = np.where(at == 0, np.repeat(offsets[:, dim], count), line)
        end = np.where(
            at == met_here - 1,
            np.repeat(offsets[:, dim] + sizes[:, dim], count),
            line + np.repeat(cells[:, dim], count),
        )
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
    present = (sizes != 0).all(axis=1)
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
    good = ~is_last | at_end.all(axis=1)
    good[:-1] &= is_last[:-1] | follows
    good &= ~is_first | (offsets == 0).all(axis=1)
    return np.unique(owner[~good])
