"""What a store, a run and a checkpoint promise, through a real store in memory."""

import logging
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import arrays
from ckptstore.errors import (
    BackendError,
    ConflictError,
    DamageError,
    GuardError,
    NotFoundError,
    NothingRestorableError,
    PartlyRestoredError,
    SessionSupersededError,
    StateMismatchError,
    UnsupportedValueError,
    UsageError,
)
from ckptstore.testing import Fault
from tests.model.made import QUICK
from tests.roundtrip.made import (
    TORCH_DTYPES,
    again,
    fresh,
    memory,
    no_data_reads,
    objects,
    over,
    random_tensor,
    state_difference,
    watched,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def saved(state, **options):
    """(store, run) after one save at step 1."""
    store = fresh()
    run = store.run("r")
    run.save(1, state, **options).result()
    return store, run


def steps(run):
    return [checkpoint.step for checkpoint in run.checkpoints()]


def flip(store, key):
    """Damages an object in the middle."""
    place = memory(store)
    data = bytearray(place.get(key, max_bytes=1 << 30))
    data[len(data) // 2] ^= 1
    place.put(key, [bytes(data)])


# --- ranged reads --------------------------------------------------------------------------------


@st.composite
def indices(draw, shape):
    found = []
    for extent in shape:
        kind = draw(st.sampled_from(["all", "slice", "open", "int", "negative", "empty"]))
        if kind == "slice":
            start = draw(st.integers(-extent - 2, extent + 2))
            found.append(slice(start, draw(st.integers(-extent - 2, extent + 2))))
        elif kind == "open":
            found.append(slice(draw(st.integers(0, extent)), None))
        elif kind == "int" and extent:
            found.append(draw(st.integers(0, extent - 1)))
        elif kind == "negative" and extent:
            found.append(draw(st.integers(-extent, -1)))
        elif kind == "empty":
            found.append(slice(1, 1))
        else:
            found.append(slice(None))
    cut = draw(st.integers(0, len(found)))
    return tuple(found[:cut]) if draw(st.booleans()) else (*found[:cut], ..., *found[len(found) :])


@settings(QUICK, max_examples=100)
@given(st.data())
def test_a_ranged_read_equals_slicing(data):
    shape = data.draw(st.sampled_from([(), (700,), (13, 47), (5, 6, 40), (3, 0), (1, 300, 2)]))
    dtype = data.draw(st.sampled_from(TORCH_DTYPES))
    tensor = random_tensor(dtype, shape, 3)
    store, _ = saved({"x": tensor})
    lazy = again(store).run("r").latest.tensors["x"]
    for _ in range(3):
        key = data.draw(indices(shape))
        assert state_difference([tensor[key].contiguous()], [lazy[key]]) is None, key


def test_a_ranged_read_reads_only_the_chunks_that_it_meets():
    store, _ = saved({"x": torch.arange(100 * 256).reshape(100, 256)})  # a row is two chunks
    seen, backend = watched(store)
    lazy = seen.run("r").latest.tensors["x"]
    _ = seen.run("r").latest.contents.layout
    backend.log.clear()
    assert lazy[7, 3:5].tolist() == [7 * 256 + 3, 7 * 256 + 4]
    assert len([call for call in backend.log if call.op == "read_into"]) == 1


@pytest.mark.parametrize(
    "key", [100, -101, (0, 0, 0), slice(0, 10, 2), slice(None, None, -1), "a", True, [1], None, (..., ...)]
)
def test_an_index_that_cannot_be_read_is_refused(key):
    store, _ = saved({"x": torch.zeros(100, 2)})
    lazy = store.run("r").latest.tensors["x"]
    with pytest.raises((IndexError, UsageError)):
        lazy[key]
    assert (len(lazy), lazy.shape, lazy.dtype, lazy.nbytes) == (100, (100, 2), "float32", 800)


@pytest.mark.parametrize("dtype", ["<M8[ms]", "<m8[s]", ">i4"])
def test_a_ranged_read_of_a_numpy_array_has_its_dtype(dtype):
    array = np.arange(5).astype(dtype)
    store, _ = saved({"x": array})
    found = store.run("r").latest.tensors["x"][1:3]
    assert (found.dtype.str, found.tolist()) == (dtype, array[1:3].tolist())


# --- loading by name -----------------------------------------------------------------------------

PARTS = {
    "model": {
        "wte": torch.ones(3),
        "h": [{"w": torch.zeros(2), "n": 1}, {"w": torch.full((2,), 2.0), "n": 2}],
    },
    "optimizer": {"lr": 0.1, "m": torch.ones(4)},
    "step": 7,
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"only": "model.wte"}, {"model": {"wte": torch.ones(3)}}),
        ({"only": "optimizer"}, {"optimizer": PARTS["optimizer"]}),
        ({"only": ["step", "*.lr"]}, {"optimizer": {"lr": 0.1}, "step": 7}),
        ({"exclude": "model"}, {"optimizer": PARTS["optimizer"], "step": 7}),
        ({"only": "model.*", "exclude": "model.h"}, {"model": {"wte": torch.ones(3)}}),
        ({"exclude": ["optimizer.m", "model.*"]}, {"optimizer": {"lr": 0.1}, "step": 7}),
    ],
    ids=repr,
)
def test_loading_by_name_gives_just_that(options, expected):
    store, _ = saved(PARTS)
    assert state_difference(expected, store.run("r").latest.load(**options)) is None


