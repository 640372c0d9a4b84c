"""What a committed checkpoint holds: its tables, read when asked for and checked against the record."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import (
    BackendError,
    ChunkDamagedError,
    DamageError,
    DocumentError,
    NotAnObjectError,
    ObjectNotFoundError,
    ShortReadError,
)
from ckptstore.model import tables, unpack
from ckptstore.model.ids import DIGEST_BYTES, Digest, digest_of
from ckptstore.model.layout import Layout
from ckptstore.model.record import CommitRecord, TableRef
from ckptstore.model.tables import Digests, KeyList, Locations
from ckptstore.model.targets import SavedTree, TensorSpec
from ckptstore.tier.tier import Tier
from ckptstore.tier.together import together

SAME_EVERYWHERE = ("layout", "tree", "digests")
"""Tables whose bytes are the same in every copy of a checkpoint; keys and locations are each copy's own."""
ALL_TABLES = (*SAME_EVERYWHERE, "locations", "keys")


class Contents:
    """The tables of one record in one tier.

    Every property raises ChunkDamagedError or DocumentError, naming run, step and key, when its table is
    missing or is not what the record says.
    """

    def __init__(self, tier: Tier, record: CommitRecord) -> None:
        self._tier = tier
        self.record = record

    @classmethod
    def of(
        cls,
        tier: Tier,
        record: CommitRecord,
        *,
        layout: Layout,
        digests: Sequence[Digest],
        locations: Locations,
        keys: KeyList,
    ) -> Contents:
        """What a saver knows already; only the tree would be read again."""
        contents = cls(tier, record)
        contents.__dict__.update(layout=layout, digests=Digests.of(digests), locations=locations, keys=keys)
        return contents

    @classmethod
    def beside(cls, other: Contents, tier: Tier, record: CommitRecord) -> Contents:
        """Those of another copy of the same checkpoint: only its keys and locations are read.

        Raises:
            DocumentError: the record is of another state.
        """
        other.check_same(record)
        contents = cls(tier, record)
        contents.__dict__.update(layout=other.layout, digests=other.digests)
        return contents

    def check_same(self, record: CommitRecord) -> None:
        """That another copy's record names the same state.

        Raises:
            DocumentError: it does not.
        """
        for name in SAME_EVERYWHERE:
            if record.tables[name].digest != self.record.tables[name].digest:
                less = set(record.trimmed) ^ set(self.record.trimmed)
                if less:
                    raise DocumentError(
                        f"{self}: only one of attempts {record.attempt} and {self.record.attempt} has "
                        f"{', '.join(sorted(less))} still; one is not read in place of the other"
                    )
                raise DocumentError(
                    f"{self}: the {name} table of attempt {record.attempt} is not that of attempt "
                    f"{self.record.attempt}, though both are of checkpoint {self.record.checkpoint}"
                )

    def __str__(self) -> str:
        return f"run {self.record.run!r} step {self.record.step}"

    @functools.cached_property
    def layout(self) -> Layout:
        """Tensors and boxes."""
        # The digest table has 32 bytes per chunk: more chunks than that cannot be.
        layout = Layout.decode(self.table("layout"), self.record.tables["digests"].size_bytes // DIGEST_BYTES)
        problems = layout.check_coverage()
        if problems:
            raise DocumentError(f"{self}: boxes do not cover their tensors: {'; '.join(problems[:5])}")
        return layout

    @functools.cached_property
    def digests(self) -> Digests:
        """One per chunk."""
        return tables.decode_digests(self.table("digests"), len(self.layout.chunks))

    @functools.cached_property
    def keys(self) -> KeyList:
        """Every object that holds a chunk (the tables' own pieces are named in the record)."""
        return KeyList.decode(self.table("keys"))

    @functools.cached_property
    def locations(self) -> Locations:
        """Where each chunk is."""
        return Locations.decode(self.table("locations"), self.layout.chunks.nbytes, self.keys)

    @functools.cached_property
    def written_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes per tensor that this record's own attempt wrote; int64, (tensors,)."""
        return tables.written_bytes(self.layout, self.locations, self.keys, self.record.attempt)

    @functools.cached_property
    def tree(self) -> bytes:
        """The packed tree of the state."""
        return bytes(self.table("tree"))

    @functools.cached_property
    def saved_tree(self) -> SavedTree:
        """The structure of the state, with specs in place of tensors."""
        heads = self.layout.heads

        def spec(index: int, kind: str, detail: str | None) -> TensorSpec:
            return TensorSpec(heads.names[index], heads.dtypes[index].name, heads.shapes[index], kind)

        return SavedTree(self.decode_tree(spec))

    @functools.cached_property
    def details(self) -> dict[int, str | None]:
        """Tensor row -> the numpy dtype string that it was saved with, if it was a numpy array."""
        found: dict[int, str | None] = {}

        def note(index: int, kind: str, detail: str | None) -> None:
            found[index] = detail if kind == "numpy" else None

        self.decode_tree(note)
        return found

    def decode_tree(
        self, tensor_of: unpack.TensorOf, compose: unpack.Compose | None = None
    ) -> dict[Any, Any]:
        """The tree with `tensor_of` in place of its tensors."""
        tree = unpack.decode(self.tree, tensor_of, f"the tree of {self}", compose)
        if not isinstance(tree, dict):
            raise DocumentError(f"the tree of {self} is not a dict")
        return tree

    @property
    def object_sizes(self) -> dict[str, int]:
        """Key -> bytes of every object that must be there for the record to be whole."""
        sizes = dict(zip(self.keys.keys, self.keys.sizes.tolist(), strict=True))
        for ref in self.record.tables.values():
            sizes.update((piece.key, piece.size_bytes) for piece in ref.pieces)
        return sizes

    def table(self, name: str) -> bytes | memoryview:
        """One of the record's tables as it is stored, checked."""
        found = self.fetched.pop(name, None)
        return self._read(name) if found is None else found

    @functools.cached_property
    def fetched(self) -> dict[str, bytes | memoryview]:
        """Tables that :meth:`prefetch` has read and nobody has asked for yet."""
        return {}

    def prefetch(self, wanted: Collection[str] = ALL_TABLES) -> None:
        """Reads those tables at once that are objects of their own, where each is a way over the network.

        One that cannot be read is read again, and its error raised, when it is asked for.
        """
        known = {*self.__dict__, *self.fetched}
        names = [name for name in wanted if self.record.tables[name].pieces and name not in known]

        def fetch(name: str) -> None:
            with contextlib.suppress(BackendError, DamageError):
                self.fetched[name] = self._read(name)

        if len(names) > 1 and not self._tier.backend.capabilities.cheap_head:
            together(self._tier.backend, [functools.partial(fetch, name) for name in names])

    def _read(self, name: str) -> bytes | memoryview:
        return read_table(self._tier, self.record.tables[name], f"the {name} table of {self}")


def read_table(tier: Tier, ref: TableRef, what: str) -> bytes | memoryview:
    """A table's bytes, checked.

    Raises:
        ChunkDamagedError: a piece is missing, short or not what the record says.
    """
    data: bytes | memoryview | None = ref.inline
    if data is None:
        buffer = bytearray(ref.size_bytes)
        position = 0
        for piece in ref.pieces:
            view = memoryview(buffer)[position : position + piece.size_bytes]
            try:
                tier.backend.read_into(piece.key, 0, view)
            except (ObjectNotFoundError, NotAnObjectError, ShortReadError) as error:
                raise ChunkDamagedError(
                    f"{what} cannot be read: {error.message}", key=piece.key, hint="run `ckptstore verify`"
                ) from error
            position += piece.size_bytes
        data = memoryview(buffer).toreadonly()
    if digest_of(data) != ref.digest:
        key = ref.pieces[0].key if ref.pieces else ""
        raise ChunkDamagedError(f"{what} is not what was saved", key=key, hint="run `ckptstore verify`")
    return data
