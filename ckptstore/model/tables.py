"""The tables beside the layout: digests, locations and the list of objects that a record needs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from ckptstore.errors import DocumentError
from ckptstore.model import columns, key_order
from ckptstore.model.ids import DIGEST_BYTES, Attempt, Digest, ObjectName, split_object_keys
from ckptstore.model.layout import Layout

CODEC_RAW = 0

_KEY_COLUMNS = ("digest", "is_pack", "attempt", "rank", "size", "attempt_text", "attempt_ends")
_LOCATION_COLUMNS = ("object", "offset", "length", "codec")

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


class Digests(Sequence[Digest]):
    """Digests as rows of one array; a sequence of bytes to whoever asks for few of them.

    Attributes:
        array: uint8, (n, 32), contiguous.
    """

    __slots__ = ("array",)

    def __init__(self, array: UInt8s) -> None:
        self.array = array

    @classmethod
    def of(cls, digests: Sequence[bytes]) -> Digests:
        """From 32 bytes each; empty ones, of chunks that others write, become zeros."""
        if isinstance(digests, Digests):
            return digests
        raw = b"".join(digests)
        if len(raw) != len(digests) * DIGEST_BYTES:
            raw = b"".join([digest or bytes(DIGEST_BYTES) for digest in digests])
        return cls.from_bytes(raw)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Digests:
        """From all digests end to end."""
        return cls(np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_BYTES))

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> Digest: ...
    @overload
    def __getitem__(self, index: slice) -> Digests: ...
    def __getitem__(self, index: int | slice) -> Digest | Digests:
        if isinstance(index, slice):
            return Digests(np.ascontiguousarray(self.array[index]))
        return Digest(self.array[index].tobytes())

    def __iter__(self) -> Iterator[Digest]:
        # numpy makes a bytes object of each void: six times faster than slicing here.
        return iter(np.ascontiguousarray(self.array).view(f"V{DIGEST_BYTES}").reshape(-1).tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Digests):
            return np.array_equal(self.array, other.array)
        return list(self) == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"<{len(self)} digests>"


def encode_digests(digests: Sequence[bytes]) -> bytes:
    """One 32-byte digest per chunk, in table order."""
    raw = (
        digests.array.reshape(-1) if isinstance(digests, Digests) else np.frombuffer(b"".join(digests), "|u1")
    )
    return columns.encode_columns({"digest": raw})


def decode_digests(data: bytes | memoryview, count: int) -> Digests:
    """The digests back.

    Raises:
        DocumentError: it is damaged or does not have `count` rows.
    """
    raw = columns.decode_columns(data, ("digest",), "digest table")["digest"]
    if len(raw) != count * DIGEST_BYTES:
        raise DocumentError(
            f"digest table has {len(raw) // DIGEST_BYTES} rows, the layout has {count} chunks"
        )
    return Digests(raw.reshape(count, DIGEST_BYTES))


@dataclasses.dataclass(frozen=True)
class KeyList:
    """Every object that holds a chunk of the checkpoint, sorted by key, each once.

    The tables' own pieces are named in the record itself: both together are what garbage collection
    keeps. (Listing them here too would make the location table depend on its own digest.)

    Attributes:
        digests: uint8, (objects, 32).
        is_pack: bool, (objects,).
        attempt: int64, (objects,), rows in `attempts`.
        rank, sizes: int64, (objects,); sizes in bytes.
    """

    digests: UInt8s
    is_pack: Bools
    attempt: Int64s
    attempts: tuple[str, ...]
    rank: Int64s
    sizes: Int64s

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> KeyList:
        """From key -> bytes."""
        keys = tuple(sorted(sizes))
        is_pack, digests, attempt, rank = split_object_keys(keys)
        attempts = tuple(sorted(set(attempt)))
        number = {name: i for i, name in enumerate(attempts)}
        made = cls(
            np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
            np.array(is_pack, bool),
            np.array([number[name] for name in attempt], np.int64),
            attempts,
            np.array(rank, np.int64),
            np.array([sizes[key] for key in keys], np.int64),
        )
        made.__dict__["keys"] = keys
        return made

    @classmethod
    def joined(cls, lists: Sequence[KeyList], needed: Bools | None = None) -> tuple[KeyList, Int64s]:
        """One list of what several hold, and int64, (sum of lengths,): the row of each entry in it, or -1.

        Args:
            needed: bool, (sum of lengths,): entries that are not are left out.
        """
        attempts = tuple(sorted({attempt for own in lists for attempt in own.attempts}))
        number = {attempt: i for i, attempt in enumerate(attempts)}
        renumbering = {
            own: np.array([number[name] for name in own], np.int64) for own in {own.attempts for own in lists}
        }
        renumbered = [renumbering[own.attempts][own.attempt] for own in lists]
        whole = cls(
            np.concatenate([own.digests for own in lists]),
            np.concatenate([own.is_pack for own in lists]),
            np.concatenate(renumbered),
            attempts,
            np.concatenate([own.rank for own in lists]),
            np.concatenate([own.sizes for own in lists]),
        )
        rows = np.arange(len(whole)) if needed is None else np.flatnonzero(needed)
        order = whole._take(rows)._order
        sorting, repeats = key_order.argsort(order)
        is_first = ~repeats
        row_of = np.full(len(whole), -1, np.int64)
        row_of[rows[sorting]] = np.cumsum(is_first) - 1
        return whole._take(rows[sorting[is_first]])._without_spare_attempts(), row_of

    def _take(self, rows: Int64s) -> KeyList:
        return KeyList(
            self.digests[rows],
            self.is_pack[rows],
            self.attempt[rows],
            self.attempts,
            self.rank[rows],
            self.sizes[rows],
        )

    def _without_spare_attempts(self) -> KeyList:
        used = np.unique(self.attempt)
        if len(used) == len(self.attempts):
            return self
        attempts = tuple(self.attempts[i] for i in used.tolist())
        return dataclasses.replace(self, attempt=np.searchsorted(used, self.attempt), attempts=attempts)

    @property
    def _order(self) -> list[key_order.Words]:
        return key_order.sort_columns(self.digests, self.is_pack, self.attempt, self.attempts, self.rank)

    def __len__(self) -> int:
        return len(self.sizes)

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """All object keys. For one of them, :meth:`key` takes less."""
        text = self.digests.tobytes().hex()
        rows = zip(self.is_pack.tolist(), self.attempt.tolist(), self.rank.tolist(), strict=True)
        made = []
        for row, (is_pack, attempt, rank) in enumerate(rows):
            digest = text[row * 2 * DIGEST_BYTES : (row + 1) * 2 * DIGEST_BYTES]
            folder = "packs" if is_pack else "chunks"
            made.append(f"{folder}/{digest[:2]}/{digest}.{self.attempts[attempt]}.{rank}")
        return tuple(made)

    def key(self, row: int) -> str:
        """The object key in a row."""
        digest = Digest(self.digests[row].tobytes())
        attempt = self.attempts[int(self.attempt[row])]
        return ObjectName(bool(self.is_pack[row]), digest, attempt, int(self.rank[row])).key

    def written_by(self, attempt: str) -> Bools:
        """bool, (objects,): those that an attempt wrote."""
        return np.array([name == attempt for name in self.attempts], bool)[self.attempt]

    def encode(self) -> bytes:
        """The key list table: digests as bytes, attempts by number (docs/format.md)."""
        text, ends = columns.encode_texts(self.attempts)
        return columns.encode_columns(
            {
                "digest": self.digests.reshape(-1),
                "is_pack": self.is_pack.astype("|u1"),
                "attempt": self.attempt.astype("<u4"),
                "rank": self.rank.astype("<u4"),
                "size": self.sizes.astype("<i8", copy=False),
                "attempt_text": text,
                "attempt_ends": ends,
            }
        )

    @classmethod
    def decode(cls, data: bytes | memoryview) -> KeyList:
        """Reads the table back.

        Raises:
            DocumentError: it is damaged, unsorted, or names an impossible key.
        """
        what = "key list"
        table = columns.decode_columns(data, _KEY_COLUMNS, what)
        attempts = columns.decode_texts(table["attempt_text"], table["attempt_ends"], what)
        count = table["size"].size
        if (
            any(table[name].size != count for name in ("is_pack", "attempt", "rank"))
            or table["digest"].size != count * DIGEST_BYTES
        ):
            raise DocumentError(f"{what}: columns differ in length")
        try:
            for attempt in attempts:
                Attempt.parse(attempt)
        except ValueError as error:
            raise DocumentError(f"{what}: {error}") from error
        found = cls(
            table["digest"].reshape(count, DIGEST_BYTES),
            table["is_pack"].astype(bool),
            table["attempt"].astype(np.int64),
            tuple(attempts),
            table["rank"].astype(np.int64),
            table["size"].astype(np.int64, copy=False),
        )
        if count and int(found.attempt.max()) >= len(attempts):
            raise DocumentError(f"{what}: an attempt that is not in its list")
        if not key_order.is_ascending(found._order) or (found.sizes < 0).any():
            raise DocumentError(f"{what}: not sorted, or a negative size")
        return found


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
    def decode(cls, data: bytes | memoryview, nbytes: Int64s, keys: KeyList) -> Locations:
        """Reads the table back and checks it against the layout's sizes and the key list.

        Raises:
            DocumentError: it is damaged, or a chunk would lie outside of its object.
        """
        what = "location table"
        table = columns.decode_columns(data, _LOCATION_COLUMNS, what)
        rows = {name: table[name].astype(np.int64, copy=False) for name in ("object", "offset", "length")}
        codec = table["codec"]
        if codec.size != nbytes.size or any(rows[name].size != nbytes.size for name in rows):
            raise DocumentError(f"{what} has {len(codec)} rows, the layout has {len(nbytes)} chunks")
        if len(nbytes):
            if rows["object"].max() >= len(keys):
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
    own = keys.written_by(attempt)[locations.object]
    counted = own & _first_at_its_place(locations)
    written = np.where(counted, chunks.nbytes, 0)
    # Sums of bytes stay exact here: they are integers under 2**63, in int64.
    ends = np.concatenate([[0], np.cumsum(written)])[chunks.first]
    return np.diff(ends).astype(np.int64, copy=False)


def _first_at_its_place(locations: Locations) -> Bools:
    """bool, (chunks,): rows that no row before shares its place with."""
    first = np.ones(len(locations.object), bool)
    room = int(locations.offset.max()) + 1
    if room * (int(locations.object.max()) + 1) < 1 << 63:
        places = locations.object * room + locations.offset
        in_order = np.sort(places)
        if (in_order[1:] != in_order[:-1]).all():  # as nearly always, and much sooner known
            return first
        order = np.argsort(places, kind="stable")
    else:
        order = np.lexsort((locations.offset, locations.object))
    same = (locations.object[order[1:]] == locations.object[order[:-1]]) & (
        locations.offset[order[1:]] == locations.offset[order[:-1]]
    )
    first[order[1:][same]] = False
    return first
