"""Small chunks in packs: which go out at once, which wait for all, and that each is somewhere once."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.model.ids import Digest, digest_of, pack_key
from ckptstore.model.tables import KeyList, Locations
from ckptstore.save.cut import Bundle, Piece
from ckptstore.save.packs import Packer
from ckptstore.save.places import Places
from ckptstore.save.reuse import Remembered, ReuseIndex

ATTEMPT = "01M8QVFWT96CCV7WQRKDXD5PQH-1-1"
PACK_BYTES = 100


def content(number):
    """Equal numbers are equal bytes; sizes from 1 to 60."""
    return bytes([number]) * (1 + number * 7 % 60)


def cut_of(numbers_of, *, bundles):
    """Pieces of component -> contents; some of them bundles, as tiny chunks are."""
    pieces, row = [], 0
    for component, numbers in numbers_of.items():
        for start in range(0, len(numbers), 3):
            views = [memoryview(content(number)) for number in numbers[start : start + 3]]
            sizes = [len(view) for view in views]
            if bundles and start % 9 == 0:
                pieces.append(Bundle(row, component, sum(sizes), sizes, views))
            else:
                pieces += [Piece(row + i, component, 0, sizes[i], view, None) for i, view in enumerate(views)]
            row += len(views)
    return pieces, row


def index_of(numbers, *, dead):
    """An index that knows these contents: in one pack, which holds so many bytes more; and its key."""
    sizes = np.array([len(content(number)) for number in numbers], np.int64)
    key = pack_key(Digest(bytes(32)), ATTEMPT, 0)
    keys = KeyList.of({key: int(sizes.sum()) + dead})
    zeros = np.zeros(len(numbers), np.int64)
    locations = Locations(zeros, np.cumsum(sizes) - sizes, sizes, zeros.astype(np.uint8))
    record = types.SimpleNamespace(tables={}, attempt="a")
    found = types.SimpleNamespace(size_bytes=int(keys.sizes[0]))
    capabilities = types.SimpleNamespace(cheap_head=True)
    backend = types.SimpleNamespace(capabilities=capabilities, head=lambda _key: found)
    pinned = [Remembered(record, [digest_of(content(n)) for n in numbers], locations, keys)]
    return ReuseIndex(pinned, backend, lambda *_: pytest.fail("nothing is missing")), key


class Packed:
    """Runs a packer, and keeps what it puts."""

    def __init__(self, numbers_of, known=(), *, dead=0, bundles=True):
        self.numbers = [number for own in numbers_of.values() for number in own]
        pieces, count = cut_of(numbers_of, bundles=bundles)
        self.index, self.known_key = index_of(sorted(known), dead=dead)
        used = sum(len(content(number)) for number in known & set(self.numbers)) if known else 0
        total = sum(len(content(number)) for number in known) + dead
        self.reused = set(known) if known and 2 * used >= total else set()
        self.digests = [Digest(b"")] * count
        self.places = Places(count)
        self.packs = {}  # key -> bytes
        self.rows = []  # of each pack, in the order in which they were put
        self.packer = Packer(pieces, self.digests, self.index, self.places, PACK_BYTES, self.put)

    def put(self, chunks):
        key = pack_key(digest_of(b"".join(chunks.digests)), ATTEMPT, 0)
        self.places.put_pack(chunks.rows, key, chunks.sizes)
        assert key not in self.packs
        self.packs[key] = b"".join(
            bytes(p if isinstance(p, memoryview) else p.data()) for p in chunks.parts()
        )
        self.rows.append(list(chunks.rows))

    def check(self):
        """Each chunk is where its bytes are; none is written twice, none that is to be reused is written."""
        keys = self.places.key_list()
        at = self.places.locations(keys)
        for row, number in enumerate(self.numbers):
            key, offset = keys.keys[at.object[row]], at.offset[row]
            assert at.length[row] == len(content(number))
            assert (key == self.known_key) == (number in self.reused)
            if key != self.known_key:
                assert self.packs[key][offset : offset + at.length[row]] == content(number)
        assert sum(map(len, self.rows)) == len(set(self.numbers) - self.reused)
        largest = max((len(content(number)) for number in self.numbers), default=0)
        assert all(len(data) <= max(PACK_BYTES, largest) for data in self.packs.values())


contents = st.lists(st.integers(0, 25), max_size=24)


@given(
    st.fixed_dictionaries({"model": contents, "optimizer": contents}),
    st.sets(st.integers(0, 25), max_size=4),
    st.sampled_from([0, 60, 10_000]),
    st.randoms(use_true_random=False),
)
def test_in_whatever_order_they_are_hashed_each_is_somewhere_once(numbers_of, known, dead, chance):
    packed = Packed(numbers_of, known, dead=dead)
    jobs = packed.packer.jobs()
    chance.shuffle(jobs)
    for job in jobs:
        job()
    packed.check()


def test_a_pack_that_is_hashed_goes_out_while_others_are_not(monkeypatch):
    monkeypatch.setattr("ckptstore.save.packs.TINY_BYTES", 0)
    packed = Packed({"model": list(range(25))}, bundles=False)
    jobs = packed.packer.jobs()
    assert len(jobs) > 3
    for done, job in enumerate(jobs, 1):
        job()
        assert len(packed.rows) == done
    assert [row for rows in packed.rows for row in rows] == list(range(25))
    packed.check()


def test_equal_chunks_of_a_save_do_not_keep_a_pack_back(monkeypatch):
    """As the step counts of an optimizer, one beside each parameter's moments."""
    monkeypatch.setattr("ckptstore.save.packs.TINY_BYTES", 0)
    packed = Packed({"optimizer": [n for number in range(1, 25) for n in (number, 0)]}, bundles=False)
    jobs = packed.packer.jobs()
    assert len(jobs) > 3
    for done, job in enumerate(jobs, 1):
        job()
        assert len(packed.rows) == done
    packed.check()


def test_what_may_be_reused_waits_for_all_and_what_is_left_of_it_shares_packs(monkeypatch):
    monkeypatch.setattr("ckptstore.save.packs.TINY_BYTES", 0)
    packed = Packed({"model": list(range(25))}, {0, 24}, bundles=False)
    *jobs, last = packed.packer.jobs()
    for job in jobs:
        job()
    out = [row for rows in packed.rows for row in rows]
    assert {1, 23}.isdisjoint(out)  # they were hashed with a chunk that is known
    last()
    late = [row for rows in packed.rows for row in rows][len(out) :]
    assert late == [row for row in range(1, 24) if row not in out]
    assert {1, 23} < set(late)
    packed.check()


def test_nothing_small_is_nothing_to_do():
    assert Packed({}).packer.jobs() == []
