"""How a load reads: each byte once, straight to where it goes, in several threads, all of it verified."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import ChunkDamagedError, PartlyRestoredError
from ckptstore.load import fetch
from ckptstore.load.fetch import Scratch
from ckptstore.load.plan import BATCH_BYTES, MAX_GAP_BYTES, Read, Want, batches, plan
from ckptstore.model.boxes import Box
from ckptstore_local import LocalBackend, _sys

MIB = 1 << 20


def state():
    """Objects of their own, large and small chunks in a pack, odd sizes."""
    random = np.random.default_rng(0)
    sizes = {"a": 5 * MIB + 3, "b": 1001, "c": 2 * MIB + 1, "d": 77, "e": 0, "f": MIB, "g": 1, "h": 3 * MIB}
    return {name: random.integers(0, 256, size, np.uint8) for name, size in sizes.items()}


@pytest.fixture
def saved(tmp_path):
    store = ckptstore.open(str(tmp_path / "store"), create=True)
    with store.run("r") as run:
        run.save(1, {"m": state()}).result()
    return tmp_path / "store"


def latest(path):
    return ckptstore.open(str(path)).run("r").latest


def blank():
    return {name: np.zeros_like(array) for name, array in state().items()}


@pytest.fixture(params=["cold", "cached"])
def way(request, monkeypatch):
    pages = (0, 5) if request.param == "cold" else (5, 5)
    monkeypatch.setattr(_sys, "resident_pages", lambda fd, offset, nbytes: pages)
    return request.param


class Reads:
    """What is asked of local backends: (key, offset, address, bytes, thread)."""

    def __init__(self, monkeypatch):
        self.made = []
        real = LocalBackend.read_into

        def read_into(backend, key, offset, buffer):
            if key.startswith(("chunks/", "packs/")):
                address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
                self.made.append((key, offset, address, buffer.nbytes, threading.get_ident()))
            real(backend, key, offset, buffer)

        monkeypatch.setattr(LocalBackend, "read_into", read_into)


def test_each_byte_is_read_once_and_large_chunks_straight_into_their_tensors(saved, monkeypatch, way):
    checkpoint = latest(saved)
    _ = checkpoint.contents.layout, checkpoint.contents.locations
    target = blank()
    reads = Reads(monkeypatch)
    report = checkpoint.restore({"m": target})
    assert all(np.array_equal(target[name], array) for name, array in state().items())
    total = sum(array.nbytes for array in target.values())
    assert report.bytes_read == sum(nbytes for *_, nbytes, _ in reads.made) == total
    spans = sorted((key, offset, offset + nbytes) for key, offset, _, nbytes, _ in reads.made)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    places = {name: array.__array_interface__["data"][0] for name, array in target.items()}
    for name in "acfh":
        inside = [n for _, _, at, n, _ in reads.made if 0 <= at - places[name] < target[name].nbytes]
        assert sum(inside) == target[name].nbytes, name


def test_tensors_that_no_chunk_fits_into_are_filled_all_the_same(saved, way):
    """Strided, transposed and tied targets go through memory in between."""
    whole = state()
    wide = {name: np.zeros(2 * array.size, np.uint8) for name, array in whole.items()}
    target = {name: array[::2] for name, array in wide.items()}
    latest(saved).restore({"m": target})
    for name, array in whole.items():
        assert np.array_equal(target[name], array), name
        assert not wide[name][1::2].any(), name


@pytest.mark.parametrize("name", ["a", "b", "c", "d", "f", "g", "h"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_one_flipped_bit_is_found(saved, way, name, place):
    checkpoint = latest(saved)
    contents = checkpoint.contents
    rows = np.flatnonzero(contents.layout.chunks.tensor == contents.layout.by_name[f"m.{name}"])
    row = rows[0 if place == "first" else -1]
    where = contents.locations
    at = int(where.offset[row]) + (0 if place == "first" else int(where.length[row]) - 1)
    path = saved / contents.keys.key(int(where.object[row]))
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises((PartlyRestoredError, ChunkDamagedError), match=f"'m.{name}'"):
        checkpoint.restore({"m": blank()})


def test_several_threads_read_at_once(saved, monkeypatch):
    """Two reads wait for each other: one thread alone would wait for ever."""
    together = threading.Barrier(2, timeout=20)
    real = fetch.Fetcher._read
    first = itertools.count()

    def read(fetcher, *args):
        if next(first) < 2:
            together.wait()
        real(fetcher, *args)

    monkeypatch.setattr(fetch.Fetcher, "_read", read)
    latest(saved).restore({"m": blank()})


def test_memory_in_between_stays_in_its_budget(monkeypatch):
    monkeypatch.setattr(fetch, "SCRATCH_BYTES", 100)

    def buffers(lengths, threads):
        reads = [Read("k", 0, length, (), None) for length in lengths]
        scratch = Scratch(reads, threads)
        return [len(scratch._free.get()) for _ in range(scratch._free.qsize())]

    assert buffers([40, 10, 30], 4) == [40, 40]  # two of the longest, not four
    assert buffers([10], 4) == [10] * 4
    assert buffers([500, 3], 4) == [500]  # one chunk is always held whole
    straight = Read("k", 0, 10**12, (), np.empty(0, np.uint8))
    assert [len(array) for array in Scratch([straight], 4)._free.queue] == [0] * 4


def test_memory_in_between_comes_back_after_an_error():
    scratch = Scratch([Read("k", 0, 8, (), None)], 1)
    with pytest.raises(ValueError, match="made to"), scratch.take(8):
        raise ValueError("made to")
    with scratch.take(5) as memory:
        assert len(memory) == 5


def test_small_chunks_are_read_together_and_large_ones_apart(saved):
    contents = latest(saved).contents
    wants = []
    for name, array in blank().items():
        if array.size:
            wants.append(Want(contents.layout.by_name[f"m.{name}"], Box.whole(array.shape), array))
    together = plan(contents, wants)
    apart = plan(contents, wants, MIB)
    packed = [read for read in apart if read.key.startswith("packs/")]
    assert [read.target is not None for read in packed].count(True) >= 3
    assert all(len(read.pieces) == 1 for read in packed if read.target is not None)
    assert len(together) < len(apart)
    for reads in (together, apart):
        rows = [piece.uses[0].row for read in reads for piece in read.pieces]
        assert sorted(rows) == list(range(len(contents.digests)))
        assert [read for batch in batches(reads) for read in batch] == reads


def test_a_turn_ends_with_its_object_at_a_gap_and_when_it_is_long():
    def read(key, offset, length):
        return Read(key, offset, length, (), None)

    side_by_side = [read("k", 0, 10), read("k", 10, 10), read("k", 20 + MAX_GAP_BYTES, 10)]
    assert list(batches(side_by_side)) == [side_by_side]
    far = [read("k", 0, 10), read("k", 11 + MAX_GAP_BYTES, 10), read("l", 21 + MAX_GAP_BYTES, 10)]
    assert list(batches(far)) == [[one] for one in far]
    long = [read("k", 0, BATCH_BYTES), read("k", BATCH_BYTES, 10)]
    assert list(batches(long)) == [[one] for one in long]
    assert list(batches([])) == []
