"""How far apart two tensors are, added up block by block in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.model import numbers
from ckptstore.model.dtypes import DType

BLOCK_ELEMENTS = 1 << 16
"""A block and what is made of it stay in a core's cache."""

_TINY, _HUGE = 1e-100, 1e100


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One side of a comparison.

    Attributes:
        nan, inf: elements that are (complex: in either part).
        l2: norm of the finite elements.
        max_abs: the largest finite magnitude.
    """

    nan: int
    inf: int
    l2: float
    max_abs: float


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """Two tensors in numbers. Differences are taken where both sides are finite.

    Attributes:
        elements: of the second.
        differing: elements that are not equal; NaN equals NaN, and -0.0 equals 0.0. None where the shapes
            differ; so are all differences.
        differing_bytes: whether any stored byte differs, or dtype or shape.
        compared: elements that are finite on both sides.
        max_abs_diff, mean_abs_diff, l2_diff: over the compared ones.
    """

    elements: int
    differing: int | None
    differing_bytes: bool
    compared: int | None
    max_abs_diff: float | int | None
    mean_abs_diff: float | None
    l2_diff: float | None
    old: Summary
    new: Summary


class Accumulator:
    """Adds up pairs of blocks; :meth:`result` at the end."""

    def __init__(self, old: DType, new: DType) -> None:
        self._old, self._new = _Side(old), _Side(new)
        self._exact = numbers.is_exact_integer(old) and old == new
        self._same_dtype = old == new
        self._l2 = _Norm()
        self._elements = self._differing = self._compared = 0
        self._bytes_differ = not self._same_dtype
        self._sum = 0.0
        self._max: float | int = 0

    def add(self, old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8] | None) -> None:
        """The bytes of the same elements on both sides; None for `new`: equal to `old`."""
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are counted, not warned of
            self._add(old, new)

    def _add(self, old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8] | None) -> None:
        step = BLOCK_ELEMENTS
        for start in range(0, len(old) // self._old.itemsize, step):
            left = old[start * self._old.itemsize : (start + step) * self._old.itemsize]
            if new is None:
                self._add_equal(left)
                continue
            right = new[start * self._new.itemsize : (start + step) * self._new.itemsize]
            if self._same_dtype and np.array_equal(left, right):
                self._add_equal(left)
            else:
                self._bytes_differ = True
                self._add_block(left, right)

    def add_old(self, data: npt.NDArray[np.uint8]) -> None:
        """Bytes of the first side alone: the shapes differ."""
        self._add_alone(self._old, data)

    def add_new(self, data: npt.NDArray[np.uint8]) -> None:
        """Bytes of the second side alone."""
        self._elements += self._add_alone(self._new, data)

    @staticmethod
    def _add_alone(side: _Side, data: npt.NDArray[np.uint8]) -> int:
        step = BLOCK_ELEMENTS * side.itemsize
        with np.errstate(invalid="ignore", over="ignore"):
            return sum(len(side.add(data[start : start + step])[0]) for start in range(0, len(data), step))

    def _add_equal(self, data: npt.NDArray[np.uint8]) -> None:
        values, finite = self._old.add(data)
        self._new.copy_last(self._old)
        self._elements += len(values)
        self._compared += len(values) if finite is None else int(np.count_nonzero(finite))

    def _add_block(self, left: npt.NDArray[np.uint8], right: npt.NDArray[np.uint8]) -> None:
        a, finite_a = self._old.add(left)
        b, finite_b = self._new.add(right)
        self._elements += len(b)
        if finite_a is not None or finite_b is not None:
            both_nan = np.isnan(numbers.as_float(a)) & np.isnan(numbers.as_float(b))
            self._differing += int(np.count_nonzero((a != b) & ~both_nan))
            finite = _both(finite_a, finite_b)
            a, b = a[finite], b[finite]
        else:
            self._differing += int(np.count_nonzero(a != b))
        self._compared += len(a)
        if not len(a):
            return
        if self._exact:
            distance = _integer_distance(a, b)
            self._max = max(self._max, int(distance.max()))
            real = distance.astype(np.float64)
        else:
            real = np.abs(numbers.as_float(b) - numbers.as_float(a))
            self._max = max(self._max, float(real.max()))
        self._sum += float(real.sum())
        self._l2.add(real)

    def result(self, *, same_shape: bool) -> Statistics:
        """What has been added so far."""
        if not same_shape:
            return Statistics(
                self._elements, None, True, None, None, None, None, self._old.summary(), self._new.summary()
            )
        any_compared = self._compared > 0
        return Statistics(
            elements=self._elements,
            differing=self._differing,
            differing_bytes=self._bytes_differ,
            compared=self._compared,
            max_abs_diff=self._max if any_compared else None,
            mean_abs_diff=self._sum / self._compared if any_compared else None,
            l2_diff=self._l2.value if any_compared else None,
            old=self._old.summary(),
            new=self._new.summary(),
        )


class _Side:
    """Counts and norm of one side."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self.itemsize = dtype.itemsize
        self._nan = self._inf = 0
        self._norm = _Norm()
        self._max = 0.0
        self._last: tuple[int, int, npt.NDArray[Any]] = (0, 0, np.empty(0))

    def add(self, data: npt.NDArray[np.uint8]) -> tuple[numbers.Numbers, npt.NDArray[np.bool_] | None]:
        """The numbers, and which of them are finite; None when all are."""
        values = numbers.decode(data, self._dtype)
        finite: npt.NDArray[np.bool_] | None = None
        real = numbers.as_float(values)
        nan = inf = 0
        if values.dtype.kind in "fc":
            finite = np.isfinite(real)
            if finite.all():
                finite = None
            else:
                nan = int(np.count_nonzero(np.isnan(real)))
                inf = len(real) - int(np.count_nonzero(finite)) - nan
                real = real[finite]
        self._count(nan, inf, np.abs(real))
        return values, finite

    def copy_last(self, other: _Side) -> None:
        """The same block as the other side has just added."""
        self._count(*other._last)

    def _count(self, nan: int, inf: int, magnitude: npt.NDArray[Any]) -> None:
        self._last = (nan, inf, magnitude)
        self._nan += nan
        self._inf += inf
        if len(magnitude):
            self._max = max(self._max, float(magnitude.max()))
            self._norm.add(magnitude)

    def summary(self) -> Summary:
        return Summary(self._nan, self._inf, self._norm.value, self._max)


