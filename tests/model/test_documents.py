import dataclasses
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import DocumentError, FormatTooNewError
from ckptstore.model import documents
from ckptstore.model.documents import (
    END_LIMIT_BYTES,
    decode_commit,
    decode_epoch,
    decode_intent,
    decode_note,
    encode_end,
    encode_epoch,
    encode_intent,
    encode_note,
    encode_record,
    seal,
    unseal,
)
from ckptstore.model.ids import MAX_STEP, Digest, chunk_key, digest_of
from ckptstore.model.record import (
    INTENT_KINDS,
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
from tests.model.made import QUICK, attempt, difference, plain_values, session

int64s = st.integers(-(2**63), 2**63 - 1)
naturals = st.integers(0, 2**63 - 1)
texts = st.text(max_size=20)
attempts = st.builds(
    attempt, st.integers(0, 2**80 - 1), st.integers(-(2**63), MAX_STEP), st.integers(0, 2**31)
)
times = st.floats(0, 4e9)
numbers = st.one_of(int64s, st.floats())
metrics = st.dictionaries(texts, numbers, max_size=4)


@st.composite
def table_refs(draw):
    if draw(st.booleans()):
        data = draw(st.binary(max_size=40))
        return TableRef(digest_of(data), len(data), data)
    pieces = []
    for n in range(draw(st.integers(0, 3))):
        digest = digest_of(bytes([n]))
        pieces.append(TablePiece(digest, chunk_key(digest, draw(attempts), 0), draw(st.integers(0, 2**40))))
    return TableRef(digest_of(b"t"), sum(piece.size_bytes for piece in pieces), None, tuple(pieces))


components = st.builds(ComponentSummary, texts, naturals, naturals, naturals, naturals, naturals)
records = st.builds(
    CommitRecord,
    attempt=attempts,
    checkpoint=attempts,
    generation=naturals,
    run=texts,
    step=int64s,
    epoch=naturals,
    sequence=naturals,
    session=st.just(session(1)),
    origin=texts,
    parents=st.lists(texts, max_size=3).map(tuple),
    created_at=times,
    world_size=naturals,
    host=texts,
    writer=texts,
    chunk_bytes=naturals,
    metrics=metrics,
    metadata=st.dictionaries(texts, plain_values, max_size=3),
    tags=st.lists(texts, max_size=3).map(tuple),
    not_captured=st.lists(texts, max_size=3).map(tuple),
    state_info=st.dictionaries(texts, plain_values, max_size=2),
    timings=st.dictionaries(texts, st.floats(0, 100), max_size=3),
    components=st.lists(components, max_size=3).map(tuple),
    tables=st.fixed_dictionaries({name: table_refs() for name in TABLE_NAMES}),
)
ends = st.builds(CommitEnd, attempts, st.sampled_from(["void", "gone"]), texts)
epochs = st.builds(
    EpochDoc,
    run=texts,
    number=naturals,
    session=st.just(session(1)),
    host=texts,
    boot_id=texts,
    pid=naturals,
    started_at=times,
    resumed_from=st.one_of(st.none(), attempts),
    rewound=st.booleans(),
    session_key=texts,
)
intents = st.builds(
    IntentDoc,
    attempt=attempts,
    kind=st.sampled_from(INTENT_KINDS),
    run=texts,
    host=texts,
    pid=naturals,
    user=texts,
    created_at=times,
    pins=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    reason=texts,
)
note_data: st.SearchStrategy[tuple[str, dict[str, object]]] = st.one_of(
    st.tuples(st.just("metrics"), metrics.map(lambda m: {"metrics": m})),
    st.tuples(st.sampled_from(["tag", "untag"]), texts.map(lambda t: {"tag": t})),
    st.tuples(st.sampled_from(["invalid", "damaged"]), texts.map(lambda t: {"reason": t})),
    st.tuples(st.just("verified"), st.booleans().map(lambda b: {"chunks": 3, "bytes": 5, "complete": b})),
    st.tuples(st.sampled_from(["valid", "forgotten", "expiring"]), st.just({})),
)
notes = st.builds(
    lambda kind_data, **rest: Note(kind=kind_data[0], data=kind_data[1], **rest),
    note_data,
    run=texts,
    checkpoint=attempts,
    number=naturals,
    ulid=st.just(session(2)),
    at=times,
    author=texts,
    attempt=st.one_of(st.none(), attempts),
)
KINDS = [
    (encode_epoch, decode_epoch, epochs),
    (encode_intent, decode_intent, intents),
    (encode_note, decode_note, notes),
]


def same(a, b):
    fields = [field.name for field in dataclasses.fields(a)]
    return type(a) is type(b) and all(
        getattr(a, name) == getattr(b, name)  # frozen parts, in no order of their own
        if name in ("tables", "components", "pins")
        else difference(getattr(a, name), getattr(b, name)) is None
        for name in fields
    )


@QUICK
@given(st.dictionaries(texts, st.one_of(int64s, texts, st.binary(max_size=9)), max_size=4))
def test_what_is_sealed_is_unsealed(body):
    assert unseal(seal("note", body), "epoch", "note", what="k") == ("note", body)
    with pytest.raises(DocumentError, match="expected epoch"):
        unseal(seal("note", body), "epoch", what="k")


@QUICK
@given(records)
def test_a_record_comes_back_and_is_never_as_small_as_an_end(record):
    data = encode_record(record)
    assert len(data) >= END_LIMIT_BYTES
    assert same(decode_commit(data, "k"), record)


def test_the_smallest_record_is_still_larger_than_an_end():
    empty = TableRef(digest_of(b""), 0, b"")
    record = CommitRecord(
        attempt(), attempt(), 0, "", 0, 0, 0, "", "", (), 0.0, 0, "", "", 0, {}, {}, (), (), {}, {}, (),
        dict.fromkeys(TABLE_NAMES, empty),
    )  # fmt: skip
    assert len(encode_record(record)) >= END_LIMIT_BYTES


@QUICK
@given(ends)
def test_an_end_is_under_128_bytes_and_comes_back_with_its_reason_cut(end):
    data = encode_end(end)
    assert len(data) < END_LIMIT_BYTES
    found = decode_commit(data, "k", end.attempt)
    assert (found.attempt, found.kind) == (end.attempt, end.kind)
    assert end.reason.encode("ascii", "replace").decode().startswith(found.reason)


def test_an_end_keeps_a_short_reason_whole():
    found = decode_commit(encode_end(CommitEnd(attempt(1, 5, 1), "gone", "")), "k")
    assert (found.kind, found.reason) == ("gone", "")
    assert decode_commit(encode_end(CommitEnd(attempt(1, 5, 1), "void", "gc")), "k").reason == "gc"


@pytest.mark.parametrize(
    ("step", "tries"), [(10**9, 10**4), (10**12, 1), (MAX_STEP, 1), (-(2**63), 10**10 - 1)]
)
def test_an_end_with_a_long_attempt_id_is_under_128_bytes(step, tries):
    longest = attempt(2**80 - 1, step, tries)
    data = encode_end(CommitEnd(longest, "void", "session-superseded" * 20))
    assert len(data) < END_LIMIT_BYTES
    assert decode_commit(data, "k", longest).attempt == longest


@QUICK
@given(st.data())
def test_epochs_intents_and_notes_come_back(data):
    encode, decode, drawn = data.draw(st.sampled_from(KINDS))
    document = data.draw(drawn)
    assert same(decode(encode(document), "k"), document)


def samples():
    empty = TableRef(digest_of(b"abc"), 3, b"abc")
    record = CommitRecord(
        attempt(), attempt(), 0, "run", 1, 1, 1, session(), "save", (), 1.5, 1, "h", "w", 1024, {"loss": 0.5},
        {"note": "x"}, ("best",), (), {}, {"commit": 0.1}, (ComponentSummary("m", 1, 1, 4, 4, 0),),
        dict.fromkeys(TABLE_NAMES, empty),
    )  # fmt: skip
    yield "record", encode_record(record), decode_commit
    yield "void", encode_end(CommitEnd(attempt(), "void", "crash")), decode_commit
    yield "gone", encode_end(CommitEnd(attempt(), "gone", "")), decode_commit
    yield "epoch", encode_epoch(EpochDoc("r", 1, session(), "h", "b", 7, 1.0, None, False, "")), decode_epoch
    yield (
        "intent",
        encode_intent(IntentDoc(attempt(), "save", "r", "h", 1, "u", 1.0, (("k", attempt()),), "")),
        decode_intent,
    )
    yield (
        "note",
        encode_note(Note("r", attempt(), 1, session(), "tag", 1.0, "a", None, {"tag": "t"})),
        decode_note,
    )


@pytest.mark.parametrize(("data", "decode"), [s[1:] for s in samples()], ids=[s[0] for s in samples()])
def test_every_flipped_bit_and_every_cut_is_found(data, decode):
    decode(data, "k")
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises((DocumentError, FormatTooNewError)):
                decode(bytes(flipped), "k")
    for end in range(len(data)):
        with pytest.raises(DocumentError):
            decode(data[:end], "k")
    with pytest.raises(DocumentError):
        decode(data + b"\0", "k")


@pytest.mark.parametrize(("data", "decode"), [s[1:] for s in samples()], ids=[s[0] for s in samples()])
def test_every_changed_byte_is_found_or_changes_nothing(data, decode):
    good = decode(data, "k")
    for at in range(len(data)):
        for value in {0x00, 0x01, 0x02, 0x7F, 0x80, 0xA0, 0xC0, 0xC2, 0xC3, 0xFF, data[at] ^ 0xFF} - {
            data[at]
        }:
            changed = bytearray(data)
            changed[at] = value
            try:
                found = decode(bytes(changed), "k")
            except (DocumentError, FormatTooNewError):
                continue
            assert same(found, good), f"byte {at} to {value:#x}"


def test_a_document_of_a_newer_format_says_so():
    data = msgpack.packb({"format": documents.FORMAT + 1, "kind": "note", "digest": b"", "body": b""})
    with pytest.raises(FormatTooNewError, match="format 2"):
        unseal(data, "note", what="k")


def test_a_note_of_a_newer_kind_says_so():
    body = {"run": "r", "kind": "sealed", "data": {}}
    with pytest.raises(FormatTooNewError, match="sealed"):
        decode_note(seal("note", body), "k")


@QUICK
@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_decoding_do_anything_but_refuse(data):
    for decode in (decode_commit, decode_epoch, decode_intent, decode_note):
        with pytest.raises((DocumentError, FormatTooNewError)):
            decode(data, "k")


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,
        b"\x81\x01" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xc6\xff\xff\xff\xffabc",
        b"\xc9\xff\xff\xff\xff\x01abc",
        msgpack.packb(
            {"format": 1, "kind": "note", "digest": digest_of(b"\x91" * 9999), "body": b"\x91" * 9999}
        ),
        msgpack.packb({"format": 1, "kind": "note", "digest": digest_of(b"\x90"), "body": b"\x90"}),
        msgpack.packb({"format": 1, "kind": 3, "digest": b"", "body": b""}),
        msgpack.packb({"format": True, "kind": "note", "digest": 1, "body": 1}),
        msgpack.packb({"format": -1, "kind": "note", "digest": digest_of(b""), "body": b""}),
        msgpack.packb([1, 2]),
        bytes(documents.MAX_DOCUMENT_BYTES + 1),
    ],
    ids=lambda data: f"{data[:5].hex()}-{len(data)}",
)
def test_hostile_documents_are_refused_at_once(data):
    with pytest.raises(DocumentError):
        unseal(data, "note", what="k")


