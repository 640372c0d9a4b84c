"""Storing the tables of a record: inside it when small, else as chunks of their own."""

from __future__ import annotations

from ckptstore.backend import Backend
from ckptstore.model.ids import chunk_key, digest_of
from ckptstore.model.layout import Layout
from ckptstore.model.record import TablePiece, TableRef
from ckptstore.save.reuse import ReuseIndex

INLINE_BYTES = 64 << 10


class TableWriter:
    """Puts tables; pieces that a pinned checkpoint has already are taken from there.

    Attributes:
        object_sizes: key -> bytes of the pieces that the tables so far need.
    """

    def __init__(
        self, backend: Backend, index: ReuseIndex, attempt: str, rank: int, chunk_bytes: int
    ) -> None:
        self._backend = backend
        self._index = index
        self._attempt = attempt
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self.object_sizes: dict[str, int] = {}

    def write_layout(self, layout: Layout, before: TableRef | None) -> TableRef:
        """The layout's table; not made again where `before` is of the same layout and is still there."""
        if before is not None and layout.has_digest(before.digest):
            keys = [self._index.table_piece(piece.digest) for piece in before.pieces]
            pieces = [
                TablePiece(piece.digest, key, piece.size_bytes)
                for piece, key in zip(before.pieces, keys, strict=True)
                if key is not None
            ]
            if len(pieces) == len(before.pieces):
                self.object_sizes.update((piece.key, piece.size_bytes) for piece in pieces)
                return TableRef(before.digest, before.size_bytes, before.inline, tuple(pieces))
        ref = self.write(layout.encode())
        layout.keep_digest(ref.digest)
        return ref

    def write(self, data: bytes) -> TableRef:
        """Stores one table; never packed, so that an unchanged piece is stored once."""
        digest = digest_of(data)
        if len(data) < INLINE_BYTES:
            return TableRef(digest, len(data), data)
        view = memoryview(data)
        pieces = []
        for start in range(0, len(data), self._chunk_bytes):
            part = view[start : start + self._chunk_bytes]
            name = digest_of(part)
            key = self._index.table_piece(name)
            if key is None:
                key = chunk_key(name, self._attempt, self._rank)
                if key not in self.object_sizes:
                    self._backend.put(key, [part])
            self.object_sizes[key] = len(part)
            pieces.append(TablePiece(name, key, len(part)))
        return TableRef(digest, len(data), None, tuple(pieces))
