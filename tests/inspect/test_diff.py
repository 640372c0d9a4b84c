"""diff: from digests, no chunk read; plain values; tensors cut differently."""

import collections
import dataclasses
import json
import math

import numpy as np
import pytest

from ckptstore.cli.output import plain
from ckptstore.errors import ChunkDamagedError
from ckptstore.inspect.diff import diff
from ckptstore.model.boxes import Box
from tests.inspect.made import AWKWARD, NoChunks, random_state, recut, store

__all__ = ["store"]


def save(store, state, step=1, run="r"):
    return store.run(run).save(step, state).result()


def two(store, change, tensors=4):
    state = random_state(tensors=tensors)
    run = store.run("r")
    a = run.save(1, state).result()
    change(state)
    return a, run.save(2, state).result()


def test_what_changed_is_told_from_digests_alone(store):
    def change(state):
        state["model"]["w1"][0, 0] += 1
        state["model"]["w2"] = state["model"]["w2"].astype(np.float16)
        state["model"]["w3"] = state["model"]["w3"][:50]
        state["model"]["new"] = np.zeros(3)
        del state["model"]["w0"]

    a, b = two(store, change)
    found = diff(a, b)
    assert {t.name: (t.change, t.what) for t in found.tensors} == {
        "model.new": ("added", ()),
        "model.w0": ("removed", ()),
        "model.w1": ("changed", ("content",)),
        "model.w2": ("changed", ("dtype",)),
        "model.w3": ("changed", ("shape",)),
    }
    assert (found.unchanged, found.unchanged_bytes) == (1, 400)
    assert [t.name for t in found.of("added")] == ["model.new"]
    assert found.changed_bytes == 24 + 32_000 + 16_000 + 16_000
    assert found.bytes_read == 0
    assert not found.identical
    assert diff(a, a).identical
    back = diff(b, a)
    assert [t.name for t in back.of("removed")] == ["model.new"]


@pytest.mark.parametrize("tensors", [3, 3000])  # with 3,000 the tables are objects of their own
def test_no_chunk_is_read(store, tensors):
    state = {"m": {f"w{i}": np.full(8, i, np.float32) for i in range(tensors)}}
    run = store.run("r")
    a = run.save(1, state).result()
    state["m"]["w1"] += 1
    run.save(2, state).result()
    forbidding = NoChunks(store.tier.backend.inner)
    store.tier.backend = forbidding
    a, b = (store.run("r")[step] for step in (1, 2))  # nothing in memory
    forbidding.forbidden = frozenset({*a.contents.keys.keys, *b.contents.keys.keys})
    assert [t.name for t in diff(a, b).tensors] == ["m.w1"]
    with pytest.raises(AssertionError, match="was read"):
        diff(a, b, values=True)


def test_only_what_was_asked_for_is_compared(store):
    def change(state):
        state["model"]["w1"] += 1
        state["optimizer"]["moments"] += 1
        state["optimizer"]["lr"] = 0.2

    a, b = two(store, change)
    assert [t.name for t in diff(a, b, only="model.*").tensors] == ["model.w1"]
    assert diff(a, b, only="model.*").value_changes == 0
    found = diff(a, b, only="optimizer")
    assert [t.name for t in found.tensors] == ["optimizer.moments"]
    assert [v.path for v in found.values] == ["optimizer.lr"]


def test_plain_values_are_compared_exactly(store):
    old = {
        "same": [1, 2.5, "x", None, math.nan, (1, 2)],
        "lr": 0.1,
        "zero": 0.0,
        "type": 1,
        "keys": {1: "a", "1": "b"},
        "kind": [1, 2],
        "gone": {"deep": 1},
        "ordered": collections.OrderedDict(a=1),
        "state": (3, tuple(range(625)), None),
        "grew": [1],
        "nan": math.nan,
        "bytes": b"\0\1",
    }
    new = {
        **old,
        "lr": 0.2,
        "zero": -0.0,
        "type": True,
        "keys": {1: "a", "1": "c"},
        "kind": (1, 2),
        "ordered": {"a": 1},
        "state": (3, tuple(range(1, 626)), None),
        "grew": [1, 2],
        "added": {"x": {}},
    }
    del new["gone"]
    a, b = save(store, {"s": old}), save(store, {"s": new}, 2)
    found = {v.path: (v.change, v.old, v.new) for v in diff(a, b).values}
    state = found.pop("s.state[1]")
    assert found == {
        "s.lr": ("changed", "0.1", "0.2"),
        "s.zero": ("changed", "0.0", "-0.0"),
        "s.type": ("changed", "1", "True"),
        "s.keys.1": ("changed", "'b'", "'c'"),
        "s.kind": ("changed", "[1, 2]", "(1, 2)"),
        "s.ordered": (
            "changed",
            "OrderedDict({'a': 1})" if "({" in repr(old["ordered"]) else "OrderedDict([('a', 1)])",
            "{'a': 1}",
        ),
        "s.grew[1]": ("added", None, "2"),
        "s.gone.deep": ("removed", "1", None),
        "s.added.x": ("added", None, "{}"),
    }
    assert state[0] == "changed"
    assert state[1] == "(0, 1, 2, 3, ...) (625 items)"


def test_value_changes_are_bounded_and_counted(store):
    a = save(store, {"s": {str(i): i for i in range(3000)}})
    b = save(store, {"s": {str(i): i + 1 for i in range(3000)}}, 2)
    found = diff(a, b)
    assert found.value_changes == 3000
    assert len(found.values) == 1000
    assert not found.identical
    long = diff(save(store, {"s": "x" * 10_000}, 3), save(store, {"s": "y" * 10_000}, 4)).values[0]
    assert len(long.old) < 250