class _Norm:
    """A Euclidean norm that neither overflows nor underflows: squares are taken of x / scale."""

    def __init__(self) -> None:
        self._scale = 1.0
        self._total = 0.0

    def add(self, magnitudes: npt.NDArray[np.float64]) -> None:
        """More elements, none negative."""
        top = float(magnitudes.max())
        if top == 0.0 or math.isinf(self._total):
            return
        if math.isinf(top):
            self._total = math.inf
            return
        scale = 1.0 if _TINY < top < _HUGE else top
        scaled = magnitudes if scale == 1.0 else magnitudes / scale
        total = float(np.dot(scaled, scaled))
        if self._total == 0.0:
            self._scale, self._total = scale, total
        elif scale > self._scale:
            self._scale, self._total = scale, total + self._total * (self._scale / scale) ** 2
        else:
            self._total += total * (scale / self._scale) ** 2

    @property
    def value(self) -> float:
        return self._scale * math.sqrt(self._total)


def _both(a: npt.NDArray[np.bool_] | None, b: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_] | slice:
    if a is None or b is None:
        found = a if b is None else b
        return slice(None) if found is None else found
    return a & b


def _integer_distance(a: numbers.Numbers, b: numbers.Numbers) -> npt.NDArray[np.uint64]:
    """|a - b| of integers of one type, exactly: it always fits in 64 bits without a sign."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    left, right = a.astype(wide).view(np.uint64), b.astype(wide).view(np.uint64)
    return np.where(a > b, left - right, right - left)
