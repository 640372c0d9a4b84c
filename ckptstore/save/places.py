"""Where the chunks of an attempt are: columns, for there may be very many of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from ckptstore.model.tables import CODEC_RAW, KeyList, Locations
from ckptstore.save.reuse import Stored


class Places:
    """The places of chunks, by their row in the tables; several threads may fill it, one then reads it."""

    def __init__(self, count: int) -> None:
        """For so many chunks, all of them without a place."""
        self._object = np.full(count, -1, np.int64)
        self._offset = np.zeros(count, np.int64)
        self._length = np.zeros(count, np.int64)
        # Of one chunk each, and not in the columns yet: who adds one has just hashed megabytes, and finds the
        # processor's caches empty. An append brings little back into them.
        self._single: list[tuple[int, Stored]] = []
        self._repeats: list[tuple[int, int]] = []
        self._numbers: dict[str, int] = {}
        self._sizes: list[int] = []  # of the objects, by number
        self._lock = threading.Lock()

    @classmethod
    def of(cls, stored: Sequence[Stored | None]) -> Places:
        """From one place for each chunk; None for those without."""
        places = cls(len(stored))
        for row, place in enumerate(stored):
            if place is not None:
                places.put(row, place)
        return places

    def put(self, row: int, place: Stored) -> None:
        """Of one chunk."""
        self._single.append((row, place))

    def put_pack(self, rows: Sequence[int], key: str, lengths: Sequence[int]) -> int:
        """Of chunks that lie side by side and fill an object; returns its size in bytes."""
        at: slice | list[int] = list(rows)
        if at == list(range(rows[0], rows[0] + len(rows))):  # nearly always, and soon written
            at = slice(rows[0], rows[0] + len(rows))
        sizes = np.array(lengths, np.int64)
        ends = np.cumsum(sizes)
        nbytes = int(ends[-1])
        self._offset[at], self._length[at] = ends - sizes, sizes
        self._add_objects({key: nbytes})
        self._object[at] = self._numbers[key]
        return nbytes

    def repeat(self, row: int, original: int) -> None:
        """Of a chunk that is equal to another, which has a place or gets one before anybody asks."""
        self._repeats.append((row, original))

    def _add_objects(self, sizes: Mapping[str, int]) -> None:
        """Numbers those that have none."""
        with self._lock:
            new = {key: nbytes for key, nbytes in sizes.items() if key not in self._numbers}
            self._numbers.update(zip(new, range(len(self._sizes), len(self._sizes) + len(new)), strict=True))
            self._sizes += new.values()

    def _settle(self) -> None:
        """Puts everything into the columns."""
        if self._single:
            rows = [row for row, _ in self._single]
            places = [place for _, place in self._single]
            self._add_objects({place.key: place.object_bytes for place in places})
            self._object[rows] = [self._numbers[place.key] for place in places]
            self._offset[rows] = [place.offset for place in places]
            self._length[rows] = [place.length for place in places]
            self._single.clear()
        if self._repeats:
            rows, originals = map(list, zip(*self._repeats, strict=True))
            for column in (self._object, self._offset, self._length):
                column[rows] = column[originals]
            self._repeats.clear()

    def key_list(self) -> KeyList:
        """Every object that holds a chunk."""
        self._settle()
        return KeyList.of(dict(zip(self._numbers, self._sizes, strict=True)))

    def locations(self, keys: KeyList) -> Locations:
        """The location table's rows; those of chunks without a place are zero."""
        self._settle()
        row_of = {key: row for row, key in enumerate(keys.keys)}
        rows = np.array([*(row_of[key] for key in self._numbers), 0], np.int64)  # the last one: nowhere
        return Locations(
            rows[self._object], self._offset, self._length, np.full(len(self._object), CODEC_RAW, np.uint8)
        )