def test_a_tensor_left_out_of_a_list_keeps_its_place():
    store, _ = saved(PARTS)
    found = store.run("r").latest.load("model.h.1.w")["model"]["h"]
    assert isinstance(found[0]["w"], ckptstore.TensorSpec) or "w" not in found[0]
    assert torch.equal(found[1]["w"], torch.full((2,), 2.0))


def test_loading_a_name_that_is_not_there_is_an_error_and_reads_no_chunk():
    store, _ = saved(PARTS)
    seen, _ = watched(store, *no_data_reads())
    with pytest.raises(NotFoundError, match="has nothing named"):
        seen.run("r").latest.load("nothing")


def test_loading_a_part_reads_only_its_chunks():
    store, _ = saved({"a": torch.ones(5000), "b": torch.zeros(5000)})
    seen, backend = watched(store)
    seen.run("r").latest.load("a")
    keys = {call.key for call in backend.log if call.op == "read_into"}
    assert 0 < len(keys) < len(objects(store))


# --- restoring in place --------------------------------------------------------------------------


def test_restore_fills_tensors_and_arrays_in_place_and_replaces_values():
    weight, array, view = torch.zeros(600), np.zeros((2, 300)), torch.zeros(4, 4)
    store, _ = saved(
        {
            "w": torch.arange(600.0),
            "a": np.ones((2, 300)),
            "v": torch.ones(4, 2),
            "epoch": 20,
            "args": {"x": 1},
        }
    )
    target = {"w": weight, "a": array, "v": view[:, ::2], "epoch": 0, "args": {}}
    assert again(store).run("r").restore(target) == 1
    assert target["w"] is weight
    assert target["a"] is array
    assert torch.equal(weight, torch.arange(600.0))
    assert (array == 1).all()
    assert view.tolist() == [[1, 0, 1, 0]] * 4  # only what the view shows
    assert (target["epoch"], target["args"]) == (20, {"x": 1})


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_restore_in_place_is_exact_for_every_dtype_and_layout(dtype):
    tensor = random_tensor(dtype, (30, 20), 5)
    store, _ = saved({"x": tensor})
    for make in (lambda: torch.empty(30, 20, dtype=dtype), lambda: torch.empty(20, 30, dtype=dtype).t()):
        target = {"x": make()}
        store.run("r").restore(target)
        assert state_difference([tensor], [target["x"].contiguous()]) is None


def test_restore_into_parameters_keeps_their_identity_and_gradient_flag():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    store, _ = saved({"model": model})
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    parameters = list(other.parameters())
    store.run("r").restore({"model": other})
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in other.parameters())
    assert state_difference(dict(model.state_dict()), dict(other.state_dict())) is None


def test_restore_into_big_endian_and_fortran_arrays_gives_the_same_numbers():
    store, _ = saved({"x": np.arange(600, dtype="<i4").reshape(2, 300)})
    for target in (np.zeros((2, 300), ">i4"), np.zeros((2, 300), "<i4", order="F")):
        store.run("r").restore({"x": target})
        assert (target == np.arange(600).reshape(2, 300)).all()


def mismatched():
    return {
        "shape": torch.zeros(3),
        "dtype": torch.zeros(4),
        "gone": torch.zeros(2),
        "list": [torch.zeros(1)],
        "value": torch.zeros(1),
    }


def test_a_mismatch_lists_all_problems_before_any_chunk_is_read_and_changes_nothing():
    store, _ = saved(
        {
            "shape": torch.ones(4),
            "dtype": torch.ones(4, dtype=torch.float64),
            "new": torch.ones(2),
            "list": [torch.ones(1), torch.ones(1)],
            "value": 5,
        }
    )
    seen, _ = watched(store, *no_data_reads())
    target = mismatched()
    before = mismatched()
    with pytest.raises(StateMismatchError) as caught:
        seen.run("r").restore(target)
    text = "\n".join(caught.value.problems)
    for word in (
        "shape: shape [3] here, [4]",
        "dtype: dtype float32 here, float64",
        "missing in the checkpoint: gone",
        "not in this state: new",
        "list: 1 entries here, 2",
        "value: a tensor here",
    ):
        assert word in text, text
    assert "nothing was loaded" in caught.value.message
    assert state_difference(before, target) is None


