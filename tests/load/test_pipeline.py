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
from ckptstore.load.plan import STRAIGHT_BYTES, Read, Want, joined, plan
from ckptstore.load.spans import Memory, Span
from ckptstore.model.boxes import Box
from ckptstore_local import LocalBackend, _sys
from ckptstore_memory import MemoryBackend

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
        real = LocalBackend.read_parts

        def read_parts(backend, key, offset, buffers):
            at = offset
            for buffer in buffers if key.startswith(("chunks/", "packs/")) else ():
                address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
                self.made.append((key, at, address, buffer.nbytes, threading.get_ident()))
                at += buffer.nbytes
            real(backend, key, offset, buffers)

        monkeypatch.setattr(LocalBackend, "read_parts", read_parts)


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


@pytest.mark.parametrize("names", ["f", "d", "bfh"])
def test_damaged_chunks_of_a_pack_come_from_the_next_tier_to_their_places(tmp_path, names):
    file = tmp_path / "ckptstore.toml"
    tiers = "".join(f'[[tiers]]\nname = "{name}"\nurl = "{tmp_path / name}"\n' for name in ("hot", "cold"))
    file.write_text(tiers)
    with ckptstore.open(str(file), create=True) as store:
        with store.run("r") as run:
            run.save(1, {"m": state()}).result()
        store.replication.run([store.tier_named("cold")])
        checkpoint = store.run("r").latest
        contents = checkpoint.contents
        for name in names:
            (row,) = np.flatnonzero(contents.layout.chunks.tensor == contents.layout.by_name[f"m.{name}"])
            key = contents.keys.key(int(contents.locations.object[row]))
            assert key.startswith("packs/")
            with (tmp_path / "hot" / key).open("r+b") as pack:
                pack.seek(int(contents.locations.offset[row]))
                pack.write(bytes([state()[name][0] ^ 1]))
        target = blank()
        report = checkpoint.restore({"m": target})
    assert all(np.array_equal(target[name], array) for name, array in state().items())
    assert report.rescued_chunks == len(names)


def test_several_threads_read_at_once(saved, monkeypatch):
    """Two reads wait for each other: one thread alone would wait for ever."""
    together = threading.Barrier(2, timeout=20)
    real = fetch.Fetcher._carry_out
    first = itertools.count()

    def carry_out(fetcher, read):
        if next(first) < 2:
            together.wait()
        real(fetcher, read)

    monkeypatch.setattr(fetch.Fetcher, "_carry_out", carry_out)
    latest(saved).restore({"m": blank()})


def test_memory_in_between_stays_in_its_budget(monkeypatch):
    monkeypatch.setattr(fetch, "SCRATCH_BYTES", 100)

    def buffers(lengths, threads):
        reads = [Read("k", 0, length, (), ()) for length in lengths]
        scratch = Scratch(reads, threads)
        return [len(scratch._free.get()) for _ in range(scratch._free.qsize())]

    assert buffers([40, 10, 30], 4) == [40, 40]  # two of the longest, not four
    assert buffers([10], 4) == [10] * 4
    assert buffers([500, 3], 4) == [500]  # one chunk is always held whole
    target = np.empty(1000, np.uint8)
    straight, mixed = Read("k", 0, 1000, (), (target,)), Read("k", 0, 1007, (), (None, target))
    assert [len(array) for array in Scratch([straight], 4)._free.queue] == [0] * 4
    assert [len(array) for array in Scratch([straight, mixed], 4)._free.queue] == [7] * 4


def test_memory_in_between_comes_back_after_an_error():
    scratch = Scratch([Read("k", 0, 8, (), ())], 1)
    with pytest.raises(ValueError, match="made to"), scratch.take(8):
        raise ValueError("made to")
    with scratch.take(5) as memory:
        assert len(memory) == 5


def wants_of(contents):
    for name, array in blank().items():
        if array.size:
            yield Want(contents.layout.by_name[f"m.{name}"], Box.whole(array.shape), array)


@pytest.mark.parametrize("run_bytes", [1, 4 * MIB, 1 << 40])
def test_neighbours_are_read_together_up_to_a_limit(saved, run_bytes):
    contents = latest(saved).contents
    reads = plan(contents, list(wants_of(contents)), run_bytes)
    rows = [piece.uses[0].row for read in reads for piece in read.pieces]
    assert sorted(rows) == list(range(len(contents.digests)))
    assert all(len(read.pieces) == 1 or read.length <= run_bytes for read in reads)
    if run_bytes == 1:
        assert len(reads) == len(rows)
    if run_bytes == 1 << 40:
        assert len(reads) == len({read.key for read in reads})


def test_of_what_is_read_together_the_large_go_straight_and_the_small_are_copied(saved):
    contents = latest(saved).contents
    (pack,) = [read for read in plan(contents, list(wants_of(contents))) if read.key.startswith("packs/")]
    assert len(pack.pieces) > 3
    for piece, target in zip(pack.pieces, pack.targets, strict=True):
        assert (target is not None) == (piece.length >= STRAIGHT_BYTES)
        assert target is None or target.nbytes == piece.length
    small = sum(piece.length for piece in pack.pieces if piece.length < STRAIGHT_BYTES)
    assert 0 < small == pack.loose_bytes
    # Alone, even a small one is read to where it goes.
    (small_one,) = [piece for piece in pack.pieces if piece.length == 1001]
    assert joined("k", [small_one]).loose_bytes == 0


class Told(MemoryBackend):
    """Notes in how many buffers it is read."""

    def __init__(self):
        super().__init__("memory://told")
        self.lengths = []

    def read_into(self, key, offset, buffer):
        self.lengths.append([buffer.nbytes])
        super().read_into(key, offset, buffer)

    def read_parts(self, key, offset, buffers):
        self.lengths.append([buffer.nbytes for buffer in buffers])
        for buffer in buffers:
            super().read_into(key, offset, buffer)
            offset += buffer.nbytes


@pytest.mark.parametrize("straight", [(), (0,), (3,), (0, 3), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize(("first", "last"), [(0, 3), (1, 2), (2, 3), (1, 1), (0, 1)])
def test_chunks_come_to_their_places_and_what_lies_between_them_does_not(straight, first, last):
    content = np.random.default_rng(0).integers(0, 256, 500, np.uint8).tobytes()
    starts, lengths = [0, 10, 60, 61], [10, 30, 1, 9]  # one gap: 40 to 60
    span = Span("k", 7, [5, 6, 7, 8], starts, lengths)
    targets = [memoryview(bytearray(lengths[n])) if n in straight else None for n in range(4)]
    loose = memoryview(bytearray(span.nbytes - sum(lengths[n] for n in straight)))
    memory = Memory(span, loose, targets)
    backend = Told()
    backend.create_root()
    backend.put("k", [content])
    read = memory.read(backend, "k", 7 + starts[first], first, last)
    assert read == starts[last] + lengths[last] - starts[first]
    for number in range(4):
        there = content[7 + starts[number] :][: lengths[number]]
        assert memory.chunk(number) == (there if first <= number <= last else bytes(lengths[number]))
        assert targets[number] is None or memory.chunk(number) is targets[number]
    (buffers,) = backend.lengths
    assert sum(buffers) == read
    inside = [n for n in straight if first <= n <= last]
    assert len(inside) <= len(buffers) <= 2 * len(inside) + 1
