"""A state taken apart after another one is taken apart as if it were the first."""

import collections
import gc
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore import LocalShard, PerRank, arrays
from ckptstore.errors import UnsupportedValueError
from ckptstore.save.flatten import Flattener, flatten_state
from ckptstore.shards import MayDiffer
from tests.model.made import QUICK

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:ComplexHalf")

CHUNK_BYTES = 1024


class Subclass(torch.Tensor):
    pass


BASE = torch.randn(6, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
REALS = torch.arange(24, dtype=torch.float32).reshape(6, 4)

MADE = {
    "rows": lambda: REALS[:3],
    "same rows": lambda: REALS[:3],
    "other rows": lambda: REALS[3:],
    "turned": REALS[:4].t,
    "copy": REALS[:3].clone,
    "flat": lambda: REALS.reshape(-1),
    "as ints": lambda: REALS[:3].view(torch.int32),
    "half": REALS[:3].half,
    "conj": BASE.conj,
    "complex": lambda: BASE,
    "negated": lambda: torch._neg_view(REALS[:3]),
    "imag": lambda: BASE.conj().imag,
    "parameter": lambda: torch.nn.Parameter(REALS[:3]),
    "subclass": lambda: REALS[:3].as_subclass(Subclass),
    "expanded": lambda: REALS[:1].expand(3, 4),
    "scalar": lambda: torch.tensor(3.0),
    "none of it": lambda: torch.zeros(0, 4),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "array": lambda: np.arange(12.0).reshape(3, 4),
    "big-endian": lambda: np.arange(12, dtype=">i4"),
    "differs": lambda: MayDiffer(REALS[:3]),
    "own": lambda: PerRank(REALS[:3].clone()),
    "shard": lambda: LocalShard(REALS[:3], global_shape=(6, 4), offsets=(3, 0)),
    "other shard": lambda: LocalShard(REALS[:3], global_shape=(6, 4), offsets=(0, 0)),
    "shards": lambda: [LocalShard(REALS[i : i + 1], global_shape=(6, 4), offsets=(i, 0)) for i in (3, 1)],
    "blob": lambda: b"x" * (64 << 10),
    "text": lambda: "short",
    "number": lambda: 7,
    "true": lambda: True,
    "items": lambda: [REALS[0], (REALS[1], 2)],
    "nested": lambda: {"a": REALS[0], "b": {"a": REALS[1]}},
    "ordered": lambda: collections.OrderedDict(a=REALS[0]),
}
KEYS = ["a", "b", "a.b", "é", 0, 1, True, 1.0, 0.0, -0.0, None, (1, "a"), b"a"]
edits = st.tuples(
    st.sampled_from(KEYS), st.sampled_from([*MADE, "gone", "moved", "tied"]), st.sampled_from(KEYS)
)


def edited(state, edit):
    key, how, other = edit
    made = dict(state)
    if how == "gone":
        made.pop(key, None)
    elif how == "tied":
        if other in made:
            made[key] = made[other]
    elif how == "moved":  # as training does: the same tensor object with other memory behind it
        if isinstance(made.get(key), torch.Tensor) and made[key].layout is torch.strided:
            made[key].data = made[key].data.clone()
    else:
        made[key] = MADE[how]()
    return made


def facts(flat):
    return (
        flat.layout.encode(),
        flat.tree,
        flat.components,
        flat.may_differ,
        [tensor.boxes for tensor in flat.layout.tensors],
    )


def check(flat, fresh):
    assert facts(flat) == facts(fresh)
    ours, theirs = ([array for part in one.sources for array in part] for one in (flat, fresh))
    assert len(ours) == len(theirs) == len(flat.views) == len(fresh.views)
    for mine, array, view, fresh_view in zip(ours, theirs, flat.views, fresh.views, strict=True):
        wanted = bytes(arrays.bytes_of(array))
        assert bytes(arrays.bytes_of(mine)) == wanted
        assert (view is None) == (fresh_view is None)
        assert view is None or view.tobytes() == wanted


@settings(QUICK, max_examples=120)
@given(st.lists(edits, min_size=2, max_size=12))
def test_every_edit_of_a_state_is_seen(edits_made):
    flattener, state = Flattener(), {}
    for edit in edits_made:
        state = edited(state, edit)
        whole = {"m": state, "n": 1}
        check(flattener.flatten(whole, CHUNK_BYTES), flatten_state(whole, CHUNK_BYTES))


@pytest.mark.parametrize("before", MADE)
def test_one_thing_in_the_place_of_each_other_is_seen(before):
    for after in MADE:
        flattener = Flattener()
        for name in (before, after, before):
            state = {"m": {"first": REALS[:3], "x": MADE[name](), "z": REALS[3:]}}
            check(flattener.flatten(state, CHUNK_BYTES), flatten_state(state, CHUNK_BYTES))


@pytest.mark.parametrize("change", ["bytes", "memory", "value"])
def test_the_layout_stays_the_same_object_while_only_contents_change(change):
    state = {"m": {"w": torch.rand(3, 4), "b": torch.rand(4)}, "step": 1}
    flattener = Flattener()
    before = flattener.flatten(state, CHUNK_BYTES)
    if change == "bytes":
        state["m"]["w"].add_(1)
    elif change == "memory":
        state["m"]["w"] = state["m"]["w"].clone()
    else:
        state["step"] = 2
    after = flattener.flatten(state, CHUNK_BYTES)
    assert after.layout is before.layout
    assert (after.views is before.views) == (change != "memory")
    check(after, flatten_state(state, CHUNK_BYTES))


def test_a_tensor_whose_data_was_exchanged_is_stored_as_it_is_now():
    weight = torch.nn.Parameter(torch.rand(3, 4))
    flattener = Flattener()
    for data in (torch.rand(3, 4).half(), torch.rand(4, 3).t(), torch.rand(5), torch.rand(3, 4)):
        weight.data = data
        check(flattener.flatten({"w": weight}, CHUNK_BYTES), flatten_state({"w": weight}, CHUNK_BYTES))


@pytest.mark.parametrize("between", [False, True])
def test_a_tensor_is_tied_to_one_of_a_subclass_with_the_same_memory(between):
    state = {"a": REALS[:3], "b": REALS[:3].as_subclass(Subclass), "r": REALS[0]}
    flattener = Flattener()
    if between:
        flattener.flatten({**state, "b": state["b"].clone()}, CHUNK_BYTES)
    assert flattener.flatten(state, CHUNK_BYTES).layout.aliases == (("b", 0),)


def test_the_chunk_size_and_the_ranks_count_too():
    state = {"w": torch.rand(600), "own": PerRank(torch.rand(3))}
    flattener = Flattener()
    for chunk_bytes, rank in ((1024, 0), (2048, 0), (2048, 1)):
        given_ranks = {"rank": rank, "world_size": 2}
        found = flattener.flatten(state, chunk_bytes, **given_ranks)
        check(found, flatten_state(state, chunk_bytes, **given_ranks))


def test_after_a_refused_state_the_next_one_is_taken_apart_as_usual():
    flattener = Flattener()
    good = {"a": torch.rand(3), "b": torch.rand(4)}
    flattener.flatten(good, CHUNK_BYTES)
    with pytest.raises(UnsupportedValueError):
        flattener.flatten({"b": torch.rand(4), "c": object()}, CHUNK_BYTES)
    check(flattener.flatten(good, CHUNK_BYTES), flatten_state(good, CHUNK_BYTES))


def test_a_key_that_only_equals_the_known_one_is_refused_as_ever():
    flattener = Flattener()
    flattener.flatten({"m": {"a": REALS[0], "b": REALS[1]}}, CHUNK_BYTES)
    with pytest.raises(UnsupportedValueError, match="key"):
        flattener.flatten({"m": {"a": REALS[0], np.str_("b"): REALS[1]}}, CHUNK_BYTES)


def test_an_edit_after_a_dict_that_is_as_before_is_seen():
    flattener = Flattener()
    state = {"n": {"x": REALS[0], "y": REALS[1]}, "z": {"w": REALS[2]}}
    for last in (REALS[2], REALS[2:4], REALS[0], REALS[2]):  # other shapes, then tied
        state["z"] = {"w": last, **({"a": last.clone()} if last is REALS[2] else {})}
        check(flattener.flatten(state, CHUNK_BYTES), flatten_state(state, CHUNK_BYTES))


def test_no_tensor_is_kept_between_saves():
    tensor = torch.rand(3)
    gone = weakref.ref(tensor)
    flattener = Flattener()
    flattener.flatten({"w": tensor}, CHUNK_BYTES)
    del tensor
    gc.collect()
    assert gone() is None


def python_calls(action):
    """How many Python functions are called."""
    count = 0

    def profile(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_a_small_tensor_that_has_been_met_before_costs_few_calls():
    def calls(count):
        state = {"m": {f"t{i}": torch.rand(4) for i in range(count)}}
        flattener = Flattener()
        flattener.flatten(state, CHUNK_BYTES)
        return python_calls(lambda: flattener.flatten(state, CHUNK_BYTES))

    assert (calls(300) - calls(100)) / 200 <= 5
