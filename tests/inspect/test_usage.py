"""du: against sets of keys, counted one by one, and against what lies on the disk."""

import json

import numpy as np
import pytest

import ckptstore
from ckptstore.cli.output import plain
from ckptstore.errors import NotFoundError, UsageError
from ckptstore.inspect import census
from ckptstore.inspect.usage import usage
from tests.inspect import example
from tests.inspect.made import AWKWARD, listed, random_state, store

__all__ = ["store"]


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory):
    with example.make(tmp_path_factory.mktemp("usage") / "store") as made:
        yield made


def by_sets(opened):
    """Checkpoint id -> (stored, unique), in the plain way."""
    needs = {
        c.id: c.contents.object_sizes
        for name in (example.RUN, example.TUNED)
        for c in opened.run(name).checkpoints()
    }
    out = {}
    for identity, sizes in needs.items():
        others = {key for other, keys in needs.items() if other != identity for key in keys}
        out[identity] = (sum(sizes.values()), sum(size for key, size in sizes.items() if key not in others))
    return out


def test_every_checkpoint_as_counted_one_by_one(lived_in):
    found = usage(lived_in)
    expected = by_sets(lived_in)
    assert len(found.checkpoints) == len(expected) == 16
    for item in found.checkpoints:
        assert (item.sizes.stored_bytes, item.sizes.unique_bytes) == expected[item.checkpoint]
        assert item.sizes.stored_bytes == item.sizes.unique_bytes + item.sizes.shared_bytes
        assert item.sizes.logical_bytes == sum(part.sizes.logical_bytes for part in item.components)
        assert [part.component for part in item.components][:2] != []


def test_totals_are_what_lies_on_the_disk(lived_in):
    found = usage(lived_in, scan=True)
    objects = listed(lived_in)
    assert found.total.stored_bytes == found.total.unique_bytes == sum(objects.values())
    assert found.total.objects == len(objects) == found.scan.objects
    assert (found.scan.unaccounted, found.scan.missing, found.scan.unfinished) == (0, 0, 0)
    assert found.scan.bytes == sum(objects.values())
    assert found.record_bytes == sum(info.size_bytes for info in lived_in.tier.listing("commits/"))
    runs = {run.run: run for run in found.runs}
    assert sum(run.sizes.unique_bytes for run in runs.values()) < found.total.stored_bytes
    assert runs[example.TUNED].sizes.shared_bytes > 0
    for run in runs.values():
        mine = [c for c in found.checkpoints if c.run == run.run]
        assert run.checkpoints == len(mine)
        assert run.sizes.logical_bytes == sum(c.sizes.logical_bytes for c in mine)
        assert {p.component for p in run.components} == {p.component for c in mine for p in c.components}


def test_a_part_is_the_same_part(lived_in):
    everything = usage(lived_in)
    part = usage(lived_in, run=example.TUNED)
    assert part.total == everything.total
    assert part.runs == tuple(r for r in everything.runs if r.run == example.TUNED)
    assert part.checkpoints == tuple(c for c in everything.checkpoints if c.run == example.TUNED)
    one = usage(lived_in, ref=f"{example.TUNED}@1030")
    assert one.runs == ()
    assert [c.step for c in one.checkpoints] == [1030]
    assert one.checkpoints[0] in everything.checkpoints


def test_unique_is_what_deleting_would_free(store):
    state = random_state()
    run = store.run("r")
    run.save(1, state).result()
    state["model"]["w0"] += 1
    run.save(2, state).result()
    first, second = usage(store).checkpoints
    changed = state["model"]["w0"].nbytes
    assert first.sizes.unique_bytes == second.sizes.unique_bytes == changed
    parts = {part.component: part.sizes for part in second.components}
    assert parts["model"].unique_bytes == changed
    assert parts["optimizer"].unique_bytes == 0


def test_equal_bytes_in_two_components_belong_to_both(store):
    weight = np.full((100, 100), 3, np.float32)
    store.run("r").save(1, {"model": weight, "ema": weight.copy()}).result()
    one = usage(store).checkpoints[0]
    assert one.sizes.logical_bytes == 2 * weight.nbytes
    assert one.sizes.stored_bytes == one.sizes.unique_bytes == weight.nbytes
    for part in one.components:
        assert (part.sizes.stored_bytes, part.sizes.unique_bytes) == (weight.nbytes, 0)


