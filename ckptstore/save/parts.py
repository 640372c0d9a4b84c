"""Parts: what each rank of an attempt wrote, or why it could not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import DocumentError
from ckptstore.model import columns
from ckptstore.model.documents import Fields, seal, unseal
from ckptstore.model.ids import DIGEST_BYTES, Digest
from ckptstore.model.layout import Layout
from ckptstore.model.tables import KeyList

LEFT, WRITTEN, COMPARED = 0, 1, 2

_COLUMNS = ("state", "object", "offset", "digest")


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What rank 0 announces before any other rank puts or reuses anything.

    Attributes:
        pins: (run key, attempt) of the records that may be reused.
        plan: who writes what is said anew, in ``plan.mp`` beside this.
    """

    attempt: str
    step: int
    counter: int
    pins: tuple[tuple[str, str], ...]
    plan: bool = False


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
    """

    rank: int
    step: int
    counter: int
    error: str | None
    layout: Layout
    state: npt.NDArray[np.uint8]
    digests: list[Digest]
    objects: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    keys: KeyList
    tree: bytes
    components: tuple[str, ...] = ()
    may_differ: tuple[str, ...] = ()

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
            KeyList((), none),
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
    )


def encode_part(part: Part) -> bytes:
    """``parts/<attempt>/<rank>.mp``."""
    digests = b"".join(digest or bytes(DIGEST_BYTES) for digest in part.digests)
    rows = columns.encode_columns(
        {
            "state": part.state.astype("|u1"),
            "object": part.objects.astype("<u4"),
            "offset": part.offsets.astype("<i8"),
            "digest": np.frombuffer(digests, "|u1"),
        }
    )
    body: Mapping[str, Any] = {
        "rank": part.rank,
        "step": part.step,
        "counter": part.counter,
        "error": part.error,
        "layout": part.layout.encode(),
        "rows": rows,
        "keys": part.keys.encode(),
        "tree": part.tree,
        "components": list(part.components),
        "may_differ": list(part.may_differ),
    }
    return seal("part", body)


def decode_part(data: bytes, what: str) -> Part:
    """Reads it back; raises DocumentError, FormatTooNewError."""
    fields = Fields(unseal(data, "part", what=what)[1], what)
    layout = Layout.decode(fields.get("layout", bytes))
    table = columns.decode_columns(fields.get("rows", bytes), _COLUMNS, what)
    count = len(layout.chunks)
    raw = table["digest"].tobytes()
    keys = KeyList.decode(fields.get("keys", bytes))
    objects = table["object"].astype(np.int64)
    if {table[name].size for name in ("state", "object", "offset")} != {count} or len(
        raw
    ) != count * DIGEST_BYTES:
        raise DocumentError(f"{what}: its rows do not fit its layout")
    if objects.size and int(objects.max()) >= max(len(keys.keys), 1):
        raise DocumentError(f"{what}: an object that is not in its key list")
    return Part(
        rank=fields.get("rank", int),
        step=fields.get("step", int),
        counter=fields.get("counter", int),
        error=fields.optional("error", str),
        layout=layout,
        state=table["state"].astype(np.uint8),
        digests=[Digest(raw[i : i + DIGEST_BYTES]) for i in range(0, len(raw), DIGEST_BYTES)],
        objects=objects,
        offsets=table["offset"].astype(np.int64),
        keys=keys,
        tree=fields.get("tree", bytes),
        components=fields.strings("components"),
        may_differ=fields.strings("may_differ"),
    )
