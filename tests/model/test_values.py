import collections
import contextlib
import datetime
import decimal
import enum
import pathlib
import subprocess
import sys
import threading
import time
import uuid

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import DocumentError, UnsupportedValueError
from ckptstore.model import plain, unpack, values
from ckptstore.model.targets import Opaque
from tests.model.made import QUICK, difference, keys, plain_values


@settings(QUICK, max_examples=400)
@given(plain_values)
def test_any_nested_value_comes_back_with_equal_value_and_exact_types(value):
    assert difference(value, unpack.decode(values.encode(value))) is None


@QUICK
@given(st.dictionaries(keys, st.integers(), max_size=6))
def test_keys_of_every_kind_keep_their_type_and_their_order(value):
    found = unpack.decode(values.encode(value))
    assert difference(list(value), list(found)) is None


@QUICK
@given(plain_values)
def test_encoding_is_the_same_every_time(value):
    # An unchanged tree is then stored once.
    assert values.encode(value) == values.encode(unpack.decode(values.encode(value)))


def test_numbers_that_look_alike_stay_apart():
    value = [1, 1.0, True, np.int64(1), np.float32(1), np.bool_(True), 1 + 0j, decimal.Decimal(1), "1", b"1"]
    found = unpack.decode(values.encode(value))
    assert [type(item) for item in found] == [type(item) for item in value]


def test_a_defaultdict_still_makes_defaults_and_a_deque_still_drops():
    found = unpack.decode(
        values.encode([collections.defaultdict(list, a=[1]), collections.deque([1, 2], maxlen=2)])
    )
    found[0]["b"].append(2)
    found[1].append(3)
    assert found == [{"a": [1], "b": [2]}, collections.deque([2, 3])]


@pytest.mark.parametrize(
    "make", [lambda v: [v], lambda v: {"k": v}, lambda v: (v,), lambda v: collections.OrderedDict(k=v)]
)
def test_nesting_up_to_the_limit_comes_back_and_beyond_is_refused(make):
    value = 1
    for _ in range(plain.MAX_DEPTH):
        value = make(value)
    assert unpack.decode(values.encode(value)) == value
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        values.encode(make(value))


def test_a_container_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        values.encode({"a": loop})


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Pair(collections.namedtuple("Pair", "a b")):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Level.LOW,
        Text("a"),
        Pair(1, 2),
        lambda: 1,
        len,
        int,
        threading.Lock(),
        torch.Generator(),
        np.str_("a"),
        np.longdouble(1) if np.dtype(np.longdouble).itemsize > 16 else np.bytes_(b"a"),
        np.void(b"abc"),
        collections.defaultdict(lambda: 1),
        collections.ChainMap({}),
        time.struct_time(range(9)),
        datetime.time(1, tzinfo=datetime.UTC),
        memoryview(b"abc"),
        iter([]),
        NotImplemented,
        type("Own", (dict,), {})(),
        type("Own", (int,), {})(1),
        type("Own", (datetime.datetime,), {})(2020, 1, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_listed_is_refused_with_its_path_and_type(value):
    with pytest.raises(UnsupportedValueError) as caught:
        values.encode({"optimizer": {"param_groups": [{"hook": value}]}})
    assert caught.value.path == "optimizer.param_groups[0].hook"
    assert "optimizer.param_groups[0].hook" in caught.value.message
    assert type(value).__name__ in caught.value.message or "defaultdict" in caught.value.message
    assert caught.value.hint is not None or "defaultdict" in caught.value.message


@pytest.mark.parametrize(
    "key",
    [Colour.RED, Level.LOW, Text("a"), np.int64(1), frozenset(), pathlib.Path("a"), (1, Level.LOW), 1j, ...],
)
def test_a_key_of_another_kind_is_refused_and_never_turns_into_something_else(key):
    with pytest.raises(UnsupportedValueError, match="key of type") as caught:
        values.encode({"a": {key: 1}})
    assert "a" in caught.value.path


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2)])
def test_a_tensor_where_only_values_go_is_refused(value):
    with pytest.raises(UnsupportedValueError, match=r"metadata: a\.b is a tensor"):
        values.encode({"a": {"b": value}}, "metadata")


