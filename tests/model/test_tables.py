import subprocess
import sys

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import DocumentError
from ckptstore.model import columns
from ckptstore.model.boxes import Box
from ckptstore.model.dtypes import BY_CODE, BY_NAME
from ckptstore.model.ids import chunk_key, digest_of
from ckptstore.model.layout import Layout, Tensor
from ckptstore.model.tables import (
    KeyList,
    Locations,
    decode_digests,
    encode_digests,
    written_bytes,
)
from tests.model.made import QUICK, attempt, key_lists, layouts

integers = {
    "|u1": (0, 255),
    "<u2": (0, 2**16 - 1),
    "<u4": (0, 2**32 - 1),
    "<u8": (0, 2**64 - 1),
    "<i8": (-(2**63), 2**63 - 1),
}


@st.composite
def tables(draw):
    found = {}
    for name in draw(st.lists(st.text(max_size=5), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(list(integers)))
        low, high = integers[dtype]
        found[name] = np.array(draw(st.lists(st.integers(low, high), max_size=9)), dtype)
    return found


def same_columns(a, b):
    return list(a) == list(b) and all(
        x.dtype == y.dtype and x.tolist() == y.tolist() for x, y in zip(a.values(), b.values(), strict=True)
    )


@QUICK
@given(tables())
def test_a_table_comes_back_column_by_column(table):
    assert same_columns(columns.decode_columns(columns.encode_columns(table), list(table), "t"), table)


@QUICK
@given(tables(), st.data())
def test_a_cut_or_lengthened_table_is_refused(table, data):
    encoded = columns.encode_columns(table)
    at = data.draw(st.integers(0, len(encoded) - 1))
    for wrong in (encoded[:at], encoded + b"\0", encoded + encoded):
        with pytest.raises(DocumentError):
            columns.decode_columns(wrong, list(table), "t")


@QUICK
@given(tables(), st.data())
def test_a_flipped_bit_is_refused_or_still_a_table_of_the_same_size(table, data):
    # Tables carry no digest of their own (the record holds it): what matters is that nothing else happens.
    encoded = bytearray(columns.encode_columns(table))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = columns.decode_columns(bytes(encoded), list(table), "t")
    except DocumentError:
        return
    assert sum(column.nbytes for column in found.values()) <= len(encoded)


def test_a_column_of_another_kind_is_refused_when_it_is_written():
    for wrong in (np.zeros((2, 2), "<i8"), np.zeros(2, "<f8"), np.zeros(2, "<i4"), np.array(["a"])):
        with pytest.raises(ValueError, match="must be one-dimensional"):
            columns.encode_columns({"a": wrong})


def head(rows):
    header = msgpack.packb(rows)
    return b"CKT1" + len(header).to_bytes(4, "little") + header


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"CKT1",
        b"CKT2\0\0\0\0",
        b"CKT1\xff\xff\xff\xff",
        head([["a", "<i8", 2**62]]),
        head([["a", "|u1", 2**63 - 1]]),
        head([["a", "<i8", -1]]),
        head([["a", "|O", 1]]) + bytes(8),
        head([["a", "<f8", 1]]) + bytes(8),
        head([["a", "|u1", 0], ["a", "|u1", 0]]),
        head([["a", "|u1"]]),
        head([[b"a", 1, "x"]]),
        head({"a": 1}),
        head(7),
        head([["a", "|u1", float("nan")]]),
        b"CKT1" + (4000).to_bytes(4, "little") + b"\x91" * 4000,
        pytest.param(
            head([["a", "|u1", float("inf")]]),
            id="infinite count",
        ),
    ],
)
def test_a_hostile_header_is_a_document_error(data):
    with pytest.raises(DocumentError):
        columns.decode_columns(data, ["a"], "t")


def test_a_missing_column_is_named():
    with pytest.raises(DocumentError, match=r"\['b'\] are missing"):
        columns.decode_columns(columns.encode_columns({"a": np.zeros(1, "<i8")}), ["a", "b"], "t")


@QUICK
@given(st.lists(st.text(st.characters(exclude_categories=[]))))
def test_texts_come_back(texts):
    assert columns.decode_texts(*columns.encode_texts(texts), "t") == texts