def test_strict_false_takes_what_both_have_and_reports_the_rest():
    store, _ = saved({"a": torch.ones(2), "b": torch.ones(2)})
    target = {"a": torch.zeros(2), "c": torch.zeros(2)}
    run = store.run("r")
    assert run.restore(target, strict=False) == 1
    assert torch.equal(target["a"], torch.ones(2))
    assert torch.equal(target["c"], torch.zeros(2))
    assert (run.restored.missing, run.restored.unexpected) == (("c",), ("b",))


def test_strict_false_still_refuses_another_shape():
    store, _ = saved({"a": torch.ones(2)})
    with pytest.raises(StateMismatchError, match="shape"):
        store.run("r").restore({"a": torch.zeros(3)}, strict=False)


@pytest.mark.parametrize(
    "rename", [{"module.": ""}, {"module": "m"}, lambda name: name.removeprefix("module."), {"module.w": "w"}]
)
def test_rename_gives_stored_names_to_a_state(rename):
    store, _ = saved({"module": {"w": torch.ones(2)}})
    target = {"m": {"w": torch.zeros(2)}} if rename == {"module": "m"} else {"w": torch.zeros(2)}
    store.run("r").latest.restore(target, rename=rename)
    assert torch.equal(
        target.get("w", target.get("m", {}).get("w") if "m" in target else None), torch.ones(2)
    )


def test_two_stored_names_renamed_to_one_are_refused():
    store, _ = saved({"a": torch.ones(1), "b": torch.zeros(1)})
    with pytest.raises((StateMismatchError, UsageError)):
        store.run("r").latest.restore({"c": torch.zeros(1)}, rename=lambda name: "c")


