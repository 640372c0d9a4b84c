"""What the tests of pure data draw from: settings, boxes, values, layouts, and exact comparison."""

import collections
import datetime
import decimal
import math
import pathlib
import struct
import uuid
import zoneinfo

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ckptstore.model.boxes import Box
from ckptstore.model.dtypes import BY_CODE
from ckptstore.model.ids import chunk_key, digest_of, pack_key, ulid
from ckptstore.model.layout import KINDS, Layout, Tensor
from ckptstore.model.tables import KeyList

QUICK = settings(
    derandomize=True,  # the same examples at every run: a failure is found again
    deadline=None,
    max_examples=150,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# --- comparing exactly ---------------------------------------------------------------------------


def raw(tensor):
    """The bytes of a strided tensor or an array, row-major."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).tobytes()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # A tensor of one element counts as contiguous whatever its strides, and still cannot be viewed as bytes.
    tensor = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def difference(a, b, at="it"):
    """None when two values are equal in type, value and bits, else where and how they differ."""
    if type(a) is not type(b):
        return f"{at}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        if a.layout != torch.strided or b.layout != torch.strided:
            return None if a.layout == b.layout else f"{at}: {a.layout} and {b.layout}"
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{at}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        return None if raw(a) == raw(b) else f"{at}: bytes differ"
    if isinstance(a, np.ndarray):
        if (a.dtype.str, a.shape) != (b.dtype.str, b.shape):
            return f"{at}: {a.dtype.str} {a.shape} and {b.dtype.str} {b.shape}"
        return None if raw(a) == raw(b) else f"{at}: bytes differ"
    if isinstance(a, np.generic):
        return None if (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()) else f"{at}: {a!r} and {b!r}"
    if isinstance(a, float):
        return None if struct.pack("d", a) == struct.pack("d", b) else f"{at}: {a!r} and {b!r}"
    if isinstance(a, complex):
        return difference([a.real, a.imag], [b.real, b.imag], at)
    if isinstance(a, dict):
        return _dict_difference(a, b, at)
    if isinstance(a, (set, frozenset)):
        return difference(sorted(map(_spelled, a)), sorted(map(_spelled, b)), at)
    if isinstance(a, (list, tuple, collections.deque)):
        if len(a) != len(b) or getattr(a, "maxlen", None) != getattr(b, "maxlen", None):
            return f"{at}: {len(a)} and {len(b)} items"
        found = (difference(x, y, f"{at}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((problem for problem in found if problem), None)
    if isinstance(a, datetime.datetime):
        same = (a.replace(tzinfo=None), a.fold, a.tzinfo, type(a.tzinfo)) == (
            b.replace(tzinfo=None),
            b.fold,
            b.tzinfo,
            type(b.tzinfo),
        )
        return None if same else f"{at}: {a!r} and {b!r}"
    if isinstance(a, decimal.Decimal):
        return None if a.as_tuple() == b.as_tuple() else f"{at}: {a!r} and {b!r}"
    return None if a == b else f"{at}: {a!r} and {b!r}"


def _dict_difference(a, b, at):
    if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
        return f"{at}: default factories differ"
    keys = difference(list(a), list(b), f"{at}.keys()")
    if keys:
        return keys
    found = (difference(x, y, f"{at}[{key!r}]") for (key, x), y in zip(a.items(), b.values(), strict=True))
    return next((problem for problem in found if problem), None)


def _spelled(key):
    return f"{type(key).__name__}:{key!r}"


# --- values --------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=[]), max_size=12)  # lone surrogates among them
NUMPY_DTYPES = [
    *("|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"),
    *("<M8[us]", "<M8[D]", "<M8[10ms]", "<m8[s]", "<m8[ns]"),
]


@st.composite
def numpy_scalars(draw):
    dtype = np.dtype(draw(st.sampled_from([*NUMPY_DTYPES, "|b1"])))
    if dtype.kind == "b":
        return np.bool_(draw(st.booleans()))
    return np.frombuffer(draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)), dtype)[0]


zones = st.one_of(
    st.none(),
    st.just(datetime.UTC),
    st.integers(-1439, 1439).map(lambda m: datetime.timezone(datetime.timedelta(minutes=m))),
    st.sampled_from(["Europe/Berlin", "America/New_York", "UTC"]).map(zoneinfo.ZoneInfo),
)
datetimes = st.builds(
    lambda when, zone, fold: when.replace(tzinfo=zone, fold=fold),
    st.datetimes(),
    zones,
    st.sampled_from([0, 1]),
)
small = st.one_of(st.none(), st.integers(-5, 5))
torch_values = st.one_of(
    st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size),
    st.sampled_from([torch.float32, torch.bfloat16, torch.complex32, torch.bool, torch.uint16, torch.quint8]),
    st.sampled_from(["cpu", "cuda", "cuda:3", "meta"]).map(torch.device),
    st.sampled_from([torch.channels_last, torch.preserve_format, torch.strided, torch.sparse_csr]),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**4000]),
    st.floats(),
    st.sampled_from([-0.0, math.inf, math.nan, struct.unpack("d", b"\1\0\0\0\0\0\xf8\xff")[0]]),
    st.complex_numbers(),
    text,
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    datetimes,
    st.timedeltas(),
    st.dates(),
    st.times(),
    st.decimals(),
    st.sampled_from(["sNaN", "-NaN12", "-0", "1E+40", "Infinity"]).map(decimal.Decimal),
    st.uuids(),
    text.filter(lambda t: "\0" not in t).map(pathlib.Path),
    text.map(pathlib.PurePosixPath),
    text.map(pathlib.PureWindowsPath),
    st.builds(slice, small, small, small),
    st.builds(range, st.integers(), st.integers(), st.sampled_from([-3, -1, 1, 2**70])),
    st.just(...),
    numpy_scalars(),
    st.sampled_from([*NUMPY_DTYPES, ">i4", ">f8", ">M8[s]"]).map(np.dtype),
    torch_values,
    st.just(uuid.UUID(int=0)),
)
key_atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), text, st.binary(max_size=6), st.just(-(2**70))
)
keys = st.recursive(key_atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def containers(inner):
    """Every kind of container that a state may have, around what `inner` draws."""
    mapping = st.dictionaries(keys, inner, max_size=4)
    items = st.lists(inner, max_size=4)
    factories = st.sampled_from([None, int, float, bool, str, bytes, list, dict, set, tuple])
    return st.one_of(
        mapping,
        items,
        items.map(tuple),
        mapping.map(collections.OrderedDict),
        st.builds(collections.defaultdict, factories, mapping),
        st.builds(collections.deque, items, st.sampled_from([None, 4, 10])),
        st.dictionaries(keys, st.integers(-3, 3), max_size=4).map(collections.Counter),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    )


plain_values = st.recursive(scalars, containers, max_leaves=12)

# --- boxes and layouts ---------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
chunk_sizes = st.sampled_from([1, 2, 8, 16, 64, 256, 1024])


@st.composite
def boxes_in(draw, shape):
    """A box of at least one element inside `shape`."""
    offsets, sizes = [], []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        offsets.append(start)
        sizes.append(draw(st.integers(1, extent - start)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def tilings(draw, shape):
    """Boxes that cover `shape` exactly once: halved at random places along random dimensions."""
    found = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(found) - 1))
        box = found[at]
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        here = draw(st.integers(1, box.sizes[dim] - 1))
        first = Box(box.offsets, (*box.sizes[:dim], here, *box.sizes[dim + 1 :]))
        second = Box(
            (*box.offsets[:dim], box.offsets[dim] + here, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], box.sizes[dim] - here, *box.sizes[dim + 1 :]),
        )
        found[at : at + 1] = [first, second]
    return draw(st.permutations(found))


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def layouts(draw):
    tensors = []
    for name in sorted(draw(st.sets(names, max_size=5))):
        shape = draw(shapes)
        tensors.append(
            Tensor(
                name,
                draw(names),
                draw(st.sampled_from(list(BY_CODE.values()))),
                shape,
                draw(st.sampled_from(KINDS)),
                tuple(draw(tilings(shape))),
            )
        )
    aliases = ()
    if tensors:
        taken = {tensor.name for tensor in tensors}
        more = sorted(draw(st.sets(names, max_size=3)) - taken)
        aliases = tuple((name, draw(st.integers(0, len(tensors) - 1))) for name in more)
    return Layout(tuple(tensors), aliases, draw(st.sampled_from([1, 16, 1024, 16 << 20])))


def session(number=0):
    """A ULID."""
    return ulid(number, number.to_bytes(10, "big"))


def attempt(number=0, step=1, tries=1):
    return f"{session(number)}-{step}-{tries}"


@st.composite
def key_lists(draw):
    sizes = {}
    for n in range(draw(st.integers(0, 6))):
        make = draw(st.sampled_from([chunk_key, pack_key]))
        key = make(digest_of(bytes([n])), attempt(draw(st.integers(0, 2))), draw(st.integers(0, 3)))
        sizes[key] = draw(st.integers(0, 2**40))
    return KeyList.of(sizes)
