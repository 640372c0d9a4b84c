"""Stores in memory, and states to put into them."""

import collections
import itertools
import warnings

import numpy as np
import torch
from hypothesis import strategies as st

import ckptstore
from ckptstore.config import StoreConfig, TierConfig
from ckptstore.environment import Environment
from ckptstore.errors import BackendError
from ckptstore.store import Store
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier.tier import Tier
from ckptstore_memory import MemoryBackend
from tests.model.made import difference, keys, scalars

CHUNK_BYTES = 1024
_count = itertools.count()


def fresh(chunk_bytes=CHUNK_BYTES):
    """A new store in memory; tiny chunks, so that cutting and packing happen."""
    return ckptstore.init(f"memory://made-{next(_count)}", chunk_bytes=chunk_bytes)


def over(backend, environment=None):
    """A store on a given backend, as another process would open it."""
    tier = Tier.open(backend, environment or Environment(sleep=lambda seconds: None))
    return Store(StoreConfig((TierConfig(backend.url, {}),)), tier)


def again(store):
    """The same store as another process sees it."""
    return ckptstore.open(store.url)


def memory(store):
    """The place itself, without retries."""
    return MemoryBackend(store.url.removeprefix("memory://"))


def watched(store, *faults):
    """(the store through a backend that logs and fails on purpose, that backend)."""
    backend = FaultBackend(memory(store), faults)
    return over(backend), backend


def no_data_reads():
    """Faults for a backend that must not be asked for any chunk."""
    error = BackendError("a chunk was read")
    return [
        Fault("error", op=op, key=key, error=error, times=None)
        for op in ("read_into", "get")
        for key in ("chunks/*", "packs/*")
    ]


def objects(store, *prefixes):
    """Key -> bytes of what is there under some prefixes; chunks and packs if none is given."""
    found = {}
    for prefix in prefixes or ("chunks/", "packs/"):
        found.update((info.key, info.size_bytes) for info in memory(store).list(prefix))
    return found


def roundtrip(state, chunk_bytes=CHUNK_BYTES):
    """What another process loads of a state that was saved."""
    store = fresh(chunk_bytes)
    store.run("r").save(1, state).result()
    return again(store).run("r").latest.load()


def sparse_parts(tensor):
    """The strided tensors that a sparse one is made of."""
    if tensor.layout == torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
    return {"ccol": tensor.ccol_indices(), "row": tensor.row_indices(), "values": tensor.values()}


def state_difference(a, b, at="state"):
    """As `difference`, with sparse tensors compared by their parts and parameters as tensors."""
    if isinstance(a, torch.nn.Parameter):
        a = a.detach()
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.layout != torch.strided:
        if (a.layout, a.shape, a.dtype) != (b.layout, b.shape, b.dtype):
            return f"{at}: {a.layout} {a.shape} {a.dtype} and {b.layout} {b.shape} {b.dtype}"
        if a.layout == torch.sparse_coo and a.is_coalesced() != b.is_coalesced():
            return f"{at}: coalesced {a.is_coalesced()} and {b.is_coalesced()}"
        return difference(sparse_parts(a.detach()), sparse_parts(b), at)
    if isinstance(a, dict) and type(a) is type(b):
        order = difference(list(a), list(b), f"{at}.keys()")
        found = (
            state_difference(x, y, f"{at}[{k!r}]") for (k, x), y in zip(a.items(), b.values(), strict=False)
        )
        return order or next((problem for problem in found if problem), None)
    if isinstance(a, (list, tuple)) and type(a) is type(b) and type(a) in (list, tuple):
        if len(a) != len(b):
            return f"{at}: {len(a)} and {len(b)} items"
        found = (state_difference(x, y, f"{at}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((problem for problem in found if problem), None)
    return difference(a, b, at)


# --- tensors -------------------------------------------------------------------------------------

TORCH_DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
]
NUMPY_DTYPES = [
    *("|b1", "|i1", "|u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", "<i8", ">i8", "<u8", ">u8"),
    *("<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c8", "<c16", ">c16"),
    *("<M8[us]", ">M8[s]", "<M8[D]", "<M8[10ms]", "<m8[s]", "<m8[ns]"),
]
shapes = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (7, 11), (300,), (5, 120), (3, 2, 90), (1030,), (1, 1, 1)]),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
)