def test_cast_converts_only_the_names_it_is_given():
    store, _ = saved({"a": torch.tensor([1.5]), "b": torch.tensor([2.5])})
    target = {"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(1, dtype=torch.float64)}
    with pytest.raises(StateMismatchError, match="b: dtype") as caught:
        store.run("r").latest.restore(target, cast="a")
    assert len(caught.value.problems) == 1
    store.run("r").latest.restore(target, cast=["a", "b"])
    assert (target["a"].item(), target["b"].item()) == (1.5, 2.5)
    assert target["a"].dtype == torch.bfloat16


def test_only_and_exclude_leave_the_rest_of_a_state_alone():
    store, _ = saved({"a": torch.ones(1), "b": torch.ones(1), "n": 5})
    target = {"a": torch.zeros(1), "b": torch.zeros(1), "n": 0}
    store.run("r").latest.restore(target, only="a")
    assert (target["a"].item(), target["b"].item(), target["n"]) == (1, 0, 0)
    store.run("r").latest.restore(target, exclude=["b"])
    assert (target["b"].item(), target["n"]) == (0, 5)


def test_tied_targets_of_different_stored_tensors_are_refused():
    store, _ = saved({"a": torch.ones(1), "b": torch.zeros(1)})
    weight = torch.full((1,), 7.0)
    with pytest.raises(StateMismatchError, match="shares its memory"):
        store.run("r").restore({"a": weight, "b": weight})
    assert weight.item() == 7


def test_untied_targets_of_a_tied_pair_are_both_filled():
    weight = torch.arange(3.0)
    store, _ = saved({"a": weight, "b": weight})
    target = {"a": torch.zeros(3), "b": torch.zeros(3)}
    store.run("r").restore(target)
    assert torch.equal(target["a"], weight)
    assert torch.equal(target["b"], weight)


def test_a_target_whose_elements_share_memory_is_refused():
    store, _ = saved({"x": torch.arange(4.0)})
    with pytest.raises(ckptstore.CkptstoreError):
        store.run("r").restore({"x": torch.zeros(1).expand(4)})


def test_an_array_of_another_time_unit_is_refused():
    store, _ = saved({"x": np.array([1000], "M8[ms]")})
    target = np.array([0], "M8[s]")
    with pytest.raises(StateMismatchError):
        store.run("r").restore({"x": target})


def test_a_read_only_target_is_refused_before_anything_is_written_to():
    store, _ = saved({"a": np.ones(600), "b": np.ones(2)})
    target = {"a": np.zeros(600), "b": np.zeros(2)}
    target["b"].flags.writeable = False
    with pytest.raises(ckptstore.CkptstoreError):
        store.run("r").restore(target)
    assert (target["a"] == 0).all()


@pytest.mark.parametrize("left", [0, 400, 2396], ids=["freed", "shrunk", "one element short"])
@pytest.mark.parametrize("strided", [False, True])
def test_a_target_without_its_memory_is_refused_and_nothing_beside_it_is_written_to(left, strided):
    store, _ = saved({"x": torch.ones(300 if strided else 600)})
    target = torch.zeros(600)[::2] if strided else torch.zeros(600)
    target.untyped_storage().resize_(min(left, 2392) if strided else left)
    with pytest.raises(StateMismatchError, match=r"x: .* freed or shrunk"):
        store.run("r").restore({"x": target})


def test_a_storage_can_be_resized_after_a_restore():
    store, _ = saved({"x": torch.arange(600.0), "y": torch.arange(8.0)})
    whole, rows = torch.zeros(600), torch.zeros(4, 4)
    store.run("r").restore({"x": whole, "y": rows.view(16)[::2]})
    for tensor in (whole, rows):  # as FSDP frees its parameters between steps
        tensor.untyped_storage().resize_(0)


def test_memory_outlives_its_tensor_until_it_is_filled():
    """A state may let go of a tensor while another thread reads into it."""
    view = arrays.raw_view(torch.zeros(100_000))
    others = [torch.ones(100_000) for _ in range(4)]
    assert not view.any()
    view[:] = 7
    assert all((other == 1).all() for other in others)


@pytest.mark.parametrize("seed", range(8))
def test_a_view_for_writing_has_the_elements_of_the_tensor_where_they_lie(seed):
    chance = random.Random(seed)
    whole = torch.arange(2 * 3 * 4 * 5, dtype=chance.choice([torch.int16, torch.int32, torch.int64]))
    whole = whole.reshape(2, 3, 4, 5).permute(chance.sample(range(4), 4))
    tensor = whole[tuple(slice(chance.randrange(n), None, chance.choice([1, 2])) for n in whole.shape)]
    view = arrays.raw_view(tensor)
    assert view.tolist() == tensor.tolist()
    view += 1000
    assert view.tolist() == tensor.tolist()
    assert int((whole >= 1000).sum()) == tensor.numel()


def test_a_sparse_target_is_refused_and_never_passed_over():
    store, _ = saved({"x": torch.eye(3).to_sparse()})
    target = {"x": torch.zeros(3, 3).to_sparse()}
    with pytest.raises(StateMismatchError, match="x"):
        store.run("r").restore(target)
    assert target["x"]._nnz() == 0


def test_a_failure_after_bytes_were_placed_says_that_the_state_is_a_mixture():
    store, _ = saved({"a": torch.ones(600), "b": torch.full((600,), 2.0)})
    flip(store, sorted(objects(store, "chunks/"))[0])
    target = {"a": torch.zeros(600), "b": torch.zeros(600)}
    with pytest.raises(PartlyRestoredError, match="must not be trained on") as caught:
        again(store).run("r").restore(target)
    assert isinstance(caught.value.__cause__, DamageError)


def test_a_failure_before_any_byte_was_placed_leaves_the_state_as_it_was():
    store, _ = saved(
        {"a": torch.ones(30), "b": torch.ones(30)}
    )  # one small pack, verified before it is placed
    (key,) = objects(store, "packs/")
    flip(store, key)
    target = {"a": torch.zeros(30), "b": torch.zeros(30)}
    with pytest.raises(DamageError, match="run 'r' step 1") as caught:
        again(store).run("r").restore(target)
    assert not isinstance(caught.value, PartlyRestoredError)
    assert target["a"].sum() == target["b"].sum() == 0


# --- reuse ---------------------------------------------------------------------------------------


def written_by(store, call):
    """Bytes of the chunks and packs that a call added."""
    before = objects(store)
    call()
    after = objects(store)
    assert before.items() <= after.items()
    return sum(after.values()) - sum(before.values())


def test_a_save_of_which_99_percent_did_not_change_writes_at_most_2_percent():
    store = fresh()
    run = store.run("r")
    generator = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.randn(2560, generator=generator) for i in range(100)}
    first = written_by(store, lambda: run.save(1, state).result())
    state["w50"] += 1
    second = written_by(store, lambda: run.save(2, state).result())
    assert first == 100 * 2560 * 4
    assert 0 < second <= first / 50
    # and so does a later process that resumed
    other = again(store).run("r")
    other.restore({name: torch.zeros(2560) for name in state})
    state["w7"] += 1
    pending = []
    third = written_by(store, lambda: pending.append(other.save(3, state, wait=True)))
    assert third == pending[0].new_bytes <= first / 50
    assert pending[0].reused_bytes == first - third
    assert state_difference(state, again(store).run("r")[3].load()) is None


def test_a_process_that_did_not_resume_reuses_nothing():
    store, _ = saved({"x": torch.arange(5000)})
    assert again(store).run("r").save(2, {"x": torch.arange(5000)}, wait=True).new_bytes == 40_000


def test_bases_let_a_run_reuse_the_chunks_of_another():
    store, run = saved({"x": torch.arange(5000)})
    pending = again(store).run("other").save(1, {"x": torch.arange(5000)}, bases=[run.latest], wait=True)
    assert pending.new_bytes == 0


