"""Documents as bytes: one envelope for all, decoding strict and bounded.

The envelope is a msgpack map ``{"format", "kind", "digest", "body"}``; `digest` is BLAKE3-256 over the
bytes of `body`, itself a msgpack map. So a reader checks first and decodes after, and one flipped bit
anywhere is found. A VOID or GONE at a commit key is under 128 bytes and a record never is, so that a
listing tells them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

import msgpack

from ckptstore.errors import DocumentError, FormatTooNewError
from ckptstore.model import unpack, values
from ckptstore.model.ids import DIGEST_BYTES, Attempt, Digest, ObjectName, digest_of
from ckptstore.model.record import (
    INTENT_KINDS,
    NOTE_KINDS,
    TABLE_NAMES,
    CommitEnd,
    CommitRecord,
    ComponentSummary,
    EpochDoc,
    IntentDoc,
    Note,
    TablePiece,
    TableRef,
)

FORMAT: Final = 1
MAX_DOCUMENT_BYTES: Final = 16 << 20
_MAX_CONTAINERS: Final = 200_000
END_LIMIT_BYTES: Final = 128
_MAX_REASON = 40

T = TypeVar("T")
_MISSING: Final = object()


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    """A document of `kind` as bytes."""
    packed = msgpack.packb(body, unicode_errors="surrogatepass")
    return cast(
        bytes, msgpack.packb({"format": FORMAT, "kind": kind, "digest": digest_of(packed), "body": packed})
    )


def unseal(data: bytes, *kinds: str, what: str) -> tuple[str, dict[str, Any]]:
    """(kind, body) of a document, after its digest has been checked.

    Args:
        kinds: those that may stand here.
        what: names it in errors, a key.

    Raises:
        DocumentError: truncated, changed, of another kind, or not a document at all.
        FormatTooNewError: from a newer release.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DocumentError(f"{what}: {len(data)} bytes is more than any document has")
    envelope = _unpack(data, what)
    number = envelope.get("format")
    if isinstance(number, int) and not isinstance(number, bool) and number > FORMAT:
        raise FormatTooNewError(
            f"{what} is of format {number}; this release knows up to {FORMAT}",
            hint="upgrade ckptstore on this machine",
        )
    kind, digest, packed = envelope.get("kind"), envelope.get("digest"), envelope.get("body")
    if number != FORMAT or not isinstance(kind, str) or not isinstance(packed, bytes):
        raise DocumentError(f"{what}: not a document of this store's format")
    if digest != digest_of(packed):
        raise DocumentError(f"{what}: its digest does not match, the document was changed or cut")
    if kind not in kinds:
        raise DocumentError(f"{what}: is a {kind[:20]!r}, expected {' or '.join(kinds)}")
    return kind, _unpack(packed, what)