def random_tensor(dtype, shape, seed):
    """Every bit pattern that the dtype can hold, NaNs and subnormals among them."""
    numel = int(np.prod(shape, dtype=np.int64))
    generator = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, numel).astype(bool)).reshape(shape)
    size = numel * dtype.itemsize
    raw = np.frombuffer(generator.bytes(size), np.uint8).copy()
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


@st.composite
def views(draw, tensor):
    """The tensor, or a view of it that is laid out otherwise or shows only a part."""
    kind = draw(
        st.sampled_from(["same", "transposed", "strided", "expanded", "overlapping", "offset", "conj", "neg"])
    )
    if kind == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, -1)
    if kind == "strided" and tensor.ndim >= 1:
        return tensor[::2]
    if kind == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if kind == "overlapping" and tensor.ndim == 1 and tensor.numel() >= 4:
        return tensor.as_strided((tensor.numel() - 2, 3), (1, 1))
    if kind == "offset" and tensor.ndim >= 1 and tensor.shape[0] > 1:
        return tensor[1:]
    if kind == "conj" and tensor.dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    if kind == "neg" and tensor.dtype in (torch.float32, torch.float64, torch.complex64):
        return torch._neg_view(tensor)
    return tensor


@st.composite
def tensors(draw):
    tensor = random_tensor(draw(st.sampled_from(TORCH_DTYPES)), draw(shapes), draw(st.integers(0, 9)))
    tensor = draw(views(tensor))
    if tensor.numel() and tensor.reshape(-1).stride() != (1,):
        tensor = tensor.clone(
            memory_format=torch.contiguous_format
        )  # test_a_view_that_is_flat_without_... says why
    if draw(st.booleans()) and tensor.dtype in (torch.float32, torch.bfloat16, torch.complex64):
        tensor = torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    return tensor


@st.composite
def sparse_tensors(draw):
    """COO (coalesced or not, with dense dimensions or not) and all compressed layouts."""
    dtype = draw(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64])
    )
    seed = draw(st.integers(0, 9))
    kind = draw(st.sampled_from(["coo", "uncoalesced", "hybrid", "csr", "csc", "bsr", "bsc"]))
    dense = (torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) > 0.5).to(dtype)
    if kind in ("uncoalesced", "hybrid"):
        nnz = draw(st.integers(0, 5))
        indices = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, (2, nnz)))
        tail = (3,) if kind == "hybrid" else ()
        numbers = torch.arange(nnz * (3 if tail else 1), dtype=torch.float32).reshape(nnz, *tail).to(dtype)
        return torch.sparse_coo_tensor(indices, numbers, (4, 4, *tail), check_invariants=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "sparse support is in beta state"
        if kind == "coo":
            return dense.to_sparse()
        if kind in ("bsr", "bsc"):
            return getattr(dense, f"to_sparse_{kind}")((2, 4))
        return getattr(dense, f"to_sparse_{kind}")()


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(shapes)
    numel = int(np.prod(shape, dtype=np.int64))
    generator = np.random.default_rng(draw(st.integers(0, 9)))
    if dtype.kind == "b":
        array = generator.integers(0, 2, shape).astype(bool)
    else:
        array = np.frombuffer(bytearray(generator.bytes(numel * dtype.itemsize)), dtype).reshape(shape)
    order = draw(st.sampled_from("CFSR"))
    if order == "F":
        return np.asfortranarray(array)
    if order == "S" and array.ndim:
        return array[::2]
    if order == "R" and array.ndim:
        return array[::-1]
    return array


def states(leaf):
    """Nested states of components, with `leaf` and values at their ends."""
    inner = st.recursive(
        leaf,
        lambda deeper: st.one_of(
            st.dictionaries(keys, deeper, max_size=4),
            st.lists(deeper, max_size=4),
            st.lists(deeper, max_size=3).map(tuple),
            st.dictionaries(keys, deeper, max_size=3).map(collections.OrderedDict),
        ),
        max_leaves=8,
    )
    return st.dictionaries(st.one_of(st.text(max_size=6), st.integers(0, 3)), inner, max_size=4)


small_scalars = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), scalars)
