"""What tensors a layout has, apart from how they are cut into boxes.

Thousands of ranks hold the same tensors in other boxes: they share one of these.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from ckptstore.model import cuts
from ckptstore.model.boxes import Shape, cell_shape
from ckptstore.model.cuts import Bools, Int64s
from ckptstore.model.dtypes import DType

_MODEL = "model"


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

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """Bytes of each whole tensor."""
        return [math.prod(s) * dtype.itemsize for s, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @functools.cached_property
    def probably_trained(self) -> Bools:
        """bool, (tensors,): real and complex numbers of the model; of all components if none is called so."""
        inexact = np.array(
            [dtype.name.startswith(("float", "bfloat", "complex")) for dtype in self.dtypes], bool
        )
        of_model = np.array([component == _MODEL for component in self.components], bool)
        return inexact & of_model if of_model.any() else inexact

    @functools.cached_property
    def flat_shapes(self) -> Int64s:
        """int64: all shapes end to end."""
        return np.array([n for shape in self.shapes for n in shape], np.int64)

    @functools.cached_property
    def flat_shifts(self) -> Int64s:
        """int64: the cells end to end, as powers of two; UNCUT where the grid has no line in a tensor."""
        shifts: list[int] = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            # The cell of what takes at most half a chunk holds all of it.
            if 2 * math.prod(shape) * dtype.itemsize <= self.chunk_bytes:
                shifts += [cuts.UNCUT] * len(shape)
                continue
            cell = cell_shape(shape, dtype.itemsize, self.chunk_bytes)
            shifts += [
                cuts.UNCUT if step >= extent else step.bit_length() - 1
                for step, extent in zip(cell, shape, strict=True)
            ]
        return np.array(shifts, np.int64)

    def rows(self, flat: Int64s, tensors: Int64s, ndim: int) -> Int64s:
        """int64, (n, ndim): the entries of `flat_shapes` or `flat_shifts` of these tensors, all of `ndim`."""
        first = np.cumsum(self.ndim) - self.ndim
        entries: Int64s = flat[first[tensors][:, None] + np.arange(ndim)]
        return entries