def test_equal_chunks_within_one_save_are_written_once():
    store = fresh()
    state = {
        "a": torch.zeros(10_000),
        "b": torch.zeros(10_000),
        "small": [torch.ones(10).clone() for _ in range(50)],
    }
    assert written_by(store, lambda: store.run("r").save(1, state).result()) == 1024 + (40_000 % 1024) + 40
    assert state_difference(state, again(store).run("r").latest.load()) is None


def test_no_key_is_put_twice_however_often_a_content_stands_in_a_state():
    store = fresh()
    seen, backend = watched(store)
    state = {"a": torch.zeros(10_000), "b": torch.zeros(10_000), "s": [torch.ones(10) for _ in range(50)]}
    seen.run("r").save(1, state).result()
    seen.run("r").save(2, state).result()
    puts = [call.key for call in backend.log if call.op == "put"]
    assert len(puts) == len(set(puts))


def test_a_fork_writes_no_chunk_and_loads_the_same():
    state = {"x": torch.randn(5000), "small": torch.ones(3), "n": [1, {"a": 2}]}
    store, run = saved(state, metrics={"loss": 1.0}, metadata={"a": 1})
    seen, backend = watched(store)
    forked = seen.run("fork").fork_from(seen.run("r").latest)
    puts = [call.key for call in backend.log if call.op == "put"]
    assert puts
    assert not [key for key in puts if key.startswith(("chunks/", "packs/"))]
    assert state_difference(state, again(store).run("fork").latest.load()) is None
    assert (forked.step, forked.metrics, dict(forked.metadata)) == (1, {"loss": 1.0}, {"a": 1})
    assert forked.record.parents == (run.latest.id,)
    assert seen.run("fork").latest == forked
    with pytest.raises(ConflictError, match="has checkpoints already"):
        seen.run("fork").fork_from(run.latest)


def test_a_fork_goes_on_by_itself():
    store, run = saved({"x": torch.zeros(3)})
    fork = store.run("fork")
    fork.fork_from(run.latest)
    fork.save(2, {"x": torch.ones(3)}).result()
    assert (steps(fork), steps(run)) == ([1, 2], [1])


def test_a_pack_is_reused_singly_only_while_half_of_it_is_still_wanted():
    store = fresh()
    run = store.run("r")
    generator = torch.Generator().manual_seed(0)
    state = {f"{i:02}": torch.randn(20, generator=generator) for i in range(40)}  # 80 bytes each, one pack
    run.save(0, {"m": state}).result()
    assert len(objects(store, "packs/")) == 1
    for name in list(state)[:20]:
        state[name] = torch.randn(20, generator=generator)
    assert run.save(1, {"m": state}, wait=True).new_bytes == 20 * 80  # half is still there: it is reused
    for name in list(state)[20:25]:
        state[name] = torch.randn(20, generator=generator)
    pending = run.save(2, {"m": state}, wait=True)
    assert pending.new_bytes == (5 + 15) * 80  # of the first pack too little is left: the rest moves on
    assert len(set(pending.result().contents.keys.keys)) == 2
    assert state_difference({"m": state}, again(store).run("r").latest.load()) is None


@pytest.mark.parametrize("share", [19, 20, 21])
def test_the_bytes_that_packs_hold_beyond_what_is_wanted_stay_below_what_is_wanted(share):
    store = fresh()
    run = store.run("r")
    generator = torch.Generator().manual_seed(share)
    state = {f"{i:02}": torch.randn(20, generator=generator) for i in range(40)}
    run.save(0, {"m": state}).result()
    for step in range(1, 8):
        for i in torch.randperm(40, generator=generator).tolist()[:share]:
            state[f"{i:02}"] = torch.randn(20, generator=generator)
        found = run.save(step, {"m": state}).result()
        held = sum(found.contents.keys.sizes.tolist())
        assert held <= 2 * found.nbytes


def test_two_thousand_tiny_tensors_make_few_objects():
    store = fresh(chunk_bytes=1 << 20)
    state = {"model": {f"layer{i}.bias": torch.full((3,), float(i)) for i in range(2000)}}
    store.run("r").save(1, state).result()
    assert len(objects(store, "")) <= 10
    assert state_difference(state, again(store).run("r").latest.load()) is None


def test_no_object_is_larger_than_its_kind_allows():
    store, _ = saved({"x": torch.randn(10_000), "m": [torch.randn(50).clone() for _ in range(200)]})
    assert max(objects(store, "chunks/").values()) <= 1024
    assert max(objects(store, "packs/").values()) <= 4096


