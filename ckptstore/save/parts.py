"""Parts: what each rank of an attempt wrote, or why it could not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import DocumentError
from ckptstore.model.documents import Fields, seal, unseal
from ckptstore.model.ids import DIGEST_BYTES, Attempt, Digest, digest_of
from ckptstore.model.layout import Layout
from ckptstore.model.tables import Digests, KeyList
from ckptstore.save.known import Known

LEFT, WRITTEN, COMPARED = 0, 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What rank 0 announces before any other rank puts or reuses anything.

    Attributes:
        pins: (run key, attempt) of the records that may be reused.
        plan: who writes what is said anew, in ``plan.mp`` beside this.
        world_size: how many ranks rank 0 waits for; 0: as many as come.
        forget: what ranks remember of the last committed save may not be what it names: they read its tables.
        must_reach: it counts when it is in further tiers, too; whether it is, rank 0 says in ``reached.mp``.
    """

    attempt: str
    step: int
    counter: int
    pins: tuple[tuple[str, str], ...]
    plan: bool = False
    world_size: int = 0
    forget: bool = False
    must_reach: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of an attempt.

    Attributes:
        counter: how many times this rank has called save in the session; equal on all ranks.
        error: why there is no part, else None; then the rest is empty.
        layout: of what this rank holds: global shapes, its own boxes.
        state: uint8, (chunks,): LEFT to another holder, WRITTEN, or COMPARED (hashed only).
        digests: one per chunk; empty where LEFT.
        objects, offsets: int64, (chunks,): where WRITTEN chunks are, in `keys`.
        tree: the packed tree; of rank 0 it counts, of the others it is compared.
        components: top-level keys of its state.
        may_differ: names whose bytes may differ between holders by design (buffers).
        plan: number of the call with which the plan was said that this rank followed; 0: none.
    """

    rank: int
    step: int
    counter: int
    error: str | None
    layout: Layout
    state: npt.NDArray[np.uint8]
    digests: Sequence[Digest]
    objects: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    keys: KeyList
    tree: bytes
    components: tuple[str, ...] = ()
    may_differ: tuple[str, ...] = ()
    plan: int = 0

    @classmethod
    def failed(cls, rank: int, step: int, counter: int, error: str) -> Part:
        """The part of a rank that could not."""
        none = np.zeros(0, np.int64)
        return cls(
            rank,
            step,
            counter,
            error,
            Layout((), (), 1),
            none.astype(np.uint8),
            [],
            none,
            none,
            KeyList.of({}),
            b"",
        )


def encode_start(start: Start) -> bytes:
    """``parts/<attempt>/start.mp``."""
    body = {field.name: getattr(start, field.name) for field in dataclasses.fields(start)}
    return seal("start", {**body, "pins": [list(pin) for pin in start.pins]})


def decode_start(data: bytes, what: str) -> Start:
    """Reads it back; raises DocumentError, FormatTooNewError."""
    fields = Fields(unseal(data, "start", what=what)[1], what)
    pins: list[tuple[str, str]] = []
    for pin in fields.get("pins", list):
        if not (isinstance(pin, list) and len(pin) == 2 and all(isinstance(item, str) for item in pin)):
            raise DocumentError(f"{what}: a pin is malformed")
        pins.append((pin[0], pin[1]))
    return Start(
        fields.attempt("attempt"),
        fields.get("step", int),
        fields.get("counter", int),
        tuple(pins),
        fields.get("plan", bool),
        fields.get("world_size", int),
        fields.get("forget", bool),
        fields.get("must_reach", bool),
    )


def encode_part(part: Part, *, with_layout: bool = True) -> bytes:
    """``parts/<attempt>/<rank>.mp``.

    Args:
        with_layout: False: only the layout's digest. The coordinator must have had this layout before: it
            has, if this rank's last save in the session was committed and was of the same layout.
    """
    keys = part.keys
    body: Mapping[str, Any] = {
        "rank": part.rank,
        "step": part.step,
        "counter": part.counter,
        "error": part.error,
        "layout_digest": part.layout.digest,
        "layout": part.layout.encode() if with_layout else None,
        "rows": _ROWS.pack(part.state, part.objects, part.offsets, Digests.of(part.digests).array),
        "keys": _KEYS.pack(keys.is_pack, keys.attempt, keys.rank, keys.sizes, keys.digests),
        "attempts": list(keys.attempts),
        "tree": part.tree,
        "components": list(part.components),
        "may_differ": list(part.may_differ),
        "plan": part.plan,
    }
    return seal("part", body)


def error_of(data: bytes, what: str) -> str | None:
    """Why a rank has no part, of its document, without the rest of it; raises DocumentError."""
    return Fields(unseal(data, "part", what=what)[1], what).optional("error", str)


def decode_part(data: bytes, what: str, known: Known | None = None) -> Part:
    """Reads it back; raises DocumentError, FormatTooNewError.

    Rows are only looked at when all parts are there, all together: see :class:`ckptstore.save.merge.Merger`.

    Args:
        known: what earlier parts of the session have told; parts may rest on it. It is added to.
    """
    known = Known() if known is None else known
    fields = Fields(unseal(data, "part", what=what)[1], what)
    layout = _layout(fields, known, what)
    state, objects, offsets, digests = _ROWS.unpack(fields.get("rows", bytes), layout.chunk_count, what)
    return Part(
        rank=fields.get("rank", int),
        step=fields.get("step", int),
        counter=fields.get("counter", int),
        error=fields.optional("error", str),
        layout=layout,
        state=state,
        digests=Digests(digests),
        objects=objects,
        offsets=offsets,
        keys=_key_list(fields, what),
        tree=known.same_tree(fields.get("tree", bytes)),
        components=fields.strings("components"),
        may_differ=fields.strings("may_differ"),
        plan=fields.get("plan", int),
    )


class _Columns:
    """Columns of one length end to end, without a header: there are thousands of parts, all alike."""

    def __init__(self, *dtypes: str) -> None:
        self._dtypes = [np.dtype(dtype) for dtype in dtypes]
        self.row_bytes = sum(dtype.itemsize for dtype in self._dtypes)

    def pack(self, *columns: npt.NDArray[Any]) -> bytes:
        """Columns, those of digests (n, 32)."""
        return b"".join(
            column.tobytes() if dtype.kind == "V" else column.astype(dtype).tobytes()
            for column, dtype in zip(columns, self._dtypes, strict=True)
        )

    def unpack(self, raw: bytes, count: int, what: str) -> list[npt.NDArray[Any]]:
        """The columns back, as views."""
        if len(raw) != count * self.row_bytes:
            raise DocumentError(f"{what}: {len(raw)} bytes are not {count} rows of {self.row_bytes}")
        found = []
        at = 0
        for dtype in self._dtypes:
            if dtype.kind == "V":
                column = np.frombuffer(raw, np.uint8, count * DIGEST_BYTES, at).reshape(count, DIGEST_BYTES)
            else:
                column = np.frombuffer(raw, dtype, count, at)
            found.append(column)
            at += count * dtype.itemsize
        return found


_ROWS = _Columns("|u1", "<u4", "<i8", f"|V{DIGEST_BYTES}")
_KEYS = _Columns("|u1", "<u4", "<u4", "<i8", f"|V{DIGEST_BYTES}")


def _layout(fields: Fields, known: Known, what: str) -> Layout:
    digest = Digest(fields.get("layout_digest", bytes))
    found = known.layout(digest)
    if found is not None:
        return found
    data = fields.optional("layout", bytes)
    if data is None:
        raise DocumentError(f"{what}: it rests on a layout that rank 0 has not seen")
    if digest_of(data) != digest:
        raise DocumentError(f"{what}: its layout is not of the digest that it tells")
    layout = Layout.decode(data, seen=known.heads)
    layout.keep_digest(digest)
    return known.same_layout(layout)


def _key_list(fields: Fields, what: str) -> KeyList:
    raw = fields.get("keys", bytes)
    attempts = fields.strings("attempts")
    if not all(_is_attempt(name) for name in attempts):
        raise DocumentError(f"{what}: not an attempt id among {list(attempts)[:3]}")
    is_pack, attempt, rank, sizes, digests = _KEYS.unpack(raw, len(raw) // _KEYS.row_bytes, what)
    return KeyList(digests, is_pack, attempt, attempts, rank, sizes)


@functools.lru_cache
def _is_attempt(name: str) -> bool:
    try:
        Attempt.parse(name)
    except ValueError:
        return False
    return True
