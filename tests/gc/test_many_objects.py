"""The store of the benchmark, small: a round does what it should, and memory does not hold what is there."""

from __future__ import annotations

import tracemalloc

import pytest

import ckptstore
from benchmarks.gc_place import Shape, fill, keep

SHAPE = Shape(objects=4000, checkpoints=40, runs=2)
BYTES_AN_OBJECT = 600


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("many") / "store"
    fill(place, SHAPE)
    return place


def objects(store):
    return sum(1 for kind in ("chunks/", "packs/") for _ in store.tier.backend.list(kind))


def test_a_dry_run_holds_less_than_some_numbers_of_each_object(place):
    with ckptstore.open(place) as store:
        store.gc(dry_run=True)  # imports
        tracemalloc.start()
        try:
            (report,) = store.gc(dry_run=True)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(report.fates) == SHAPE.checkpoints
        assert not any(fate.outcome == "delete" for fate in report.fates)
        # A million of them in 1 GiB, and as much again for records, numbers and Python itself.
        assert peak < BYTES_AN_OBJECT * SHAPE.objects + (2 << 20)


def test_a_round_deletes_what_only_the_oldest_name(place):
    with ckptstore.open(place) as store:
        before = objects(store)
        keep(store, SHAPE.of_run - 2)
        (planned,) = store.gc(dry_run=True)
        (report,) = store.gc()
        assert len(report.collected) == 2 * SHAPE.runs
        # What the first of a run wrote all later ones name.
        assert report.deleted_objects == SHAPE.of_checkpoint * SHAPE.runs == before - objects(store)
        assert report.freed_bytes == planned.freed_bytes
        (again,) = store.gc()
        assert (again.collected, again.deleted_objects, again.cleared.objects) == ((), 0, 0)
        assert len(store.run("run-000").checkpoints()) == SHAPE.of_run - 2
