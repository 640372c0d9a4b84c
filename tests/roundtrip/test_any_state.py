"""Whatever state is saved, another process loads it again: bytes, dtype, shape, kind, ties."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import UnsupportedValueError
from tests.model.made import QUICK, difference, raw
from tests.roundtrip.made import (
    NUMPY_DTYPES,
    TORCH_DTYPES,
    again,
    arrays,
    fresh,
    objects,
    random_tensor,
    roundtrip,
    small_scalars,
    sparse_tensors,
    state_difference,
    states,
    tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:ComplexHalf")

native_arrays = arrays().filter(lambda array: array.dtype.byteorder != ">")  # see the test of numpy dtypes


@settings(QUICK, max_examples=80)
@given(states(st.one_of(tensors(), sparse_tensors(), native_arrays, small_scalars)))
def test_any_state_comes_back_exactly(state):
    assert state_difference(state, roundtrip(state)) is None


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (33, 17), (5, 700)], ids=str)
def test_every_torch_dtype_comes_back_bit_for_bit(dtype, shape):
    tensor = random_tensor(dtype, shape, 1)
    assert state_difference({"x": tensor}, roundtrip({"x": tensor})) is None


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            d,
        )
        if d.startswith(">")
        else d
        for d in NUMPY_DTYPES
    ],
)
def test_every_numpy_dtype_comes_back_bit_for_bit_and_in_its_byte_order(dtype):
    array = np.arange(3000).astype(dtype).reshape(3, 1000)  # so large that fresh memory is not this by chance
    assert difference({"x": array}, roundtrip({"x": array})) is None


@pytest.mark.parametrize("kind", ["t", "step", "expand", "overlap", "tail", "conj", "neg", "imag", "flip"])
def test_a_view_comes_back_as_what_it_shows_and_nothing_of_the_rest_is_written(kind):
    base = torch.randn(40, 40, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    view = {
        "t": base.t(),
        "step": base[::2, ::3],
        "expand": base[:1].expand(20, 40),
        "overlap": base.as_strided((30, 10), (1, 3)),
        "tail": base[-1],
        "conj": base.conj(),
        "neg": torch._neg_view(base),
        "imag": base.conj().imag,
        "flip": base.flip(0),
    }[kind]
    store = fresh()
    store.run("r").save(1, {"x": view}).result()
    found = again(store).run("r").latest.load()["x"]
    assert torch.equal(found, view.resolve_conj().resolve_neg())
    assert not found.is_conj()
    assert not found.is_neg()
    assert found.is_contiguous()
    assert sum(objects(store).values()) <= view.numel() * view.element_size()
    assert found.untyped_storage().nbytes() == view.numel() * view.element_size()


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(4.0)[::4],
        torch.arange(6.0).reshape(3, 2)[1:2, 1],
        torch.ones(1).expand(5),
        torch.ones((), dtype=torch.bool).expand(3, 2),
        torch.ones(1, dtype=torch.int8).expand(3),
        torch.arange(5, dtype=torch.uint8)[::2],
    ],
    ids=lambda view: f"{view.dtype}-{tuple(view.shape)}",
)
def test_a_view_that_is_flat_without_being_contiguous_comes_back(view):
    assert state_difference({"x": view}, roundtrip({"x": view})) is None


@settings(QUICK, max_examples=60)
@given(sparse_tensors())
def test_a_sparse_tensor_keeps_layout_order_and_whether_it_is_coalesced(tensor):
    assert state_difference([tensor], [roundtrip({"x": tensor})["x"]]) is None


def test_a_parameter_comes_back_as_a_plain_tensor_without_gradient():
    # Who owns the parameter decides about its class; the store keeps its bytes.
    for needs_grad in (True, False):
        parameter = torch.nn.Parameter(torch.ones(3), requires_grad=needs_grad)
        parameter.note = "an attribute"
        found = roundtrip({"p": parameter})["p"]
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert not hasattr(found, "note")
        assert torch.equal(found, parameter.detach())


def test_saving_leaves_the_state_as_it_was():
    x = torch.randn(3, 3, requires_grad=True)
    y = x * 2
    state = {"x": x, "t": x.detach().t(), "list": [1, {"a": y}], "array": np.arange(3)[::-1]}
    before = {key: raw(value) for key, value in state.items() if not isinstance(value, list)}
    version = x._version
    roundtrip(state)
    assert {key: raw(value) for key, value in state.items() if not isinstance(value, list)} == before
    assert (x._version, x.grad, y.grad_fn is not None) == (version, None, True)
    assert state["list"][1]["a"] is y


# --- ties ----------------------------------------------------------------------------------------


def tied(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_tied_tensors_come_back_tied_and_are_stored_once():
    weight = torch.randn(64, 64)
    state = {"model": {"wte": weight, "head": weight, "view": weight[:]}, "other": {"copy": weight.clone()}}
    store = fresh()
    pending = store.run("r").save(1, state, wait=True)
    found = again(store).run("r").latest.load()
    assert found["model"]["wte"] is found["model"]["head"] is found["model"]["view"]
    assert not tied(found["other"]["copy"], found["model"]["wte"])
    assert torch.equal(found["other"]["copy"], weight)
    pending.result()
    assert pending.new_bytes == weight.nbytes  # the copy has the same chunks


def test_what_only_overlaps_comes_back_apart():
    base = torch.arange(20.0)
    state = {"all": base, "head": base[:10], "reshaped": base.view(4, 5), "bits": base.view(torch.int32)}
    found = roundtrip(state)
    assert state_difference(state, found) is None
    names = list(found)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not tied(found[a], found[b])


def test_a_conjugate_is_not_tied_to_what_it_is_the_conjugate_of():
    x = torch.tensor([1 + 2j, 3 - 4j])
    found = roundtrip({"x": x, "conj": x.conj()})
    assert torch.equal(found["x"], x)
    assert torch.equal(found["conj"], x.conj().resolve_conj())
    assert not tied(found["x"], found["conj"])


def test_empty_tensors_are_never_taken_for_tied():
    # All have the data pointer 0.
    found = roundtrip({"a": torch.empty(0, 3), "b": torch.empty(0, dtype=torch.int8), "c": torch.empty(0, 3)})
    assert (found["a"].shape, found["b"].dtype) == ((0, 3), torch.int8)
    assert found["a"] is not found["c"]


def test_one_array_at_two_places_is_one_array_again():
    array = np.arange(5)
    found = roundtrip({"a": array, "b": [array], "c": array.copy()})
    assert found["a"] is found["b"][0]
    assert found["a"] is not found["c"]


@pytest.mark.parametrize("size", [100, 65535, 65536, 200_000])
def test_bytes_bytearray_and_text_of_any_size_keep_their_type(size):
    state = {
        "b": b"\0\xff" * size,
        "a": bytearray(b"xy" * size),
        "t": "é\ud800" * size,
        "deep": [(b"z" * size,)],
    }
    assert difference(state, roundtrip(state)) is None


def test_large_bytes_are_cut_and_reused_like_tensors():
    store, big = fresh(), bytes(range(256)) * 400
    run = store.run("r")
    run.save(1, {"data": big}).result()
    assert max(objects(store).values()) <= 4096
    assert run.save(2, {"data": big}, wait=True).new_bytes == 0


def test_objects_with_a_state_dict_are_stored_by_it():
    model = torch.nn.BatchNorm1d(3)
    found = roundtrip({"model": model, "plain": {"deeper": [torch.nn.Linear(2, 1)]}})
    assert type(found["model"]) is collections.OrderedDict
    assert state_difference(found["model"], collections.OrderedDict(model.state_dict())) is None
    assert set(found["plain"]["deeper"][0]) == {"weight", "bias"}


# --- refused before anything is written ----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
        (lambda: np.array(["a"]), "dtype"),
        (lambda: np.array([object()]), "dtype"),
        (lambda: np.zeros(2, "i4,f8"), "dtype"),
        (lambda: np.ma.masked_array([1]), "MaskedArray"),
        (lambda: np.zeros(2, np.longdouble), "dtype"),
        (torch.Generator, "Generator"),
        (lambda: len, "function"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
@pytest.mark.filterwarnings("ignore")  # quantized and nested tensors are deprecated, or prototypes
def test_what_cannot_be_stored_is_refused_by_name_and_nothing_is_written(make, word):
    store = fresh()
    before = objects(store, "")
    with pytest.raises(UnsupportedValueError, match=word) as caught:
        store.run("r").save(1, {"model": {"ok": torch.ones(3)}, "extra": [1, {"odd": make()}]}).result()
    assert caught.value.path == "extra[1].odd"
    assert objects(store, "") == before


def test_a_state_that_is_no_dict_is_refused():
    for state in (torch.ones(2), [1], torch.nn.Linear(1, 1), None):
        with pytest.raises(ckptstore.CkptstoreError, match="state must be a dict"):
            fresh().run("r").save(1, state).result()


def test_a_lazy_parameter_without_data_is_refused_by_name():
    with pytest.raises(UnsupportedValueError, match=r"model\.weight"):
        fresh().run("r").save(1, {"model": torch.nn.LazyLinear(3)}).result()


# --- states that once were committed and could not be loaded -------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"x": slice(torch.ones(2), torch.zeros(3))},
        {"": {1: torch.ones(1), "1": torch.zeros(1)}, 1: torch.ones(2), "1": torch.ones(3)},
        {"x": {float("nan"): torch.ones(1), float("-nan"): torch.ones(2)}},
    ],
    ids=["slice of tensors", "empty key", "two nan keys"],
)
def test_what_was_committed_can_be_loaded(state):
    try:
        found = roundtrip(state)
    except UnsupportedValueError:
        return  # refused before anything was written: as good
    assert len(found) == len(state)


@pytest.mark.parametrize("value", [b"x" * 70_000, torch.eye(3).to_sparse()], ids=["bytes", "sparse"])
def test_large_bytes_and_sparse_tensors_in_a_deque_come_back(value):
    state = {"q": collections.deque([value])}
    found = roundtrip(state)
    assert state_difference(list(state["q"]), list(found["q"])) is None


def test_tensors_in_a_deque_come_back():
    state = {"q": collections.deque([torch.ones(3), {"a": torch.zeros(400)}], maxlen=3)}
    found = roundtrip(state)["q"]
    assert (type(found), found.maxlen) == (collections.deque, 3)
    assert state_difference(list(state["q"]), list(found)) is None


@pytest.mark.parametrize("nesting", [1, 60, 120])
def test_deep_states_come_back(nesting):
    state = {"x": torch.arange(3)}
    for _ in range(nesting):
        state = {"d": [state]} if nesting < 60 else {"d": state}
    assert state_difference(state, roundtrip(state)) is None
