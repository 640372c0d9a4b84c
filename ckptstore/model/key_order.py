"""The order of object keys, found on columns: as text, without making the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptstore.model.ids import DIGEST_BYTES

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

_TENS = 10 ** np.arange(1, 10, dtype=np.int64)


def sort_columns(
    digests: UInt8s, is_pack: Bools, attempt: Int64s, attempts: Sequence[str], rank: Int64s
) -> list[Words]:
    """What orders keys, most significant first; each uint64, (keys,).

    A key is ``chunks|packs / digits / digest . attempt . rank``. No attempt id begins another one that goes
    on with less than a dot, so their own order counts; ranks are compared as decimal text.

    Args:
        digests: (keys, 32).
        attempt: rows in `attempts`.
        rank: under 2**32.
    """
    words = np.ascontiguousarray(digests).view(">u8").reshape(len(digests), DIGEST_BYTES // 8)
    place_of = {name: i for i, name in enumerate(sorted(set(attempts)))}
    places = np.array([place_of[name] for name in attempts], np.uint64)
    digits = np.searchsorted(_TENS, rank, side="right")
    # 7, 70 and 71 sort as 7000000000, 7000000000 and 7100000000, the shorter first.
    aligned = rank.astype(np.uint64) * (10 ** (9 - digits)).astype(np.uint64)
    return [
        is_pack.astype(np.uint64),
        *(words[:, i].astype(np.uint64) for i in range(words.shape[1])),
        places[attempt] if len(attempt) else np.zeros(0, np.uint64),
        aligned * np.uint64(16) + digits.astype(np.uint64),
    ]


def argsort(order: Sequence[Words]) -> tuple[Int64s, Bools]:
    """The permutation that sorts by :func:`sort_columns`, and which rows of it repeat the one before."""
    pack, first = order[:2]
    found = np.lexsort((first, pack))
    repeats = np.zeros(len(found), bool)
    if len(found) < 2:
        return found, repeats
    # Digests hardly ever agree in 64 bits: the other columns are looked at where they do.
    tied = (first[found[1:]] == first[found[:-1]]) & (pack[found[1:]] == pack[found[:-1]])
    if tied.any():
        in_tie = np.zeros(len(found), bool)
        in_tie[1:] = tied
        in_tie[:-1] |= tied
        rows = found[in_tie]
        found[in_tie] = rows[np.lexsort([column[rows] for column in reversed(order)])]
        at = np.flatnonzero(in_tie[1:] & in_tie[:-1]) + 1
        here, before = found[at], found[at - 1]
        repeats[at] = np.logical_and.reduce([column[here] == column[before] for column in order])
    return found, repeats


def is_ascending(order: Sequence[Words]) -> bool:
    """Whether rows are sorted and no two are equal."""
    count = len(order[0])
    less, equal = np.zeros(max(count - 1, 0), bool), np.ones(max(count - 1, 0), bool)
    for column in order:
        less |= equal & (column[:-1] < column[1:])
        equal &= column[:-1] == column[1:]
        if not equal.any():
            break
    return bool(less.all())