@pytest.mark.parametrize(
    ("data", "ends"), [(b"abc", [4]), (b"abc", [2]), (b"abc", [2, 1, 3]), (b"abc", [-1, 3]), (b"\xff", [1])]
)
def test_texts_whose_positions_do_not_fit_are_refused(data, ends):
    with pytest.raises(DocumentError):
        columns.decode_texts(np.frombuffer(data, "|u1"), np.array(ends, "<i8"), "t")


# --- layout --------------------------------------------------------------------------------------


@QUICK
@given(layouts())
def test_a_layout_comes_back(layout):
    found = Layout.decode(layout.encode())
    assert found == layout
    assert found.encode() == layout.encode()
    assert found.check_coverage() == []


@QUICK
@given(layouts(), st.data())
def test_a_damaged_layout_is_refused_or_decodes_to_something_bounded(layout, data):
    encoded = bytearray(layout.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    cut_at = data.draw(st.one_of(st.none(), st.integers(0, len(encoded))))
    try:
        found = Layout.decode(bytes(encoded[:cut_at]))
    except DocumentError:
        return
    assert len(found.tensors) <= len(encoded)


def edited_layout(**changes):
    """A layout table of one tensor of shape (4,) with some columns replaced."""
    layout = Layout(
        (Tensor("a", "c", BY_NAME["float32"], (4,), "torch", (Box((0,), (4,)),)),), (("b", 0),), 1024
    )
    names = list(columns.decode_columns(layout.encode(), [], "t"))
    table = dict(columns.decode_columns(layout.encode(), names, "t"))
    table.update({name: np.array(value, table[name].dtype) for name, value in changes.items()})
    return columns.encode_columns(table)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [-4]},
        {"box_offsets": [-1]},
        {"box_sizes": [-1]},
        {"shape": [4, 4]},
        {"box_sizes": [4, 4]},
        {"ndim": [65]},
        {"ndim": [2]},
        {"ndim": []},
        {"boxes": [2]},
        {"boxes": [0]},
        {"dtype": [0]},
        {"dtype": [255]},
        {"kind": [9]},
        {"component": [7]},
        {"name_ends": [0]},
        {"chunk_bytes": []},
        {"alias_of": [2]},
        {"alias_of": []},
        {"alias_text": list(b"a")},
        {"alias_of": [1]},
        {"chunk_bytes": [0]},
    ],
    ids=repr,
)
def test_an_impossible_layout_is_a_document_error(changes):
    with pytest.raises(DocumentError):
        Layout.decode(edited_layout(**changes))


_HOSTILE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from ckptstore.errors import DocumentError
from ckptstore.model.layout import Layout
try:
    layout = Layout.decode(bytes.fromhex(sys.argv[1]))
    layout.check_coverage()
    len(layout.chunks)
except DocumentError:
    print("refused")
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"boxes": [2**32 - 1]},
        {"boxes": [2**32 - 1], "ndim": [0], "shape": [], "box_offsets": [], "box_sizes": []},
        {"shape": [2**62], "box_sizes": [2**62]},
        {"shape": [2**62], "box_sizes": [2**62], "chunk_bytes": [1]},
    ],
    ids=["four billion boxes", "of a scalar", "sixteen exabytes", "a chunk per byte"],
)
def test_a_layout_of_hostile_size_is_refused_soon_and_in_little_memory(changes):
    done = subprocess.run(
        [sys.executable, "-c", _HOSTILE, edited_layout(**changes).hex()],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.stdout.strip() == "refused", done.stderr[-300:]


def test_dtype_codes_and_names_are_unique_and_never_change():
    assert len(BY_NAME) == len(BY_CODE) == 22
    assert [(code, BY_CODE[code].name) for code in (1, 9, 11, 13, 16, 22)] == [
        (1, "bool"),
        (9, "int64"),
        (11, "bfloat16"),
        (13, "float64"),
        (16, "complex128"),
        (22, "float4_e2m1fn_x2"),
    ]


@QUICK
@given(layouts())
def test_the_chunk_map_agrees_with_the_chunk_boxes(layout):
    chunks = layout.chunks
    for i, tensor in enumerate(layout.tensors):
        rows = range(int(chunks.first[i]), int(chunks.first[i + 1]))
        boxes = layout.chunk_boxes(i)
        assert [int(chunks.nbytes[row]) for row in rows] == [b.numel * tensor.dtype.itemsize for b in boxes]
        assert all(int(chunks.tensor[row]) == i for row in rows)
    assert len(chunks) == chunks.first[-1]


# --- digests, keys, locations --------------------------------------------------------------------


@QUICK
@given(st.integers(0, 5), st.integers(0, 5))
def test_digests_come_back_and_a_wrong_count_is_refused(count, asked):
    digests = [digest_of(bytes([n])) for n in range(count)]
    encoded = encode_digests(digests)
    if asked == count:
        assert decode_digests(encoded, asked) == digests
    else:
        with pytest.raises(DocumentError, match="rows"):
            decode_digests(encoded, asked)


@QUICK
@given(key_lists())
def test_a_key_list_comes_back(keys):
    found = KeyList.decode(keys.encode())
    assert found.keys == keys.keys
    assert found.sizes.tolist() == keys.sizes.tolist()


def two_keys():
    return KeyList.of({chunk_key(digest_of(bytes([n])), attempt(1), 0): 100 + n for n in range(2)})


def edited(encoded, **changes):
    table = dict(columns.decode_columns(encoded, [], "t"))
    table.update({name: np.array(value, table[name].dtype) for name, value in changes.items()})
    return columns.encode_columns(table)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": [1, -1]},
        {"size": [1]},
        {"attempt": [0, 9]},
        {"digest": list(bytes(64))},
        {"digest": list(bytes(63))},
        {"attempt_text": list(b"no attempt"), "attempt_ends": [10]},
        {"rank": [0]},
        {"is_pack": []},
    ],
    ids=repr,
)
def test_an_impossible_key_list_is_refused(changes):
    with pytest.raises(DocumentError):
        KeyList.decode(edited(two_keys().encode(), **changes))