def _unpack(data: bytes, what: str) -> dict[str, Any]:
    left = _MAX_CONTAINERS

    def count(container: Any) -> Any:
        # A byte can claim a container, and each takes dozens in memory: there is a bound on how many.
        nonlocal left
        left -= 1
        if left < 0:
            raise DocumentError(f"{what} has more than {_MAX_CONTAINERS} maps and arrays")
        return container

    try:
        body = msgpack.unpackb(
            data, strict_map_key=True, unicode_errors="surrogatepass", object_hook=count, list_hook=count
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise DocumentError(f"{what} does not decode") from error
    if not isinstance(body, dict):
        raise DocumentError(f"{what} is not a map")
    return body


class Fields:
    """Strict access to a decoded map: every field has its type, or the document is refused."""

    def __init__(self, body: Mapping[str, Any], what: str) -> None:
        self._body = body
        self._what = what

    def get(self, name: str, kind: type[T] | tuple[type[T], ...], default: Any = _MISSING) -> T:
        value = self._body.get(name, default)
        if value is default and default is not _MISSING:
            return cast("T", value)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise DocumentError(f"{self._what}: field {name!r} is missing or of the wrong type")
        return value

    def number(self, name: str) -> float:
        return float(self.get(name, (int, float)))

    def optional(self, name: str, kind: type[T]) -> T | None:
        return None if self._body.get(name) is None else self.get(name, kind)

    def strings(self, name: str) -> tuple[str, ...]:
        items = self.get(name, list)
        if not all(isinstance(item, str) for item in items):
            raise DocumentError(f"{self._what}: field {name!r} must hold strings")
        return tuple(items)

    def maps(self, name: str) -> list[Fields]:
        items = self.get(name, list)
        return [Fields(_as_map(item, self._what), f"{self._what}.{name}") for item in items]

    def numbers(self, name: str) -> dict[str, int | float]:
        items = self.get(name, dict)
        if not all(isinstance(k, str) and type(v) in (int, float) for k, v in items.items()):
            raise DocumentError(f"{self._what}: field {name!r} must map names to numbers")
        return items

    def attempt(self, name: str) -> str:
        text = self.get(name, str)
        try:
            Attempt.parse(text)
        except ValueError as error:
            raise DocumentError(f"{self._what}: field {name!r}: {error}") from error
        return text

    def digest(self, name: str) -> Digest:
        raw = self.get(name, bytes)
        if len(raw) != DIGEST_BYTES:
            raise DocumentError(f"{self._what}: field {name!r} is not a digest")
        return Digest(raw)


def _as_map(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DocumentError(f"{what}: expected a map")
    return value


# --- commit records ---------------------------------------------------------------------------


def encode_record(record: CommitRecord) -> bytes:
    """The commit record's bytes; always more than :data:`END_LIMIT_BYTES`."""
    body = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    body["metadata"] = values.encode(dict(record.metadata), "metadata")
    body["state_info"] = values.encode(dict(record.state_info), "state info")
    body["components"] = [dataclasses.asdict(component) for component in record.components]
    body["tables"] = {
        name: {
            "digest": ref.digest,
            "size_bytes": ref.size_bytes,
            "inline": ref.inline,
            "pieces": [[piece.digest, piece.key, piece.size_bytes] for piece in ref.pieces],
        }
        for name, ref in record.tables.items()
    }
    return seal("commit", body)


def decode_commit(data: bytes, what: str, attempt: str = "") -> CommitRecord | CommitEnd:
    """What stands at a commit key.

    Args:
        attempt: of the key: VOID and GONE are too short to repeat it.

    Raises:
        DocumentError, FormatTooNewError.
    """
    kind, body = unseal(data, "commit", "void", "gone", what=what)
    fields = Fields(body, what)
    if kind != "commit":
        return CommitEnd(attempt, cast(Any, kind), fields.get("reason", str))
    return CommitRecord(
        attempt=fields.attempt("attempt"),
        checkpoint=fields.attempt("checkpoint"),
        generation=fields.get("generation", int),
        run=fields.get("run", str),
        step=fields.get("step", int),
        epoch=fields.get("epoch", int),
        sequence=fields.get("sequence", int),
        session=fields.get("session", str),
        origin=fields.get("origin", str),
        parents=fields.strings("parents"),
        created_at=fields.number("created_at"),
        world_size=fields.get("world_size", int),
        host=fields.get("host", str),
        writer=fields.get("writer", str),
        chunk_bytes=fields.get("chunk_bytes", int),
        metrics=fields.numbers("metrics"),
        metadata=_as_map(unpack.decode(fields.get("metadata", bytes), what="metadata"), what),
        tags=fields.strings("tags"),
        not_captured=fields.strings("not_captured"),
        state_info=_as_map(unpack.decode(fields.get("state_info", bytes), what="state info"), what),
        timings={name: float(value) for name, value in fields.numbers("timings").items()},
        components=tuple(_component(item) for item in fields.maps("components")),
        tables=_tables(_as_map(fields.get("tables", dict), what), what),
    )


def _component(fields: Fields) -> ComponentSummary:
    return ComponentSummary(
        name=fields.get("name", str),
        tensors=fields.get("tensors", int),
        chunks=fields.get("chunks", int),
        logical_bytes=fields.get("logical_bytes", int),
        new_bytes=fields.get("new_bytes", int),
        reused_bytes=fields.get("reused_bytes", int),
    )


def _tables(body: Mapping[str, Any], what: str) -> dict[str, TableRef]:
    if set(body) != set(TABLE_NAMES):
        raise DocumentError(f"{what}: tables must be {TABLE_NAMES}")
    return {name: _table_ref(Fields(_as_map(body[name], what), f"{what}.{name}")) for name in TABLE_NAMES}


def _table_ref(fields: Fields) -> TableRef:
    pieces = []
    for item in fields.get("pieces", list):
        try:
            digest, key, size = item
            name = ObjectName.parse(key)
        except (ValueError, TypeError) as error:
            raise DocumentError(f"a table piece is malformed: {error}") from error
        if name.digest != digest or not isinstance(size, int) or size < 0:
            raise DocumentError("a table piece does not match its key")
        pieces.append(TablePiece(name.digest, key, size))
    inline = fields.optional("inline", bytes)
    size = fields.get("size_bytes", int)
    if (len(inline) if inline is not None else sum(piece.size_bytes for piece in pieces)) != size:
        raise DocumentError("a table's size does not match its pieces")
    return TableRef(fields.digest("digest"), size, inline, tuple(pieces))


def encode_end(end: CommitEnd) -> bytes:
    """VOID or GONE; under :data:`END_LIMIT_BYTES`, so the attempt is left to the key and the reason cut."""
    reason = end.reason.encode("ascii", "replace").decode()[:_MAX_REASON]
    return seal(end.kind, {"reason": reason})


# --- the others -------------------------------------------------------------------------------


def _plain(document: Any) -> dict[str, Any]:
    body = {field.name: getattr(document, field.name) for field in dataclasses.fields(document)}
    return {name: list(map(list, v)) if name == "pins" else v for name, v in body.items()}


def encode_epoch(epoch: EpochDoc) -> bytes:
    """``runs/<run key>/epochs/<n>.mp``."""
    return seal("epoch", _plain(epoch))


def decode_epoch(data: bytes, what: str) -> EpochDoc:
    """Reads an epoch document back; raises DocumentError, FormatTooNewError."""
    fields = Fields(unseal(data, "epoch", what=what)[1], what)
    return EpochDoc(
        run=fields.get("run", str),
        number=fields.get("number", int),
        session=fields.get("session", str),
        host=fields.get("host", str),
        boot_id=fields.get("boot_id", str),
        pid=fields.get("pid", int),
        started_at=fields.number("started_at"),
        resumed_from=fields.optional("resumed_from", str),
        rewound=fields.get("rewound", bool),
        session_key=fields.get("session_key", str),
    )


def encode_intent(intent: IntentDoc) -> bytes:
    """``intents/<attempt>.mp``."""
    return seal("intent", _plain(intent))


def decode_intent(data: bytes, what: str) -> IntentDoc:
    """Reads an intent back; raises DocumentError, FormatTooNewError."""
    fields = Fields(unseal(data, "intent", what=what)[1], what)
    kind = fields.get("kind", str)
    pins = []
    for pin in fields.get("pins", list):
        if not (isinstance(pin, list) and len(pin) == 2 and all(isinstance(part, str) for part in pin)):
            raise DocumentError(f"{what}: a pin is malformed")
        pins.append((pin[0], pin[1]))
    if kind not in INTENT_KINDS:
        raise DocumentError(f"{what}: unknown intent kind {kind[:20]!r}")
    return IntentDoc(
        attempt=fields.attempt("attempt"),
        kind=cast(Any, kind),
        run=fields.get("run", str),
        host=fields.get("host", str),
        pid=fields.get("pid", int),
        user=fields.get("user", str),
        created_at=fields.number("created_at"),
        pins=tuple(pins),
        reason=fields.get("reason", str),
    )


def encode_note(note: Note) -> bytes:
    """``notes/<run key>/<checkpoint>.<n>.<ulid>.mp``."""
    return seal("note", _plain(note))


_NOTE_FIELDS: Final[Mapping[str, Callable[[Fields], object]]] = {
    "metrics": lambda data: data.numbers("metrics"),
    "tag": lambda data: data.get("tag", str),
    "untag": lambda data: data.get("tag", str),
    "verified": lambda data: data.get("complete", bool),
    "damaged": lambda data: data.get("reason", str),
}


def decode_note(data: bytes, what: str) -> Note:
    """Reads a note back; raises DocumentError, FormatTooNewError."""
    fields = Fields(unseal(data, "note", what=what)[1], what)
    kind = fields.get("kind", str)
    if kind not in NOTE_KINDS:
        raise FormatTooNewError(f"{what}: unknown note kind {kind[:20]!r}", hint="upgrade ckptstore here")
    content = fields.get("data", dict)
    if kind in _NOTE_FIELDS:
        _NOTE_FIELDS[kind](Fields(content, what))
    return Note(
        run=fields.get("run", str),
        checkpoint=fields.attempt("checkpoint"),
        number=fields.get("number", int),
        ulid=fields.get("ulid", str),
        kind=cast(Any, kind),
        at=fields.number("at"),
        author=fields.get("author", str),
        attempt=fields.optional("attempt", str),
        data=content,
    )
