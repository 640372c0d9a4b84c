"""Means of checkpoints against numpy in float64, and what is refused before anything is written."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import NotFoundError, StateMismatchError, UnsupportedValueError, UsageError
from ckptstore.load.mean import spanned
from ckptstore.model import numbers
from ckptstore.model.boxes import Box
from ckptstore.model.dtypes import BY_NAME
from tests.average.made import model_at, new_store, objects_of, saved

WEIGHTS = (0.5, 0.3, 0.2)
_runs = itertools.count()


@pytest.fixture(scope="module")
def store():
    with new_store() as opened:
        yield opened


@pytest.fixture(scope="module")
def three(store):
    return saved(store, *map(model_at, (1, 2, 3)))


def mean_of(arrays, weights):
    total = weights[0] * arrays[0].astype(np.float64)
    for weight, array in zip(weights[1:], arrays[1:], strict=True):
        total += weight * array.astype(np.float64)
    return total.astype(arrays[0].dtype)


# --- the numbers -------------------------------------------------------------------------------------------


def test_floats_are_means_and_all_else_is_the_newest_one_s(store, three):
    given_order = [three[0], three[2], three[1]]
    made = store.run("mean").average(given_order, step=3, weights=WEIGHTS)
    states = [model_at(1), model_at(3), model_at(2)]
    found = made.load()
    for name in ("wide", "half"):
        expected = mean_of([state["model"][name] for state in states], WEIGHTS)
        assert found["model"][name].tobytes() == expected.tobytes()
    assert (
        found["optimizer"]["moment"].tobytes()
        == mean_of([state["optimizer"]["moment"] for state in states], WEIGHTS).tobytes()
    )
    newest = model_at(3)
    assert found["model"]["seen"].tolist() == [3, 7]
    assert found["model"]["mask"].tolist() == [False]
    assert found["optimizer"]["groups"] == newest["optimizer"]["groups"]
    assert found["progress"] == newest["progress"]


def test_the_checkpoint_names_its_parents(store, three):
    made = store.run("names").average(three, step=9, weights=WEIGHTS, only="model", tags=["soup"],
                                      metrics={"loss": 1.5}, metadata={"why": "test"})  # fmt: skip
    assert made.record.parents == tuple(checkpoint.id for checkpoint in three)
    assert (made.record.origin, made.step, made.tags, dict(made.metrics)) == (
        "average",
        9,
        ("soup",),
        {"loss": 1.5},
    )
    assert made.metadata == {
        "why": "test",
        "average": {
            "of": [
                {"run": "gpt", "step": c.step, "id": c.id, "weight": w}
                for c, w in zip(three, WEIGHTS, strict=True)
            ],
            "newest": three[2].id,
            "tensors": 3,
            "only": ["model"],
        },
    }
    again = store.run("names").average(three[:2], step=10, only="model.half")
    assert made.id not in again.record.parents  # what this run saved before is not what it was made from


def test_what_is_the_same_in_all_is_neither_read_nor_written(store):
    odd = np.frombuffer(np.uint64([0x7FF0_0000_DEAD_BEEF]).tobytes() * 40_000, np.float64)
    first, second = saved(store, {"m": {"odd": odd}}, {"m": {"odd": odd}}, run="odd")
    made = store.run("odd-mean").average([first, second], step=1)
    assert made.load()["m"]["odd"].tobytes() == odd.tobytes()  # as numbers, its NaNs would be others
    assert made.record.new_bytes == 0


ALL = [name for name, dtype in BY_NAME.items() if numbers.can_encode(dtype)]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ALL)
def test_every_dtype_is_rounded_once_to_the_nearest(store, name):
    dtype = BY_NAME[name]
    random = np.random.default_rng(len(name))
    if name.startswith("complex"):
        raws = [random.standard_normal((2, 50)).astype("f2" if name == "complex32" else "f8") for _ in "ab"]
        values = [torch.view_as_complex(torch.from_numpy(raw.reshape(50, 2))) for raw in raws]
        states = [value.to(getattr(torch, name)) for value in values]
    else:
        states = [torch.from_numpy(random.standard_normal(400) * 3).to(getattr(torch, name)) for _ in "ab"]
    made = store.run(f"mean-{name}").average(
        saved(store, *({"m": {"t": state}} for state in states), run=name), step=1, weights=[0.25, 0.75]
    )
    found = made.load()["m"]["t"]
    assert found.dtype is states[0].dtype
    wide = torch.complex128 if name.startswith("complex") else torch.float64
    exact = (0.25 * states[0].to(wide) + 0.75 * states[1].to(wide)).numpy()
    if dtype.itemsize > 2 or name == "float16":
        assert np.array_equal(
            found.to(wide).numpy(), torch.from_numpy(exact).to(found.dtype).to(wide).numpy()
        )
        return
    kind = torch.uint8 if dtype.itemsize == 1 else torch.int16
    codes = torch.arange(256).to(kind) if dtype.itemsize == 1 else torch.arange(-(2**15), 2**15).to(kind)
    every = codes.view(found.dtype).double().numpy()
    every = np.unique(every[np.isfinite(every)])
    above = np.searchsorted(every, exact)
    distance = np.minimum(np.abs(every[above] - exact), np.abs(every[above - 1] - exact))
    assert np.array_equal(np.abs(found.double().numpy() - exact), distance)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz"])
def test_a_tie_goes_to_the_even_code_and_infinity_stays(name):
    dtype = BY_NAME[name]
    count = 256**dtype.itemsize // 2
    codes = np.arange(count, dtype=f"<u{dtype.itemsize}")
    values = numbers.decode(codes.view(np.uint8), dtype)
    is_finite = np.isfinite(values)
    low, high = values[:-1][is_finite[1:]], values[1:][is_finite[1:]]
    rounded = numbers.encode((low + high) / 2, dtype).view(codes.dtype)
    assert (rounded % 2 == 0).all()
    assert numbers.encode(values, dtype)[np.repeat(is_finite, dtype.itemsize)].tobytes() == (
        codes[is_finite].tobytes()
    )
    edge = numbers.decode(numbers.encode(np.array([np.inf, np.nan, -np.inf]), dtype), dtype)
    expected = [np.inf, np.nan, -np.inf] if name in ("bfloat16", "float8_e5m2") else [np.nan] * 3
    assert np.array_equal(edge, expected, equal_nan=True)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mean_is_that_of_numpy(store, data):
    count = data.draw(st.integers(2, 4))
    shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=3)))
    dtype = data.draw(st.sampled_from(["<f2", "<f4", "<f8", ">f4"]))
    weights = data.draw(st.lists(st.floats(0.01, 1), min_size=count, max_size=count))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    states = [{"m": {"t": np.asarray(random.standard_normal(shape), dtype), "n": 1}} for _ in range(count)]
    parents = saved(store, *states, run=f"any-{next(_runs)}")
    made = store.run(f"any-mean-{next(_runs)}").average(parents, step=1, weights=weights, normalize=True)
    found = made.load()["m"]["t"]
    total = math.fsum(weights)
    expected = mean_of([state["m"]["t"] for state in states], [weight / total for weight in weights])
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


def test_checkpoints_that_were_cut_otherwise_have_a_mean_all_the_same(store):
    """Shards of other boxes, and tensors that lie across the lines of the grid."""
    arrays = [np.random.default_rng(n).standard_normal((90, 301)) for n in range(2)]

    def sharded(array, at):
        return [
            ckptstore.LocalShard(np.ascontiguousarray(part), offsets=offsets, global_shape=array.shape)
            for part, offsets in ((array[:at], (0, 0)), (array[at:], (at, 0)))
        ]

    states = [{"m": {"t": sharded(arrays[0], 17)}}, {"m": {"t": sharded(arrays[1], 60)}}]
    made = store.run("cut-mean").average(saved(store, *states, run="cut"), step=1)
    assert made.load()["m"]["t"].tobytes() == mean_of(arrays, (0.5, 0.5)).tobytes()


@given(
    shape=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    ends=st.tuples(st.integers(0, 700), st.integers(0, 700)),
)
def test_boxes_of_a_span_are_its_elements_in_order(shape, ends):
    array = np.arange(math.prod(shape)).reshape(shape)
    whole = Box.whole(array.shape)
    start, stop = (min(end, array.size) for end in sorted(ends))
    found = [array[box.within(whole)].ravel() for box in spanned(shape, start, stop)]
    assert np.concatenate([*found, []]).tolist() == list(range(start, stop))


def test_bfloat16_is_not_rounded_by_way_of_float32():
    """Just above a tie, by less than float32 can tell: there it would be the tie, and go to the even code."""
    just_above = np.array([1 + 2.0**-8 + 2.0**-40, -(2.0**-133) * (0.5 + 2.0**-40)])
    found = numbers.decode(numbers.encode(just_above, BY_NAME["bfloat16"]), BY_NAME["bfloat16"])
    assert found.tolist() == [1 + 2.0**-7, -(2.0**-133)]


# --- what is chosen ----------------------------------------------------------------------------------------


def test_only_and_exclude_choose_what_is_in_the_mean(store, three):
    made = store.run("some").average(three, step=1, only="model", exclude="model.half")
    assert set(made.load()) == {"model"}
    assert set(made.load()["model"]) == {"wide", "frozen", "seen", "mask"}
    with pytest.raises(NotFoundError, match=r"nothing named \['modle'\]"):
        store.run("some").average(three, step=1, only="modle")


def test_integers_are_refused_on_request_where_they_differ(store, three):
    before = objects_of(store)
    with pytest.raises(StateMismatchError) as caught:
        store.run("no-integers").average(three, step=1, integers="refuse")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["model.mask", "model.seen"]
    assert objects_of(store) == before
    made = store.run("some").average(three, step=2, integers="refuse", exclude=["model.mask", "model.seen"])
    assert "seen" not in made.load()["model"]


def test_of_several_runs_the_one_committed_last_is_the_newest(store, three):
    (later,) = saved(store, model_at(4), run="fine-tuned")
    made = store.run("two-runs").average([later, three[0]], step=1)
    assert made.load()["progress"]["step"] == 4
    assert {one["run"] for one in made.metadata["average"]["of"]} == {"gpt", "fine-tuned"}


def test_what_ranks_kept_of_their_own_stays_so(store):
    states = [{"rng": ckptstore.PerRank(np.array([n, 1])), "w": np.array([float(n)])} for n in (1, 2)]
    made = store.run("ranks-mean").average(saved(store, *states, run="ranks"), step=1)
    found = made.load()
    assert isinstance(found["rng"], ckptstore.PerRankValues)
    assert found["rng"][0].tolist() == [2, 1]
    assert found["w"].tolist() == [1.5]


def test_tied_tensors_stay_tied_and_torch_s_values_are_what_they_were(store):
    def state(n):
        weight = torch.full((3, 4), float(n))
        return {"m": {"a": weight, "b": weight, "size": torch.Size([2]), "dtype": torch.bfloat16}}

    found = store.run("tied-mean").average(saved(store, state(1), state(2), run="tied"), step=1).load()["m"]
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["a"].unique().tolist() == [1.5]
    assert (type(found["size"]), found["dtype"]) == (torch.Size, torch.bfloat16)


# --- what is refused ---------------------------------------------------------------------------------------


def test_every_difference_is_listed_before_anything_is_written(store):
    one = {"m": {"a": np.zeros(3), "b": np.zeros((2, 2)), "c": np.zeros(3, "f4"), "d": np.zeros(1)}}
    two = {"m": {"a": np.zeros(3), "b": np.zeros(4), "c": np.zeros(3), "e": np.zeros(1)}}
    pair = saved(store, one, two, run="unlike")
    before = objects_of(store)
    with pytest.raises(StateMismatchError) as caught:
        store.run("never").average(pair, step=1)
    assert caught.value.problems == (
        "m.b: float64 [4] in unlike@2, float64 [2, 2] in unlike@1",
        "m.c: float64 [3] in unlike@2, float32 [3] in unlike@1",
        "m.e: float64 [1] in unlike@2, missing in unlike@1",
        "m.d: missing in unlike@2, there in unlike@1",
    )
    assert objects_of(store) == before
    assert store.run("never").average(pair, step=1, only="m.a").load()["m"]["a"].tolist() == [0, 0, 0]


def test_what_has_no_mean_is_refused_by_name(store):
    def refused(state, match, error=StateMismatchError, **options):
        pair = saved(store, state, state | {"w": np.ones(1)}, run=f"bad {match}")
        before = objects_of(store)
        with pytest.raises(error, match=match):
            store.run("never").average(pair, step=1, **options)
        assert objects_of(store) == before

    w = np.zeros(1)
    scale = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    refused({"w": w, "scale": scale}, "scale: float8_e8m0fnu, of which there is no mean")
    sparse = torch.eye(3).to_sparse()
    refused({"w": w, "adjacency": sparse}, "adjacency is made of several tensors", UnsupportedValueError)


def test_arguments_are_checked(store, three):
    def refused(match, checkpoints=three, **options):
        with pytest.raises(UsageError, match=match):
            store.run("refused").average(checkpoints, step=1, **options)

    refused("two checkpoints or more, not 1", three[:1])
    refused("given twice", [three[0], three[0]])
    refused("2 weights for 3", weights=[0.5, 0.5])
    refused("sum to 0.9, not to 1", weights=[0.3, 0.3, 0.3])
    refused("positive", weights=[1.5, -0.25, -0.25])
    refused("positive", weights=[math.nan, 0.5, 0.5])
    refused("integers must be one of", integers="mean")
    refused("'average'", metadata={"average": 1})
    with new_store() as other, pytest.raises(UsageError, match="another store"):
        other.run("r").average(three, step=1)
    with pytest.raises(UsageError, match="2 ranks"):
        store.run("r", rank=0, world_size=2, session_key="k").average(three, step=1)
    with pytest.raises(NotFoundError):
        store.run("gpt").average([1, 77], step=1)
    assert not store.run("refused").checkpoints()


def test_thirds_may_be_written_with_six_digits(store, three):
    made = store.run("thirds").average(three, step=1, weights=[0.333333] * 3, only="model.half")
    expected = mean_of([model_at(step)["model"]["half"] for step in (1, 2, 3)], [1 / 3] * 3)
    assert made.load()["model"]["half"].tobytes() == expected.tobytes()
