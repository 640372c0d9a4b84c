"""What the capture tests share: pieces of a state, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptstore.save.capture import Waves
from ckptstore.save.cut import Bundle, Cut, Share, cut
from ckptstore.save.flatten import FlatState, flatten_state

CHUNK_BYTES = 256 << 10


def flat_of(state: Mapping[str, Any], chunk_bytes: int = CHUNK_BYTES) -> FlatState:
    return flatten_state(state, chunk_bytes)


def pieces_of(state: Mapping[str, Any] | FlatState, chunk_bytes: int = CHUNK_BYTES) -> list[Cut]:
    flat = state if isinstance(state, FlatState) else flat_of(state, chunk_bytes)
    return list(cut(flat.layout, flat.sources, Share.everything(flat.layout)))


def bytes_of(pieces: Iterable[Cut]) -> dict[int, bytes]:
    """Row -> the bytes of that chunk."""
    found: dict[int, bytes] = {}
    for piece in pieces:
        parts = piece.parts() if isinstance(piece, Bundle) else (piece.data(),)
        found |= {piece.row + number: bytes(part) for number, part in enumerate(parts)}
    return found


def written(waves: Waves) -> dict[int, bytes]:
    """What a writer would store, by row."""
    found: dict[int, bytes] = {}
    for pieces in waves:
        assert [piece.row for piece in pieces] == sorted(piece.row for piece in pieces)
        found |= bytes_of(pieces)
    return found


def rows(pieces: Sequence[Cut]) -> list[int]:
    return [piece.row for piece in pieces]