def test_a_reused_object_that_is_gone_is_written_anew_and_its_checkpoint_marked(caplog):
    store, run = saved({"x": torch.arange(3000)})
    key = sorted(objects(store, "chunks/"))[0]
    memory(store).delete([key])
    with caplog.at_level(logging.CRITICAL, "ckptstore"):
        run.save(2, {"x": torch.arange(3000)}).result()
    assert (run[1].state, run[2].state) == ("damaged", "ok")
    assert torch.equal(again(store).run("r").latest.load()["x"], torch.arange(3000))


# --- nothing, or nothing that can be restored ----------------------------------------------------


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_where_nothing_was_ever_committed_restore_and_latest_are_none():
    run = fresh().run("r")
    target = {"x": torch.zeros(1)}
    assert run.restore(target) is None
    assert run.latest is None
    assert run.best("loss", "min") is None
    assert run.checkpoints() == []
    assert not run.exists
    run.start()
    assert run.exists
    assert run.restore(target) is None
    with pytest.raises(NotFoundError) as caught:
        run.find("latest")
    assert not isinstance(caught.value, NothingRestorableError)


def test_where_nothing_can_be_restored_that_is_an_error_and_never_none():
    store, run = saved({"x": torch.ones(1)})
    run.invalidate(1, "diverged")
    assert run.latest is None
    for options in ({}, {"resume": "must"}, {"fallback": True}):
        with pytest.raises(NothingRestorableError, match="step 1 is invalid"):
            again(store).run("r").restore({"x": torch.zeros(1)}, **options)
    assert run.restore({"x": torch.zeros(1)}, resume="never") is None


def test_before_step_below_all_is_an_error_too():
    _, run = saved({"x": torch.ones(1)})
    with pytest.raises(NothingRestorableError, match="before step 1"):
        run.restore({"x": torch.zeros(1)}, before_step=1)


def test_resume_must_names_a_similar_run():
    store, _ = saved({"x": torch.ones(1)})
    store.run("llama-8b").save(1, {"x": torch.ones(1)}).result()
    with pytest.raises(NotFoundError, match=r"resume='must'.*similar runs: 'llama-8b'"):
        again(store).run("lama-8b").restore({"x": torch.zeros(1)}, resume="must")
    store.run("new").start()
    with pytest.raises(NotFoundError, match="no checkpoints yet"):
        store.run("new").restore({"x": torch.zeros(1)}, resume="must")


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_after_a_restart_an_absent_run_is_a_mistake(name, monkeypatch):
    store = fresh()
    monkeypatch.setenv(name, "0")
    assert store.run("r").restore({}) is None
    monkeypatch.setenv(name, "2")
    with pytest.raises(NotFoundError, match=name):
        store.run("r").restore({})
    store.run("r").start()
    assert store.run("r").restore({}) is None  # it was started: it died before its first save
    assert store.run("r").restore({}, resume="never") is None


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_after_a_restart_no_store_is_made_in_place_of_an_absent_one(name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, "1")
    with pytest.raises(GuardError, match=name):
        ckptstore.open(tmp_path / "gone", create=True)
    assert not (tmp_path / "gone").exists()


def test_a_wrong_word_for_resume_is_refused():
    with pytest.raises(UsageError, match="resume must be"):
        fresh().run("r").restore({}, resume="yes")


# --- sessions ------------------------------------------------------------------------------------


def three():
    store, run = saved({"x": torch.full((1,), 1.0)})
    for step in (2, 3):
        run.save(step, {"x": torch.full((1,), float(step))}).result()
    return store, run


def test_looking_and_restoring_disturb_no_training():
    store, run = three()
    before = objects(store, "")
    other = again(store).run("r")
    other.restore({"x": torch.zeros(1)})
    assert other.latest.step == 3
    assert objects(store, "") == before
    run.save(4, {"x": torch.zeros(1)}).result()


def test_a_later_process_takes_over_and_the_former_is_told():
    store, run = three()
    other = again(store).run("r")
    other.restore({"x": torch.zeros(1)})
    other.save(4, {"x": torch.zeros(1)}).result()
    pending = run.save(5, {"x": torch.ones(1)})
    with pytest.raises(SessionSupersededError, match="taken over by epoch 2"):
        pending.result()
    assert steps(other) == [1, 2, 3, 4]
    assert [doc.resumed_from for doc in other.sessions()] == [None, other[3].id]


def test_before_step_opens_a_new_session_at_the_next_save_and_not_before():
    store, run = three()
    other = again(store).run("r")
    target = {"x": torch.zeros(1)}
    assert other.restore(target, before_step=3) == 2
    assert target["x"].item() == 2
    assert run.latest.step == 3
    other.save(3, {"x": torch.full((1,), 33.0)}).result()
    assert run.latest.load()["x"].item() == 33
    assert other[3].load()["x"].item() == 33
    assert steps(run) == [1, 3, 2, 3]
    assert other.latest.record.parents == (other[2].id,)