def test_tables_that_are_objects_count_as_such(store):
    store.run("r").save(1, {"m": {f"w{i}": np.full(4, i) for i in range(3000)}}).result()
    found = usage(store, scan=True)
    parts = {part.component: part.sizes for part in found.checkpoints[0].components}
    assert parts[None].stored_bytes > 100_000
    assert parts[None].logical_bytes == 0
    assert found.total.stored_bytes == sum(listed(store).values())


def test_a_scan_finds_garbage_and_what_is_missing(store, tmp_path):
    store.run("r").save(1, random_state()).result()
    stray = f"chunks/ab/{'ab' * 32}.01M8KKNRD15E82Z28HX0C1H7AX-5-1.0"
    store.tier.backend.put(stray, [b"x" * 1000])
    (tmp_path / "store" / "chunks" / "notes.txt").write_text("mine")
    victim = min(key for key in listed(store) if key.startswith("packs/"))
    lost = listed(store)[victim]
    (tmp_path / "store" / victim).unlink()
    found = usage(store, scan=True).scan
    assert stray in {item.key for item in found.listed}
    assert found.unaccounted_bytes == sum(item.bytes for item in found.listed) >= 1000
    assert (found.missing, found.missing_bytes) == (1, lost)
    assert usage(store).scan is None


def test_a_record_that_cannot_be_read_is_named_and_does_not_stop_it(store, tmp_path):
    run = store.run("r")
    run.save(1, random_state()).result()
    run.save(2, random_state(1)).result()
    store.close()
    path = max((tmp_path / "store" / "commits").rglob("*.mp"))
    path.chmod(0o644)
    path.write_bytes(b"x" * 500)
    with ckptstore.open(tmp_path / "store") as opened:
        opened.rebuild()
        found = usage(opened, scan=True)
        assert [c.step for c in found.checkpoints] == [1]
        assert len(found.unreadable) == 1
        assert found.scan.unaccounted > 0


def test_nothing_and_wrong_names(store):
    empty = usage(store, scan=True)
    assert (empty.total.stored_bytes, empty.runs, empty.checkpoints) == (0, (), ())
    store.run("alpha").start()
    assert usage(store, run="alpha").checkpoints == ()
    store.run("beta").save(1, {"lr": 1}).result()
    assert usage(store, run="beta").checkpoints[0].sizes.stored_bytes == 0
    with pytest.raises(NotFoundError, match="alpah") as error:
        usage(store, run="alpah")
    assert "alpha" in error.value.hint
    with pytest.raises(NotFoundError):
        usage(store, ref="beta@7")
    with pytest.raises(UsageError):
        usage(store, run="beta", ref="beta@1")


def test_names_of_every_kind(store):
    for number, name in enumerate(AWKWARD):
        store.run(name).save(number, {name: np.full(5, number)}).result()
    found = usage(store)
    assert {run.run for run in found.runs} == set(AWKWARD)
    assert {part.component for c in found.checkpoints for part in c.components} == set(AWKWARD)
    assert {run.run for run in usage(store, run=AWKWARD[1]).runs} == {AWKWARD[1]}
    json.dumps(plain(found), allow_nan=False)


def test_objects_that_differ_only_in_who_wrote_them_are_told_apart(store):
    taken = census.Census(store.tier)
    one = f"chunks/ab/{'ab' * 32}.01M8KKNRD15E82Z28HX0C1H7AX-5-1."
    other = f"chunks/ab/{'ab' * 32}.01M8KKNRD15E82Z28HX0C1H7AX-5-2."
    keys = [base + str(rank) for base in (one, other) for rank in range(50)]
    keys += [key.replace("chunks", "packs") for key in keys]
    assert len({taken.print_of(key) for key in keys}) == len(keys)


def test_thousands_of_checkpoints_are_counted_in_columns(store, monkeypatch):
    """The arithmetic over 2 million uses, without the reading."""
    taken = census.Census(store.tier)
    source = np.random.default_rng(0)
    for index in range(2000):
        prints = np.arange(index * 10, index * 10 + 1000, dtype=np.uint64)
        taken._found.append((index, census._Uses(prints, np.full(1000, 7), source.integers(0, 2, 1000))))
    taken._merge()
    sums = census.totals(taken, taken.of_member, 2000)
    assert (sums.stored == 7000).all()
    assert sums.unique.tolist() == [70] + [0] * 1998 + [70]
    assert len(taken.prints) == 1999 * 10 + 1000
