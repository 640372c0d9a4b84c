"""A collector that dooms a record just before a load pins it: the load does not rely on that record."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.errors import NotFoundError
from ckptstore.model.record import CommitEnd
from ckptstore.replicate.copying import copy_checkpoint
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import commits, layout
from ckptstore.tier.tier import Tier
from tests.crash._support import (
    CHUNK_BYTES,
    TRAIN,
    blank_like,
    make_state,
    memory_place,
    quiet,
    same,
    store_over,
)
from tests.gc import made
from tests.replicate.made import RUN, alone, opened, places, replicate


class Doomed(FaultBackend):
    """Dooms a record, as a collector does that dies then, when the first read intent is to be written."""

    def __init__(self, inner):
        super().__init__(inner)
        self.pin = None

    def put(self, key, buffers, *, if_absent=False):
        if key.startswith("intents/") and self.pin is not None:
            pin, self.pin = self.pin, None
            dying = FaultBackend(self.inner, [Fault("crash_after", op="put", key=layout.doom_key(*pin))])
            with contextlib.suppress(SimulatedCrash):
                made.gc(dying, pin)
            assert any(self.inner.list("dooms/"))
        super().put(key, buffers, if_absent=if_absent)

    @property
    def chunks_read(self):
        return [call.key for call in self.log if call.op == "read_into"]


def test_the_next_copy_is_read():
    with places() as (hot, cold):
        racing = Doomed(hot)
        with contextlib.closing(opened(racing, cold)) as store:
            run = store.run(RUN)
            for step in (1, 2):
                run.save(step, make_state(step), wait=True)
            replicate(store)
            checkpoint = run[1]
            _ = checkpoint.contents.layout, checkpoint.sources.first  # planned by before it was doomed
            racing.log.clear()
            racing.pin = (run.key, checkpoint.record.attempt)
            target = blank_like(make_state(1))
            report = checkpoint.restore(target)
            assert same(target, make_state(1))
            assert report.bytes_by_tier == {"cold": report.bytes_read}
            assert not racing.chunks_read
            assert any("is being deleted from tier 'hot'" in line for line in report.damaged)


def test_a_copy_is_made_from_the_next_one():
    with places() as (hot, cold), memory_place() as third:
        racing = Doomed(hot)
        with contextlib.closing(opened(racing, cold)) as store:
            run = store.run(RUN)
            for step in (1, 2):
                run.save(step, make_state(step), wait=True)
            replicate(store)
            uuid = store.tier.marker.store_uuid
            other = Tier.create(third, quiet(), chunk_bytes=CHUNK_BYTES, store_uuid=uuid)
            racing.pin = (run.key, run[1].record.attempt)
            racing.log.clear()
            copy_checkpoint(run[1].copies, other)
            assert not racing.chunks_read
        with contextlib.closing(alone(third)) as store:
            assert same(store.run(RUN)[1].load(), make_state(1))


def test_without_another_copy_it_is_named_and_nothing_is_placed():
    with made.trained(1, 2) as (place, pins):
        racing = Doomed(place)
        with contextlib.closing(store_over(racing)) as store:
            checkpoint = store.run(TRAIN)[1]
            racing.pin = pins[1]
            target = blank_like(make_state(1))
            with pytest.raises(NotFoundError, match=r"run '.*' step 1: .* is being deleted from tier"):
                checkpoint.restore(target)
            assert same(target, blank_like(make_state(1)))
            made.gc(place, pins[1])
            assert isinstance(commits.read_commit(store.tier, *pins[1]), CommitEnd)
            assert store.run(TRAIN).restore(target) == 2
