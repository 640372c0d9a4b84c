"""The tables beside the layout: digests, locations and the list of objects that a record needs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptstore.errors import DocumentError
from ckptstore.model import columns
from ckptstore.model.ids import DIGEST_BYTES, Attempt, Digest, ObjectName
from ckptstore.model.layout import Layout

CODEC_RAW = 0

_KEY_COLUMNS = ("digest", "is_pack", "attempt", "rank", "size", "attempt_text", "attempt_ends")
_LOCATION_COLUMNS = ("object", "offset", "length", "codec")

Int64s = npt.NDArray[np.int64]


def encode_digests(digests: Sequence[bytes]) -> bytes:
    """One 32-byte digest per chunk, in table order."""
    return columns.encode_columns({"digest": np.frombuffer(b"".join(digests), "|u1")})


def decode_digests(data: bytes, count: int) -> list[Digest]:
    """The digests back.

    Raises:
        DocumentError: it is damaged or does not have `count` rows.
    """
    raw = columns.decode_columns(data, ("digest",), "digest table")["digest"].tobytes()
    if len(raw) != count * DIGEST_BYTES:
        raise DocumentError(
            f"digest table has {len(raw) // DIGEST_BYTES} rows, the layout has {count} chunks"
        )
    return [Digest(raw[i : i + DIGEST_BYTES]) for i in range(0, len(raw), DIGEST_BYTES)]


@dataclasses.dataclass(frozen=True, slots=True)
class KeyList:
    """Every object that holds a chunk of the checkpoint, sorted by key, each once.

    The tables' own pieces are named in the record itself: both together are what garbage collection
    keeps. (Listing them here too would make the location table depend on its own digest.)

    Attributes:
        keys: object keys.
        sizes: int64, bytes of each object.
    """

    keys: tuple[str, ...]
    sizes: Int64s

    @classmethod
    def of(cls, sizes: dict[str, int]) -> KeyList:
        """From key -> bytes."""
        keys = tuple(sorted(sizes))
        return cls(keys, np.array([sizes[key] for key in keys], np.int64))

    def encode(self) -> bytes:
        """The key list table: digests as bytes, attempts by number (docs/format.md)."""
        parsed = [ObjectName.parse(key) for key in self.keys]
        attempts = sorted({name.attempt for name in parsed})
        number = {attempt: i for i, attempt in enumerate(attempts)}
        text, ends = columns.encode_texts(attempts)
        return columns.encode_columns(
            {
                "digest": np.frombuffer(b"".join(name.digest for name in parsed), "|u1"),
                "is_pack": np.array([name.is_pack for name in parsed], "|u1"),
                "attempt": np.array([number[name.attempt] for name in parsed], "<u4"),
                "rank": np.array([name.rank for name in parsed], "<u4"),
                "size": self.sizes.astype("<i8"),
                "attempt_text": text,
                "attempt_ends": ends,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> KeyList:
        """Reads the table back.

        Raises:
            DocumentError: it is damaged, unsorted, or names an impossible key.
        """
        what = "key list"
        table = columns.decode_columns(data, _KEY_COLUMNS, what)
        attempts = columns.decode_texts(table["attempt_text"], table["attempt_ends"], what)
        sizes = table["size"].astype(np.int64)
        raw = table["digest"].tobytes()
        packs, numbers, ranks = table["is_pack"].tolist(), table["attempt"].tolist(), table["rank"].tolist()
        if (
            not len(packs) == len(numbers) == len(ranks) == sizes.size
            or len(raw) != len(packs) * DIGEST_BYTES
        ):
            raise DocumentError(f"{what}: columns differ in length")
        try:
            for attempt in attempts:
                Attempt.parse(attempt)
            keys = tuple(
                ObjectName(bool(pack), Digest(raw[i * 32 : i * 32 + 32]), attempts[number], rank).key
                for i, (pack, number, rank) in enumerate(zip(packs, numbers, ranks, strict=True))
            )
        except (ValueError, IndexError) as error:
            raise DocumentError(f"{what}: {error}") from error
        if any(a >= b for a, b in itertools.pairwise(keys)) or (sizes < 0).any():
            raise DocumentError(f"{what}: not sorted, or a negative size")
        return cls(keys, sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Locations:
    """Where each chunk's bytes are; one row per chunk in table order.

    Attributes:
        object: int64, row in the key list.
        offset, length: int64, bytes in that object as stored.
        codec: 0 = raw.
    """

    object: Int64s
    offset: Int64s
    length: Int64s
    codec: npt.NDArray[np.uint8]

    def encode(self) -> bytes:
        """The location table."""
        return columns.encode_columns(
            {
                "object": self.object.astype("<u4"),
                "offset": self.offset.astype("<i8"),
                "length": self.length.astype("<i8"),
                "codec": self.codec.astype("|u1"),
            }
        )

    @classmethod
    def decode(cls, data: bytes, nbytes: Int64s, keys: KeyList) -> Locations:
        """Reads the table back and checks it against the layout's sizes and the key list.

        Raises:
            DocumentError: it is damaged, or a chunk would lie outside of its object.
        """
        what = "location table"
        table = columns.decode_columns(data, _LOCATION_COLUMNS, what)
        rows = {name: table[name].astype(np.int64) for name in ("object", "offset", "length")}
        codec = table["codec"].astype(np.uint8)
        if codec.size != nbytes.size or any(rows[name].size != nbytes.size for name in rows):
            raise DocumentError(f"{what} has {len(codec)} rows, the layout has {len(nbytes)} chunks")
        if len(nbytes):
            if rows["object"].max() >= len(keys.keys):
                raise DocumentError(f"{what}: an object that is not in the key list")
            room = keys.sizes[rows["object"]] - rows["offset"]
            if rows["offset"].min() < 0 or rows["length"].min() < 0 or (rows["length"] > room).any():
                raise DocumentError(f"{what}: a chunk lies outside of its object")
            if codec.any():
                raise DocumentError(f"{what}: codec {int(codec.max())} is not known to this release")
            if (rows["length"] != nbytes).any():
                raise DocumentError(f"{what}: a stored length differs from the layout's")
        return cls(rows["object"], rows["offset"], rows["length"], codec)


def written_bytes(layout: Layout, locations: Locations, keys: KeyList, attempt: str) -> Int64s:
    """Bytes per tensor that `attempt` wrote itself; the rest it reused.

    An object carries its attempt's name. Equal chunks of one save share a place and were written once:
    the first row counts, so that a saver and whoever reads the tables later say the same.
    """
    chunks = layout.chunks
    if not len(chunks):
        return np.zeros(len(layout.tensors), np.int64)
    own = np.array([ObjectName.parse(key).attempt == attempt for key in keys.keys], bool)
    _, first_rows = np.unique(np.stack([locations.object, locations.offset]), axis=1, return_index=True)
    is_first = np.zeros(len(chunks), bool)
    is_first[first_rows] = True
    written = np.where(own[locations.object] & is_first, chunks.nbytes, 0)
    return np.bincount(chunks.tensor, weights=written, minlength=len(layout.tensors)).astype(np.int64)