def test_a_rewind_counts_at_once_and_until_the_next_save():
    store, run = three()
    run.rewind(1)
    assert again(store).run("r").latest.step == 1
    assert steps(run) == [2, 3, 1]
    run.save(2, {"x": torch.full((1,), 22.0)}).result()
    assert steps(run) == [2, 3, 1, 2]
    assert run[2].load()["x"].item() == 22
    assert run.sessions()[-1].rewound


def test_what_is_invalid_cannot_be_gone_back_to():
    _, run = three()
    run.invalidate(2, "nan")
    with pytest.raises(ConflictError, match="invalid"):
        run.rewind(2)
    run.revalidate(2)
    run.rewind(2)
    assert run.latest.step == 2


def test_saving_a_step_again_makes_a_second_checkpoint_and_the_later_counts():
    _, run = three()
    run.save(2, {"x": torch.full((1,), 99.0)}).result()
    assert steps(run) == [1, 2, 3, 2]
    assert run[2].load()["x"].item() == run.latest.load()["x"].item() == 99


# --- notes ---------------------------------------------------------------------------------------


def test_tags_name_checkpoints_move_and_go():
    store, run = three()
    run.tag(1, "best")
    assert run.find("best").step == 1
    with pytest.raises(ConflictError, match="tag 'best' is at step 1"):
        run.tag(2, "best")
    run.tag(2, "best", move=True)
    seen = again(store)
    assert seen.run("r").find("best").step == 2
    assert seen.checkpoint("r@best").step == 2
    assert (run[1].tags, run[2].tags) == ((), ("best",))
    run.tag(2, "best")  # again: nothing happens
    run.untag(2, "best")
    with pytest.raises(NotFoundError, match="no tag"):
        run.untag(2, "best")
    with pytest.raises(NotFoundError, match="no tag or checkpoint"):
        run.find("best")


def test_tags_given_at_save_count_like_later_ones():
    _, run = saved({"x": torch.ones(1)}, tags=["b", "a", "b"])
    assert run.latest.tags == ("a", "b")
    run.untag(1, "a")
    assert run.latest.tags == ("b",)
    with pytest.raises(UsageError):
        run.save(2, {"x": torch.ones(1)}, tags=["12"]).result()
    assert steps(run) == [1]


def test_a_tag_taken_off_and_given_again_is_there():
    _, run = three()
    for _ in range(3):
        run.tag(1, "t")
        run.untag(1, "t")
    run.tag(1, "t")
    assert run.find("t").step == 1


def test_an_invalid_checkpoint_is_not_latest_and_loads_only_when_asked_for():
    store, run = three()
    run.invalidate(3, "loss spike")
    assert run.latest.step == 2
    assert run[3].state == "invalid"
    assert run[3].load()["x"].item() == 3  # by name: the caller knows
    target = {"x": torch.zeros(1)}
    other = again(store).run("r")
    assert other.restore(target) == 2
    assert any("step 3: invalid (loss spike)" in line for line in other.restored.passed_over)
    run.revalidate(3)
    assert run.latest.step == 3
    with pytest.raises(UsageError, match="reason"):
        run.invalidate(3, " ")


def test_annotations_add_and_correct_metrics():
    store, run = three()
    run.annotate(1, metrics={"val": 0.5, "acc": 1})
    run.annotate(2, metrics={"val": 0.7})
    assert run.best("val", "min").step == 1
    run.annotate(1, metrics={"val": 0.9})
    assert again(store).run("r").best("val", "min").step == 2
    assert run[1].metrics == {"val": 0.9, "acc": 1}


def test_a_pin_lasts_until_it_is_taken_off():
    store, run = three()
    first, second = run.pin(1, "paper"), run.pin(1)
    assert first != second
    assert len(objects(store, "intents/")) == 2
    store.close()
    assert again(store).run("r").unpin(1) == 2
    assert objects(store, "intents/") == {}
    with pytest.raises(NotFoundError, match="not pinned"):
        run.unpin(1)


# --- what is given beside the state --------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.5,
        -0.0,
        math.nan,
        math.inf,
        -math.inf,
        2**62,
        np.float32(0.5),
        np.int64(3),
        torch.tensor(0.25),
        torch.tensor([2.0])[0],
    ],
)
def test_numbers_are_metrics_and_come_back_in_every_process(value):
    store, _ = saved({}, metrics={"loss": value})
    plain = value.item() if hasattr(value, "item") else value
    for found in (
        again(store).run("r").latest.metrics["loss"],
        again(store).run("r").latest.record.metrics["loss"],
    ):
        assert type(found) is type(plain)
        assert found == plain or (math.isnan(found) and math.isnan(plain))


