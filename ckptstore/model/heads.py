"""What tensors a layout has, apart from how they are cut into boxes.

Thousands of ranks hold the same tensors in other boxes: they share one of these.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

from ckptstore.model.boxes import Shape, cell_shape
from ckptstore.model.dtypes import DType

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Heads:
    """One entry per tensor, in the order of the layout.

    Attributes:
        aliases: further names of tensors that share their memory: (name, tensor index).
    """

    names: tuple[str, ...]
    components: tuple[str, ...]
    dtypes: tuple[DType, ...]
    kinds: tuple[str, ...]
    shapes: tuple[Shape, ...]
    aliases: tuple[tuple[str, int], ...]
    chunk_bytes: int

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def ndim(self) -> Int64s:
        """int64, (tensors,)."""
        return np.array([len(shape) for shape in self.shapes], np.int64)

    @functools.cached_property
    def itemsize(self) -> Int64s:
        """int64, (tensors,): bytes per element."""
        return np.array([dtype.itemsize for dtype in self.dtypes], np.int64)

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each whole tensor."""
        return [math.prod(s) * dtype.itemsize for s, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @functools.cached_property
    def flat_shapes(self) -> Int64s:
        """int64: all shapes end to end."""
        return np.array([n for shape in self.shapes for n in shape], np.int64)

    @functools.cached_property
    def flat_cells(self) -> Int64s:
        """int64: the grid's cells end to end; the shape itself where the grid has no line in a tensor."""
        cells: list[int] = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            # The cell of what takes at most half a chunk holds all of it.
            is_small = 2 * math.prod(shape) * dtype.itemsize <= self.chunk_bytes
            cells += shape if is_small else cell_shape(shape, dtype.itemsize, self.chunk_bytes)
        return np.array(cells, np.int64)

    @functools.cached_property
    def first_dim(self) -> Int64s:
        """int64, (tensors,): where a tensor's entries begin in `flat_shapes` and `flat_cells`."""
        return np.cumsum(self.ndim) - self.ndim

    def of_boxes(self, flat: Int64s, owner: Int64s, ndim: int) -> Int64s:
        """int64, (boxes, ndim): the entries of `flat_shapes` or `flat_cells` for each box's tensor."""
        entries: Int64s = flat[self.first_dim[owner][:, None] + np.arange(ndim)]
        return entries
