"""Which chunks need no looking for: told from 8 bytes of their digests, and never wrong about a known one."""

import os
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore.model.ids import DIGEST_BYTES, Digest
from ckptstore.model.tables import KeyList, Locations
from ckptstore.save import reuse
from ckptstore.save.reuse import Remembered, ReuseIndex

NO_KEYS = KeyList.of({})


def digest(beginning, rest=0):
    return Digest(beginning.to_bytes(8, "big") + bytes([rest]) * (DIGEST_BYTES - 8))


def index_of(*contents):
    record = types.SimpleNamespace(tables={}, attempt="a")
    backend = types.SimpleNamespace(capabilities=types.SimpleNamespace(cheap_head=True))
    pinned = []
    for digests in contents:
        zeros = np.zeros(len(digests), np.int64)
        locations = Locations(zeros, zeros, zeros, zeros.astype(np.uint8))
        pinned.append(Remembered(record, digests, locations, NO_KEYS))
    return ReuseIndex(pinned, backend, lambda *_: pytest.fail("nothing is missing"))


some = st.lists(st.builds(digest, st.integers(0, 12), st.integers(0, 1)), max_size=8)


@given(st.lists(some, max_size=3), some)
def test_exactly_those_that_begin_like_a_known_one_or_like_another_are_looked_at(known, own):
    beginnings = [one[:8] for one in own]
    there = {one[:8] for digests in known for one in digests}
    may_be_known, repeats = index_of(*known).unsure(own)
    assert may_be_known.tolist() == [i for i, one in enumerate(beginnings) if one in there]
    assert repeats.tolist() == [i for i, one in enumerate(beginnings) if beginnings.count(one) > 1]


def test_ten_thousand_new_ones_are_told_without_a_table_of_the_known_ones():
    index = index_of([Digest(os.urandom(32)) for _ in range(5000)] * 2)  # equal ones known are no sign
    may_be_known, repeats = index.unsure([Digest(os.urandom(32)) for _ in range(10_000)])
    assert not len(may_be_known)
    assert not len(repeats)
    assert "_rows" not in vars(index)


def test_of_two_contents_that_know_a_chunk_the_preferred_one_is_asked():
    one, other = digest(1), digest(2)
    index = index_of([one], [other, one])
    assert index._rows == {one: 0, other: 1}


@pytest.mark.parametrize("alike", [False, True], ids=["as they are", "all beginnings alike"])
def test_equal_chunks_of_several_components_are_stored_once_and_come_back(tmp_path, monkeypatch, alike):
    if alike:
        monkeypatch.setattr(reuse, "_beginnings", lambda digests: np.zeros(len(digests), np.uint64))
    same = torch.arange(64.0)
    state = {
        "model": {f"w{n}": torch.full((64,), float(n % 5)) for n in range(20)} | {"same": same.clone()},
        "optimizer": {f"w{n}": torch.full((64,), float(n % 7)) for n in range(20)} | {"same": same.clone()},
    }
    run = ckptstore.open(tmp_path / "store", create=True).run("r")
    first = run.save(1, state).result()
    state["model"]["w3"] += 100.0
    second = run.save(2, state).result()
    for checkpoint, changed in ((first, 3.0), (second, 103.0)):
        loaded = checkpoint.load()
        assert all(torch.equal(loaded["optimizer"][name], held) for name, held in state["optimizer"].items())
        assert loaded["model"]["w3"].tolist() == [changed] * 64
        assert torch.equal(loaded["model"]["same"], same)
    assert first.record.new_bytes == (7 + 1) * 256
    assert second.record.new_bytes == 256  # all else is in packs of which most is used again
    run.close()