@pytest.mark.parametrize(
    "value", [True, np.bool_(True), "1", None, [1.0], torch.ones(2), 1j, torch.tensor(True), 2**64]
)
def test_what_is_no_number_is_no_metric_and_nothing_is_saved(value):
    store = fresh()
    with pytest.raises(UsageError, match="metric 'loss'"):
        store.run("r").save(1, {}, metrics={"loss": value}).result()
    assert store.run("r").checkpoints() == []


@pytest.mark.parametrize("name", ["", 5, "a\0", "\ud800", "x" * 1001])
def test_a_metric_needs_a_usable_name(name):
    with pytest.raises(UsageError, match="metric"):
        fresh().run("r").save(1, {}, metrics={name: 1}).result()


def test_nan_is_never_best_and_ties_go_to_the_newer_in_every_process():
    store = fresh()
    run = store.run("r")
    for step, loss in enumerate([0.5, math.nan, 0.4, 0.4, math.inf], 1):
        run.save(step, {}, metrics={"loss": loss}).result()
    run.save(6, {}).result()
    for seen in (store, again(store)):
        assert seen.run("r").best("loss", "min").step == 4
        assert seen.run("r").best("loss", "max").step == 5
        assert seen.run("r").best("other", "max") is None
        assert seen.checkpoint("r@min:loss").step == 4


@pytest.mark.parametrize("step", [0, -7, 2**63 - 1, -(2**63), np.int64(5), np.uint8(200), torch.tensor(12)])
def test_whole_numbers_are_steps(step):
    store = fresh()
    store.run("r").save(step, {"x": torch.ones(1)}).result()
    found = again(store).run("r").latest
    assert type(found.step) is int
    assert found.step == int(step)
    assert again(store).checkpoint(f"r@{int(step)}") == found


@pytest.mark.parametrize("step", [True, np.True_, 10.0, np.float64(10), "10", None, 2**63, -(2**63) - 1])
def test_what_is_no_whole_number_of_64_bits_is_no_step(step):
    store = fresh()
    with pytest.raises(UsageError, match="step"):
        store.run("r").save(step, {}).result()
    assert not store.run("r").exists


@pytest.mark.parametrize(
    "step", [torch.tensor(True), torch.tensor(1.5), torch.ones(2, dtype=torch.int64)], ids=repr
)
def test_a_tensor_that_is_no_whole_number_is_no_step(step):
    with pytest.raises(UsageError, match="step"):
        fresh().run("r").save(step, {}).result()


def test_metadata_of_a_megabyte_comes_back_typed_and_more_than_four_is_refused():
    metadata = {
        "text": "é" * (1 << 19),
        "step": 10,
        "lr": 1e-3,
        "tags": ["a"],
        "none": None,
        "t": (1, {2: b"x"}),
    }
    store, run = saved({}, metadata=metadata)
    assert dict(again(store).run("r").latest.metadata) == metadata
    assert type(again(store).run("r").latest.metadata["t"]) is tuple
    with pytest.raises(UsageError, match="more than"):
        run.save(2, {}, metadata={"a": "x" * (5 << 20)}).result()
    with pytest.raises(UsageError, match="keys must be str"):
        run.save(2, {}, metadata={1: 2}).result()
    with pytest.raises(UnsupportedValueError, match="metadata"):
        run.save(2, {}, metadata={"a": torch.ones(1)}).result()
    assert steps(run) == [1]


# --- failures of a save --------------------------------------------------------------------------


def test_a_failed_save_is_told_once_and_the_next_one_works():
    store, _ = saved({"x": torch.ones(600)})
    seen, backend = watched(store)
    run = seen.run("r")
    backend.script.append(
        Fault("error", op="put", key="chunks/*", error=BackendError("disk on fire"), times=1)
    )
    pending = run.save(2, {"x": torch.zeros(600)})
    run.wait()
    assert pending.level == "failed"
    with pytest.raises(ckptstore.CkptstoreError, match="disk on fire"):
        run.save(3, {"x": torch.zeros(600)}).result()
    run.save(3, {"x": torch.zeros(600)}).result()
    run.close()
    assert steps(run) == [1, 3]


def test_close_raises_what_nobody_was_told():
    store, _ = saved({})
    seen, backend = watched(store)
    backend.script.append(Fault("error", op="sync", error=BackendError("no sync"), times=None))
    run = seen.run("r")
    run.save(2, {"x": torch.ones(600)})
    with pytest.raises(ckptstore.CkptstoreError, match="no sync"):
        run.close()
    run.close()


def test_another_clock_changes_no_order():
    from ckptstore.environment import Environment

    store = fresh()
    clock = iter([5e8 - 3600 * i for i in range(1000)])
    backwards = over(memory(store), Environment(now=lambda: next(clock)))
    run = backwards.run("r")
    for step in (1, 2, 3):
        run.save(step, {"x": torch.ones(1)}).result()
    assert steps(again(store).run("r")) == [1, 2, 3]
    assert again(store).run("r").latest.step == 3
