"""A permutation of ``range(n)`` that depends only on its key and is cheap for any n.

Up to :data:`SORT_LIMIT` elements are ordered by a 64-bit hash of their number. Above, nothing of size n
is made: a balanced Feistel network permutes the next power of four, and what falls outside ``range(n)``
is put through it again until it falls inside ("cycle walking": Black and Rogaway, *Ciphers with
Arbitrary Finite Domains*, CT-RSA 2002); fewer than four passes on average. The hash is SplitMix64's
finalizer (Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014).

The order is part of what a checkpoint means, so nothing here may change: it does not depend on torch's
or NumPy's generators, whose streams may.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

SORT_LIMIT: Final = 1 << 18
_ROUNDS: Final = 8
_GAMMA: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def mix(values: U64) -> U64:
    """SplitMix64's finalizer, element by element."""
    values = values.copy()
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def derive(*numbers: int) -> int:
    """One 64-bit key from several integers in ``range(2**64)``."""
    key = 0
    for number in numbers:
        word = np.array([(key * 3 + number + _GAMMA) & _MASK], dtype=np.uint64)
        key = int(mix(word)[0])
    return key


class Permutation:
    """A bijection of ``range(length)``.

    Args:
        length: number of elements, at least 1 and below 2**62.
        key: any 64-bit number; equal keys give equal permutations, everywhere and for ever.
    """

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        self.key = key
        self._table: npt.NDArray[np.int64] | None = None
        if length <= SORT_LIMIT:
            hashes = mix(np.arange(1, length + 1, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(key))
            self._table = np.argsort(hashes, kind="stable")
        half_bits = ((length - 1).bit_length() + 1) // 2
        self._half = np.uint64(half_bits)
        self._low = np.uint64((1 << half_bits) - 1)
        self._round_keys = [np.uint64(derive(key, number)) for number in range(_ROUNDS)]

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The elements at `positions`: int64, each in ``range(length)``."""
        if self._table is not None:
            return self._table[positions]
        values = self._feistel(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:
            values[outside] = self._feistel(values[outside])
            outside = outside[values[outside] >= np.uint64(self.length)]
        return values.astype(np.int64)

    def _feistel(self, values: U64) -> U64:
        left, right = values >> self._half, values & self._low
        for round_key in self._round_keys:
            left, right = right, left ^ (mix(right + round_key) & self._low)
        return (left << self._half) | right
