"""Parts: what each rank of an attempt wrote, or why it could not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
    digests: Sequence[Digest]
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
        "state": part.state.astype("|u1").tobytes(),
        "objects": part.objects.astype("<u4").tobytes(),
        "offsets": part.offsets.astype("<i8").tobytes(),
        "digests": Digests.of(part.digests).array.tobytes(),
        "key_digests": keys.digests.tobytes(),
        "key_packs": keys.is_pack.astype("|u1").tobytes(),
        "key_attempts": keys.attempt.astype("<u4").tobytes(),
        "key_ranks": keys.rank.astype("<u4").tobytes(),
        "key_sizes": keys.sizes.astype("<i8").tobytes(),
        "attempts": list(keys.attempts),
        "tree": part.tree,
        "components": list(part.components),
        "may_differ": list(part.may_differ),
    }
    return seal("part", body)


def error_of(data: bytes, what: str) -> str | None:
    """Why a rank has no part, of its document, without the rest of it; raises DocumentError."""
    return Fields(unseal(data, "part", what=what)[1], what).optional("error", str)


def decode_part(data: bytes, what: str, known: Known | None = None) -> Part:
    """Reads it back; raises DocumentError, FormatTooNewError.

    Args:
        known: what earlier parts of the session have told; parts may rest on it. It is added to.
    """
    known = Known() if known is None else known
    fields = Fields(unseal(data, "part", what=what)[1], what)
    layout = _layout(fields, known, what)

    def column(name: str, dtype: str, count: int) -> npt.NDArray[Any]:
        raw = fields.get(name, bytes)
        if len(raw) != count * int(dtype[-1]):
            raise DocumentError(f"{what}: its {name} are {len(raw)} bytes, not {count} of {dtype}")
        return np.frombuffer(raw, dtype)

    count = int(layout.box_chunks.sum())
    keys = _keys(fields, column, what)
    objects = column("objects", "<u4", count)
    if count and int(objects.max()) >= max(len(keys), 1):
        raise DocumentError(f"{what}: an object that is not in its key list")
    state = column("state", "|u1", count)
    if count and int(state.max()) > COMPARED:
        raise DocumentError(f"{what}: a chunk in a state that is none")
    return Part(
        rank=fields.get("rank", int),
        step=fields.get("step", int),
        counter=fields.get("counter", int),
        error=fields.optional("error", str),
        layout=layout,
        state=state,
        digests=Digests(column("digests", "|u1", count * DIGEST_BYTES).reshape(count, DIGEST_BYTES)),
        objects=objects.astype(np.int64),
        offsets=column("offsets", "<i8", count),
        keys=keys,
        tree=known.same_tree(fields.get("tree", bytes)),
        components=fields.strings("components"),
        may_differ=fields.strings("may_differ"),
    )


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
    layout.__dict__["digest"] = digest
    return known.same_layout(layout)


def _keys(fields: Fields, column: Callable[[str, str, int], npt.NDArray[Any]], what: str) -> KeyList:
    count = len(fields.get("key_packs", bytes))
    attempts = fields.strings("attempts")
    attempt = column("key_attempts", "<u4", count)
    if count and int(attempt.max()) >= len(attempts):
        raise DocumentError(f"{what}: a key of an attempt that is not in its list")
    try:
        for name in attempts:
            Attempt.parse(name)
    except ValueError as error:
        raise DocumentError(f"{what}: {error}") from error
    return KeyList(
        column("key_digests", "|u1", count * DIGEST_BYTES).reshape(count, DIGEST_BYTES),
        column("key_packs", "|u1", count).astype(bool),
        attempt.astype(np.int64),
        attempts,
        column("key_ranks", "<u4", count).astype(np.int64),
        column("key_sizes", "<i8", count),
    )