record_body = msgpack.unpackb(msgpack.unpackb(next(samples())[1])["body"], strict_map_key=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempt", "no attempt"),
        ("step", "1"),
        ("step", 1.0),
        ("step", True),
        ("epoch", None),
        ("metrics", {"a": "b"}),
        ("metrics", {"a": True}),
        ("metrics", []),
        ("parents", [1]),
        ("tags", "abc"),
        ("metadata", b"\x01"),
        ("metadata", b""),
        ("state_info", b"\xc1"),
        ("components", [1]),
        ("components", [{}]),
        ("tables", {}),
        (
            "tables",
            {
                name: {"digest": bytes(32), "size_bytes": 4, "inline": b"abc", "pieces": []}
                for name in TABLE_NAMES
            },
        ),
        (
            "tables",
            {
                name: {"digest": bytes(31), "size_bytes": 3, "inline": b"abc", "pieces": []}
                for name in TABLE_NAMES
            },
        ),
        (
            "tables",
            {
                name: {
                    "digest": bytes(32),
                    "size_bytes": 3,
                    "inline": None,
                    "pieces": [[bytes(32), "../../etc", 3]],
                }
                for name in TABLE_NAMES
            },
        ),
        (
            "tables",
            {
                name: {
                    "digest": bytes(32),
                    "size_bytes": 3,
                    "inline": None,
                    "pieces": [[bytes(32), chunk_key(Digest(bytes([1] * 32)), attempt(), 0), 3]],
                }
                for name in TABLE_NAMES
            },
        ),
    ],
)
def test_a_record_with_an_impossible_field_is_refused(field, value):
    decode_commit(seal("commit", record_body), "k")
    with pytest.raises(DocumentError):
        decode_commit(seal("commit", {**record_body, field: value}), "k")
    without = {name: item for name, item in record_body.items() if name != field}
    with pytest.raises(DocumentError):
        decode_commit(seal("commit", without), "k")


def test_nan_and_infinite_metrics_survive_in_a_record():
    found = decode_commit(
        seal("commit", {**record_body, "metrics": {"a": math.nan, "b": -math.inf, "c": 2**62}}), "k"
    )
    assert math.isnan(found.metrics["a"])
    assert found.metrics["b"] == -math.inf
    assert type(found.metrics["c"]) is int