def test_the_name_of_a_fixed_zone_comes_back():
    zone = datetime.timezone(datetime.timedelta(hours=1), "CET")
    found = unpack.decode(values.encode(datetime.datetime(2020, 1, 1, tzinfo=zone)))
    assert found.tzname() == "CET"


def test_the_fold_of_a_time_comes_back():
    assert unpack.decode(values.encode(datetime.time(1, 2, fold=1))).fold == 1


def test_a_torch_value_without_torch_is_a_placeholder_and_no_error():
    data = values.encode([torch.float32, torch.device("cpu"), torch.Size([1, 2])])
    code = (
        "import sys; from ckptstore.model import unpack;"
        f"found = unpack.decode(bytes.fromhex('{data.hex()}'));"
        "assert 'torch' not in sys.modules; print([type(v).__name__ for v in found], found[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['Opaque', 'Opaque', 'tuple'] (1, 2)"


def test_a_dtype_that_this_torch_has_not_is_a_placeholder():
    data = msgpack.packb(msgpack.ExtType(plain.EXT_NAMED, msgpack.packb(["torch.dtype", "torch.float3"])))
    found = unpack.decode(data)
    assert isinstance(found, Opaque)
    assert "torch.float3" in found.reason


# --- hostile input -------------------------------------------------------------------------------


def named(code, *parts):
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(list(parts))))


def container(kind, *parts):
    return msgpack.packb([msgpack.ExtType(plain.EXT_CONTAINER, kind.encode()), *parts])


NOON = "2020-01-01T12:00:00"
HOSTILE = {
    "nothing": b"",
    "too much": b"\x01\x01",
    "deep lists": b"\x91" * 100_000 + b"\x01",
    "deep maps": b"\x81\x01" * 100_000 + b"\x01",
    "four billion items": b"\xdd\xff\xff\xff\xff",
    "four billion keys": b"\xdf\xff\xff\xff\xff",
    "four billion bytes": b"\xc6\xff\xff\xff\xff",
    "four billion characters": b"\xdb\xff\xff\xff\xff",
    "four billion in an extension": b"\xc9\xff\xff\xff\xff\x06",
    "unknown extension": msgpack.packb(msgpack.ExtType(99, b"")),
    "a key twice": b"\x82\x01\x01\x01\x02",
    "a list as key": b"\x81\x91\x01\x01",
    "unknown container": container("eval", "1"),
    "container of no text": msgpack.packb([msgpack.ExtType(1, b"\xff")]),
    "a tensor": named(plain.EXT_TENSOR, 0, "torch", None),
    "unknown factory": container("defaultdict", "eval", {}),
    "factory of no name": container("defaultdict", [1], {}),
    "unhashable in a set": container("set", []),
    "negative deque": container("deque", -1, []),
    "range by zero": container("range", 0, 1, 0),
    "range of floats": container("range", 0.5),
    "empty OrderedDict": container("OrderedDict"),
    "size of text": container("torch.Size", "a"),
    "complex cut short": msgpack.packb(msgpack.ExtType(plain.EXT_COMPLEX, b"123")),
    "object scalar": named(plain.EXT_NUMPY_SCALAR, "O", b"12345678"),
    "empty scalar": named(plain.EXT_NUMPY_SCALAR, "<i4", b""),
    "huge subarray": named(plain.EXT_NUMPY_SCALAR, "(1000000000,)i4", b"1234"),
    "no date": named(plain.EXT_NAMED, "datetime", ["tomorrow", 0]),
    "zone outside": named(plain.EXT_NAMED, "datetime", [NOON, 0, "../../../etc/passwd"]),
    "no decimal": named(plain.EXT_NAMED, "Decimal", "one"),
    "no uuid": named(plain.EXT_NAMED, "UUID", "abc"),
    "unknown kind": named(plain.EXT_NAMED, "module.Class", "x"),
    "number as path": named(plain.EXT_NAMED, "path", 5),
    "size too large": container("torch.Size", 2**63),
    "half an opaque": named(plain.EXT_OPAQUE, "a"),
    "zone is a directory": named(plain.EXT_NAMED, "datetime", [NOON, 0, "America"]),
    "zone of great length": named(plain.EXT_NAMED, "datetime", [NOON, 0, "a" * 5000]),
    "number as uuid": named(plain.EXT_NAMED, "UUID", 5),
    "number as dtype": named(plain.EXT_NAMED, "torch.dtype", 5),
    "no device": named(plain.EXT_NAMED, "torch.device", "bogus"),
    "number as device": named(plain.EXT_NAMED, "torch.device", 5),
    "no numpy dtype": named(plain.EXT_NAMED, "numpy.dtype", "(,)i4,i4"),
    "object dtype": named(plain.EXT_NAMED, "numpy.dtype", "O"),
    "void scalar": named(plain.EXT_NUMPY_SCALAR, "V4", b"1234"),
    "marker alone": msgpack.packb(msgpack.ExtType(plain.EXT_CONTAINER, b"tuple")),
    "marker as value": msgpack.packb({"a": msgpack.ExtType(plain.EXT_CONTAINER, b"tuple")}),
    "timestamp": msgpack.packb(msgpack.Timestamp(1, 1)),
}