def test_a_numpy_type_that_the_tensor_table_does_not_tell_apart(store):
    a = save(store, {"s": np.arange(4, dtype="i8")})
    b = save(store, {"s": np.arange(4, dtype="i8").view("M8[s]")}, 2)
    found = diff(a, b)
    assert not found.tensors
    assert [(v.path, v.change) for v in found.values] == [("s", "changed")]


def test_tied_tensors_count_once(store):
    weight = np.ones((64, 64), np.float32)
    a = save(store, {"m": {"embed": weight, "head": weight}})
    b = save(store, {"m": {"embed": weight + 1, "head": weight}}, 2)
    found = {t.name: t for t in diff(a, b, values=True).tensors}
    assert {name: t.change for name, t in found.items()} == {"m.embed": "changed"} or "m.embed" in found
    weight2 = weight + 1
    c = save(store, {"m": {"embed": weight2, "head": weight2}}, 3)
    found = diff(a, c, values=True)
    assert [t.name for t in found.tensors] == ["m.embed", "m.head"]
    assert [t.new.alias_of for t in found.tensors] == [None, "m.embed"]
    assert found.changed_bytes == weight.nbytes
    assert {t.values.max_abs_diff for t in found.tensors} == {1.0}


def test_between_runs_and_stores(store, tmp_path):
    import ckptstore

    state = random_state()
    a = save(store, state)
    with ckptstore.init(tmp_path / "other", chunk_bytes=1 << 20) as other:
        b = save(other, state, run="another")
        assert diff(a, b, values=True).identical
        state["model"]["w0"] += 1
        c = save(other, state, 2, run="another")
        assert [t.name for t in diff(a, c).tensors] == ["model.w0"]


HALVES = [Box((0, 0), (50, 80)), Box((50, 0), (50, 80))]
COLUMNS = [Box((0, 0), (100, 30)), Box((0, 30), (100, 50))]


@pytest.mark.parametrize("boxes", [HALVES, COLUMNS])
def test_tensors_cut_differently_are_not_guessed_at(store, boxes):
    state = random_state()
    a = save(store, state)
    b = recut(a, {"model.w0": boxes, "model.w1": boxes})
    found = diff(a, b)
    assert {t.name: t.change for t in found.tensors} == dict.fromkeys(
        ("model.w0", "model.w1"), "undetermined"
    )
    assert all(t.changed_bytes is None for t in found.tensors)
    assert not found.identical
    read = diff(a, b, values=True)
    assert read.identical
    assert (read.unchanged, read.bytes_read > 0) == (5, True)
    state["model"]["w0"][77, 33] += 2
    c = save(store, state, 2)
    found = {t.name: t for t in diff(b, c, values=True).tensors}
    assert set(found) == {"model.w0"}
    assert found["model.w0"].change == "changed"
    assert found["model.w0"].values.differing == 1
    assert found["model.w0"].values.max_abs_diff == pytest.approx(2, abs=1e-6)


def test_a_difference_in_a_common_box_is_enough(store):
    state = {"m": np.zeros((100, 300), np.float32)}  # two chunks: rows 0 to 32, ... of 54 rows each
    a = save(store, state)
    cell = a.contents.layout.cell(0)[0]
    state["m"][0, 0] = 1
    b = save(store, state, 2)
    last = 100 - cell
    c = recut(
        b, {"m": [Box((0, 0), (cell, 300)), Box((cell, 0), (last - 5, 300)), Box((100 - 5, 0), (5, 300))]}
    )
    found = diff(a, c).tensors[0]
    assert (found.change, found.changed_bytes) == ("changed", None)


def test_damage_is_an_error_that_names_the_tensor(store, tmp_path):
    a, b = two(store, lambda state: state["model"].update(w1=state["model"]["w1"] + 1))
    keys = set(b.contents.keys.keys) - set(a.contents.keys.keys)
    for key in keys:
        path = tmp_path / "store" / key
        path.chmod(0o644)
        path.write_bytes(bytes(path.stat().st_size))
    assert [t.name for t in diff(a, b).tensors] == ["model.w1"]
    with pytest.raises(ChunkDamagedError, match="w1"):
        diff(a, b, values=True)


def test_names_of_every_kind_and_the_result_as_json(store):
    state = {"m": {name: np.zeros(3) for name in AWKWARD}, "v": dict.fromkeys(AWKWARD, 1)}
    a = save(store, state)
    for name in AWKWARD:
        state["m"][name] += 1
        state["v"][name] = 2
    b = save(store, state, 2)
    found = diff(a, b, values=True)
    assert {t.name for t in found.tensors} == {f"m.{name}" for name in AWKWARD}
    assert found.value_changes == len(AWKWARD)
    text = json.dumps(plain(found), allow_nan=False)
    assert json.loads(text)["a"]["step"] == 1
    assert dataclasses.is_dataclass(found)


def test_progress_and_pins(store):
    a, b = two(store, lambda state: state["model"].update(w1=state["model"]["w1"] + 1))
    seen, kinds = [], []

    def progress(done, total):
        seen.append((done, total))
        kinds.extend(info.key for info in store.tier.listing("intents/") if info.key.endswith(".mp"))

    diff(a, b, values=True, progress=progress)
    assert seen[-1] == (64_000, 64_000)
    assert len(set(kinds)) == 2  # both are being read, and say so
    assert not list(store.tier.listing("intents/"))
