"""Requests of a load and a copy that need not wait for each other are under way at once; and how many."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest

from ckptstore.model.ids import Attempt
from ckptstore.replicate.copying import copy_checkpoint
from ckptstore.save import tables
from ckptstore.testing import FaultBackend
from ckptstore.tier.intents import Intent
from ckptstore.tier.tier import Tier
from tests.crash._support import blank_like, make_place, make_state, memory_place, quiet, same, store_over
from tests.replicate.made import RUN, opened, places

SECONDS = 20.0


class Remote(FaultBackend):
    """A place over the network: requests that a barrier counts go on when so many are under way."""

    def __init__(self, inner):
        super().__init__(inner)
        self.barriers = {}

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, cheap_head=False, concurrency=16)

    def meet(self, op, keys, parties):
        """From now on such a call waits for so many others."""
        self.barriers[op] = (keys, threading.Barrier(parties))

    def _call(self, op, key, call):
        keys, barrier = self.barriers.get(op, ((), None))
        if barrier is not None and key.startswith(tuple(keys)):
            barrier.wait(SECONDS)
        return super()._call(op, key, call)

    def asked(self):
        """(operation, first part of the key) in order, without what is put and removed beside it."""
        return [(call.op, call.key.partition("/")[0]) for call in self.log if "beat" not in call.key]


@pytest.fixture(autouse=True)
def _tables_apart(monkeypatch):
    monkeypatch.setattr(tables, "INLINE_BYTES", 0)


def table_keys(record):
    return {piece.key for ref in record.tables.values() for piece in ref.pieces}


def first_keys(record):
    """Of the first piece of each table: a table's own pieces follow each other."""
    return {ref.pieces[0].key for ref in record.tables.values()}


def test_a_restore_asks_for_its_tables_at_once():
    with memory_place() as place:
        make_place(place)
        remote = Remote(place)
        with contextlib.closing(store_over(remote)) as store:
            run = store.run(RUN)
            run.save(1, make_state(1), wait=True)
            checkpoint = run.latest
            keys = table_keys(run.latest.record)
            remote.meet("read_into", first_keys(run.latest.record), 5)
            remote.log.clear()
            target = blank_like(make_state(1))
            checkpoint.restore(target)
            assert same(target, make_state(1))
        # What is before the tables is the protocol: the pin, then its doom, then the record.
        asked = remote.asked()
        assert asked[:3] == [("put", "intents"), ("head", "dooms"), ("get", "commits")]
        read = [call.key for call in remote.log if call.op == "read_into"]
        assert set(read[: len(keys)]) == keys
        assert not set(read[len(keys) :]) & keys
        assert asked[-1][0] == "delete"


def test_pins_are_looked_at_at_once_and_each_in_order():
    with memory_place() as place:
        make_place(place)
        with contextlib.closing(store_over(place)) as store:
            run = store.run(RUN)
            pins = [(run.key, run.save(step, make_state(step)).result().id) for step in (1, 2, 3)]
        remote = Remote(place)
        tier = Tier.open(remote, quiet())
        attempt = str(Attempt(tier.environment.new_ulid(), 7, 1))
        intent = Intent.announce(tier, "save", attempt, RUN, pins)
        remote.log.clear()
        remote.meet("head", ["dooms/"], 3)
        assert list(intent.surviving()) == pins
        for _, attempt in pins:
            own = [call.key.split("/")[0] for call in remote.log if attempt in call.key]
            assert own[:2] == ["dooms", "commits"]


def test_a_copy_puts_its_tables_at_once_and_asks_for_little():
    with places() as (hot, cold):
        remote = Remote(cold)
        with contextlib.closing(opened(hot, remote)) as store:
            store.run(RUN).save(1, make_state(1), wait=True)
            (source,) = store.run(RUN).latest.copies
            state = {digest.hex() for digest in source.contents.digests}
            same_tables = [source.record.tables[name] for name in ("layout", "tree", "digests")]
            later = {piece.digest.hex() for ref in same_tables for piece in ref.pieces[1:]}
            meeting = threading.Barrier(5)
            real = remote.put

            def put(key, buffers, *, if_absent=False):
                name = key.rpartition("/")[2].partition(".")[0]
                if key.startswith("chunks/") and name not in state | later:
                    meeting.wait(SECONDS)
                real(key, buffers, if_absent=if_absent)

            remote.put = put
            remote.log.clear()
            copy_checkpoint([source], store.tiers[1])
        gets = [call.key.partition("/")[0] for call in remote.log if call.op == "get"]
        assert gets == ["ckptstore.json", "ckptstore.json", "commits"]  # twice the marker, and the outcome
        assert not [call for call in remote.log if call.op == "read_into"]