def test_a_key_list_that_is_not_sorted_is_refused():
    keys = two_keys()
    table = dict(columns.decode_columns(keys.encode(), [], "t"))
    table["digest"] = np.concatenate([table["digest"][32:], table["digest"][:32]])
    with pytest.raises(DocumentError, match="sorted"):
        KeyList.decode(columns.encode_columns(table))


def locations(rows):
    table = np.array(rows, np.int64).reshape(len(rows), 3)
    return Locations(table[:, 0], table[:, 1], table[:, 2], np.zeros(len(rows), np.uint8))


def test_locations_come_back():
    keys = two_keys()
    given_rows = locations([(0, 0, 60), (1, 41, 60), (0, 60, 40)])
    found = Locations.decode(given_rows.encode(), np.array([60, 60, 40]), keys)
    assert found.object.tolist() == [0, 1, 0]
    assert found.offset.tolist() == [0, 41, 60]
    assert found.length.tolist() == [60, 60, 40]


@pytest.mark.parametrize(
    ("rows", "nbytes", "word"),
    [
        ([(2, 0, 1)], [1], "not in the key list"),
        ([(0, 100, 1)], [1], "outside"),
        ([(0, -1, 1)], [1], "outside"),
        ([(0, 0, 101)], [101], "outside"),
        ([(0, 0, -1)], [-1], "outside"),
        ([(0, 2**63 - 1, 1)], [1], "outside"),
        ([(0, 0, 10)], [11], "differs"),
        ([(0, 0, 10)], [10, 10], "rows"),
    ],
)
def test_impossible_locations_are_refused(rows, nbytes, word):
    with pytest.raises(DocumentError, match=word):
        Locations.decode(locations(rows).encode(), np.array(nbytes), two_keys())


def test_a_codec_of_a_later_release_is_refused():
    rows = locations([(0, 0, 10)])
    later = Locations(rows.object, rows.offset, rows.length, np.array([1], np.uint8))
    with pytest.raises(DocumentError, match="codec 1"):
        Locations.decode(later.encode(), np.array([10]), two_keys())


def test_equal_chunks_of_one_save_count_as_written_once():
    own, other = attempt(1), attempt(2)
    layout = Layout(
        tuple(
            Tensor(name, "c", BY_NAME["uint8"], (10,), "torch", (Box((0,), (10,)),))
            for name in ("a", "b", "c")
        ),
        (),
        1024,
    )
    keys = KeyList.of({chunk_key(digest_of(b"x"), own, 0): 10, chunk_key(digest_of(b"y"), other, 0): 10})
    mine = next(i for i, key in enumerate(keys.keys) if own in key)
    rows = locations([(mine, 0, 10), (mine, 0, 10), (1 - mine, 0, 10)])
    assert written_bytes(layout, rows, keys, own).tolist() == [10, 0, 0]
    assert written_bytes(layout, rows, keys, other).tolist() == [0, 0, 10]