@pytest.mark.parametrize(
    "data",
    [pytest.param(data, id=name) for name, data in HOSTILE.items()],
)
def test_hostile_input_is_a_document_error(data):
    with pytest.raises(DocumentError):
        unpack.decode(data)
        # torch.Size checks its numbers only when it is looked at
        repr(unpack.decode(data))


@settings(QUICK, max_examples=400)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_a_value(data):
    with contextlib.suppress(DocumentError):
        unpack.decode(data)


safe_values = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.dates()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.sets(keys, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(collections.deque),
    ),
    max_leaves=8,
)


@settings(QUICK, max_examples=400)
@given(safe_values, st.data())
def test_a_damaged_tree_is_refused_or_a_value(value, data):
    encoded = bytearray(values.encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(encoded))))
    with contextlib.suppress(DocumentError):
        unpack.decode(bytes(encoded[:cut]))


@QUICK
@given(safe_values, st.data())
def test_every_cut_tree_is_refused(value, data):
    encoded = values.encode(value)
    with pytest.raises(DocumentError):
        unpack.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def test_decoding_runs_nothing_and_imports_nothing(tmp_path):
    mark = tmp_path / "ran"
    import pickle

    class Evil:
        def __reduce__(self):
            return (pathlib.Path(str(mark)).touch, ())

    data = msgpack.packb(values.opaque("os.system", pickle.dumps(Evil())), default=None)
    before = set(sys.modules)
    found = unpack.decode(data)
    assert isinstance(found, Opaque)
    assert "allow_pickle" in found.reason
    assert not mark.exists()
    assert set(sys.modules) == before


# --- walking and naming --------------------------------------------------------------------------


def test_walk_meets_every_leaf_with_its_path():
    tree = {"a": [1, (2, {"b": 3})], 4: torch.Size([5]), "c": {}}
    assert list(unpack.walk(tree)) == [
        (("a", 0), 1),
        (("a", 1, 0), 2),
        (("a", 1, 1, "b"), 3),
        ((4,), torch.Size([5])),
    ]


def test_a_path_is_shown_as_people_write_it():
    assert plain.show_path(("optimizer", "param_groups", 0, "hook")) == "optimizer.param_groups[0].hook"
    assert plain.show_path(()) == "the state"
    assert plain.show_path(("a", "\n", "", (1, "b"))) == "a['\\n'][''][(1, 'b')]"


def test_a_uuid_is_equal_and_of_its_type():
    value = uuid.UUID("12345678123456781234567812345678")
    assert difference(value, unpack.decode(values.encode(value))) is None
