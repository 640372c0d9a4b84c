"""A save through DCP that dies at any call of the backend, on either of two ranks, or loses items.

The ranks are two writers in this process, called as DCP calls them.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import ckptstore
from ckptstore.backend import open_backend
from ckptstore.environment import Environment
from ckptstore.errors import CkptstoreError, SaveFailedError
from ckptstore.store import Store
from ckptstore.testing.faults import Fault, FaultBackend, SimulatedCrash, crash_at
from ckptstore.tier.tier import Tier
from ckptstore.torch import StoreWriter
from tests.dcp.made import same

pytestmark = pytest.mark.torch

ROWS, COLUMNS = 12, 100


def whole(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(ROWS, COLUMNS, generator=generator),
        "frozen": torch.arange(3.0),
        "groups": [{"lr": 0.1 * seed, "w": torch.ones(2) * seed}, {"lr": seed}],
    }


class Planner(DefaultSavePlanner):
    """Plans ``w`` as one of two ranks holds it: the upper or the lower half of its rows."""

    def __init__(self, rank):
        super().__init__()
        self._rank = rank

    def create_local_plan(self):
        plan = super().create_local_plan()
        half = ROWS // 2
        offsets, sizes = torch.Size([self._rank * half, 0]), torch.Size([half, COLUMNS])
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(), torch.Size([ROWS, COLUMNS])
        )
        shard = WriteItem(MetadataIndex("w", offsets), WriteItemType.SHARD, tensor_data=data)
        items = [shard if item.index.fqn == "w" else item for item in plan.items]
        return dataclasses.replace(plan, items=items)

    def lookup_object(self, index):
        found = super().lookup_object(dataclasses.replace(index, offset=None) if index.fqn == "w" else index)
        return found[index.offset[0] :][: ROWS // 2] if index.fqn == "w" else found


def save(writers, step, planners=None, lose=None):
    """As ``_save_state_dict`` does on each rank; like there, an error on one ends the save of all.

    Args:
        lose: (ranks, name) of an item that disappears from their final plans.
    """
    planners = planners or [Planner(0), Planner(1)]
    plans = []
    for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
        writer.reset(f"r@{step}")
        planner.set_up_planner(whole(step), writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for rank, (writer, planner, plan) in enumerate(zip(writers, planners, plans, strict=True)):
        final = planner.finish_plan(plan)
        if lose is not None and rank in lose[0]:
            final = dataclasses.replace(final, items=[i for i in final.items if i.index.fqn != lose[1]])
        results.append(writer.write_data(final, planner).wait())
    writers[0].finish(metadata=metadata, results=results)


class Place:
    """A store as two ranks have it open, each through a backend of its own that can fail."""

    def __init__(self, path, start):
        self.path = path
        self.backends = [FaultBackend(open_backend(str(path))) for _ in range(2)]
        self.runs = []
        for rank, backend in enumerate(self.backends):
            store = Store(ckptstore.config.resolve(path), Tier.open(backend, Environment()))
            self.runs.append(store.run("r", rank=rank, world_size=2, session_key=start, deadline_seconds=5))
        self.writers = [StoreWriter(run) for run in self.runs]

    def seen(self):
        """Step -> state, as anybody else sees the run."""
        with ckptstore.open(self.path) as store:
            return {c.step: c.load() for c in store.run("r").checkpoints()}


@pytest.fixture
def places(tmp_path):
    """Gives places: at each call a new start of the ranks; a new store for each name."""
    with contextlib.ExitStack() as stack:

        def make(name, start):
            path = tmp_path / name
            if not path.exists():
                ckptstore.init(path, chunk_bytes=1 << 10).close()
            place = Place(path, start)
            for run in place.runs:
                stack.callback(run._store.close)
            return place

        yield make


def calls_of_a_save(places):
    place = places("counted", "first")
    save(place.writers, 1)
    before = [len(backend.log) for backend in place.backends]
    save(place.writers, 2)
    return [(n, len(backend.log) - n) for n, backend in zip(before, place.backends, strict=True)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_at_any_call(places, rank):
    count = calls_of_a_save(places)[rank][1]
    assert count > 5
    ends = set()
    for number in range(1, count + 2):
        place = places(f"p{number}", "first")
        save(place.writers, 1)
        backend = place.backends[rank]
        backend.script.append(crash_at(len(backend.log) + number))
        with contextlib.suppress(SimulatedCrash, CkptstoreError):
            save(place.writers, 2)
        seen = place.seen()
        ends.add(tuple(seen))
        assert same(seen[1], whole(1))
        assert all(same(state, whole(step)) for step, state in seen.items())
        again = places(f"p{number}", "second")  # all are started anew
        save(again.writers, 2)
        seen = again.seen()
        assert set(seen) == {1, 2}
        assert all(same(state, whole(step)) for step, state in seen.items())
    assert (1,) in ends
    assert rank == 1 or (1, 2) in ends


@pytest.mark.parametrize("rank", [0, 1])
def test_the_next_save_of_the_same_process_works(places, rank):
    """A call fails, and nothing dies."""
    first, count = calls_of_a_save(places)[rank]
    for number in range(1, count + 1):
        place = places(f"p{number}", "first")
        save(place.writers, 1)
        place.backends[rank].script.append(Fault("error", n=first + number))
        with contextlib.suppress(CkptstoreError):
            save(place.writers, 2)
        save(place.writers, 2)
        seen = place.seen()
        assert set(seen) == {1, 2}
        assert all(same(state, whole(step)) for step, state in seen.items())


@pytest.mark.parametrize(
    ("ranks", "name", "message"),
    [
        ([0], "w", "600 of 1200 elements are not covered"),
        ([1], "w", "600 of 1200 elements are not covered"),
        ([0, 1], "w", "no rank has written w"),
        ([0, 1], "frozen", "no rank has written frozen"),
        ([0, 1], "groups.1.lr", r"no rank has written groups\.1\.lr"),
    ],
)
def test_an_item_that_is_lost_on_the_way_fails_the_save(places, ranks, name, message):
    place = places("lost", "first")
    save(place.writers, 1)
    with pytest.raises(SaveFailedError, match=message):
        save(place.writers, 2, lose=(ranks, name))
    assert set(place.seen()) == {1}
    save(place.writers, 3)
    assert same(place.seen()[3], whole(3))
