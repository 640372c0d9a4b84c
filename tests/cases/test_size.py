"""Big and many: limits of 32 bits, memory, numbers of files."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import UsageError
from ckptstore.model.ids import ObjectName, check_step, chunk_key, digest_of
from ckptstore.testing import FaultBackend
from ckptstore_local import LocalBackend
from tests.crash._support import store_over

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def run_limited(code: str, *arguments: object, mebibytes: int) -> str:
    """Runs `code` with at most so much address space."""
    program = f"""
        import os, resource, sys
        import numpy as np, ckptstore, ckptstore_local
        resource.setrlimit(resource.RLIMIT_AS, ({mebibytes} << 20, {mebibytes} << 20))
    """
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            textwrap.dedent(program) + textwrap.dedent(code),
            *map(str, arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_c211_a_tensor_of_5_gib_saves_and_reads_beyond_every_32_bit_limit(tmp_path):
    """Its pages are zero but for some marks, so that it needs little memory and disk."""
    big = np.zeros((5 * 1024, 1 << 20), np.uint8)
    marks = {0: 1, 2047: 2, 2048: 3, 4095: 4, 4096: 5, 5119: 6}
    for row, value in marks.items():
        big[row, row] = value
    with ckptstore.init(tmp_path / "store") as store:
        run = store.run("big")
        saved = run.save(1, {"model": {"big": big}}).result()
        assert saved.nbytes == 5 * GIB
        assert run.latest.tensors["model.big"].shape == big.shape
        assert saved.record.new_bytes < 256 << 20, "equal chunks are stored once"
        stored = store.run("big").latest.tensors["model.big"]
        for row, value in marks.items():
            got = stored[row]
            assert got[row] == value
            assert int(got.sum()) == value
        assert not stored[2049:2051].any()


def test_c211_no_length_of_the_format_is_below_64_bit():
    from ckptstore.model.dtypes import BY_NAME
    from ckptstore.model.layout import Layout, Tensor
    from ckptstore.model.tables import KeyList, Locations

    shape = (3 << 40, 7)
    tensor = Tensor("w", "model", BY_NAME["uint8"], shape, "numpy", ())
    assert Layout.decode(Layout((tensor,), (), 1 << 20).encode()).tensors[0].shape == shape
    key = chunk_key(digest_of(b"x"), "0" * 26 + "-1-1", 0)
    keys = KeyList.decode(KeyList.of({key: 5 << 40}).encode())
    assert keys.sizes.tolist() == [5 << 40]
    place = Locations(*(np.array([n]) for n in (0, 3 << 40, 1 << 40)), np.zeros(1, np.uint8))
    back = Locations.decode(place.encode(), np.array([1 << 40]), keys)
    assert back.offset.tolist() == [3 << 40]


def test_c211_bytes_and_text_above_the_limit_of_the_tree_are_cut_into_chunks(tmp_path):
    with ckptstore.init(tmp_path / "store", chunk_bytes=1 << 20) as store:
        state = {"values": {"raw": os.urandom(5 << 20), "text": "ä" * (2 << 20), "array": bytearray(3 << 20)}}
        saved = store.run("r").save(1, state).result()
        assert saved.load() == state
        assert {type(value) for value in saved.load()["values"].values()} == {bytes, str, bytearray}
        assert max(path.stat().st_size for path in files_in(tmp_path / "store" / "chunks")) <= 1 << 20


@pytest.mark.parametrize("size", [4 << 30, 128 << 20, (16 << 20) + 1, 0, -1, 512, 1.5e6, True, "16MiB"])
def test_c212_a_chunk_size_that_cannot_be_is_refused_before_anything_is_made(tmp_path, size):
    with pytest.raises(UsageError, match="chunk_bytes"):
        ckptstore.init(tmp_path / "store", chunk_bytes=size)
    assert not files_in(tmp_path)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32])
def test_c212_tensors_at_the_limits_of_32_bits_are_cut_like_any_other(size):
    from ckptstore.model.boxes import Box
    from ckptstore.model.dtypes import BY_NAME
    from ckptstore.model.layout import Layout, Tensor

    tensor = Tensor("w", "model", BY_NAME["uint8"], (size,), "numpy", (Box.whole((size,)),))
    chunks = Layout((tensor,), (), 16 << 20).chunks
    assert int(chunks.nbytes.sum()) == size
    assert int(chunks.nbytes.max()) == 16 << 20


def test_c214_a_rank_reads_its_own_part_and_little_more(tmp_path):
    """Eight ranks that each take an eighth read the whole once between them, not eight times."""
    directory = tmp_path / "store"
    big = np.random.default_rng(1).integers(0, 255, (64, 1 << 18), dtype=np.uint8)
    with ckptstore.init(directory, chunk_bytes=1 << 20) as store:
        store.run("r").save(1, {"model": {"w": big}}).result()
    read = 0
    for rank in range(8):
        counting = FaultBackend(LocalBackend(directory))
        store = store_over(counting)
        sizes: list[int] = []
        original = counting.read_into
        counting.read_into = lambda key, offset, buffer, o=original, s=sizes: (
            s.append(buffer.nbytes), o(key, offset, buffer),
        )[1]  # fmt: skip
        part = store.run("r").latest.tensors["model.w"][8 * rank : 8 * rank + 8]
        assert part.tobytes() == big[8 * rank : 8 * rank + 8].tobytes()
        assert sum(sizes) <= big.nbytes // 8 + (1 << 20)
        read += sum(sizes)
        store.close()
    assert read <= 1.1 * big.nbytes


@pytest.fixture(scope="module")
def big_store(tmp_path_factory):
    """2 GiB of weights, most of them zero."""
    directory = tmp_path_factory.mktemp("big") / "store"
    with ckptstore.init(directory) as store:
        weights = {f"w{i}": np.zeros((256, 1 << 20), np.uint8) for i in range(8)}
        weights["small"] = np.arange(1000)
        weights["w7"][100, 5] = 9
        store.run("r").save(1, {"model": weights}).result()
    return directory


def test_c216_parts_of_a_checkpoint_larger_than_the_memory_are_read(big_store):
    told = run_limited(
        """
        with ckptstore.open(sys.argv[1]) as store:
            checkpoint = store.run("r").latest
            assert checkpoint.nbytes > 2 << 30
            tensors = checkpoint.tensors
            print(tensors["model.small"][3:5].tolist(), tensors["model.w7"][100, 0:9].tolist())
            print(checkpoint.load("model.small")["model"]["small"].sum())
            print(len(store.verify().problems))
        """,
        big_store,
        mebibytes=1400,
    )
    assert told.split("\n")[:3] == ["[3, 4] [0, 0, 0, 0, 0, 9, 0, 0, 0]", "499500", "0"]


def test_c216_loading_more_than_fits_says_so_and_leaves_the_store_usable(big_store):
    told = run_limited(
        """
        with ckptstore.open(sys.argv[1]) as store:
            try:
                store.run("r").latest.load()
            except MemoryError:
                print("told")
            print(store.run("r").latest.tensors["model.small"][7])
        """,
        big_store,
        mebibytes=1400,
    )
    assert told.split() == ["told", "7"]


def test_c217_100k_tensors_of_4_bytes_make_few_files(tmp_path):
    directory = tmp_path / "store"
    state = {"model": {f"t{i}": np.array([i], np.int32) for i in range(100_000)}}
    with ckptstore.init(directory) as store:
        run = store.run("tiny")
        saved = run.save(1, state).result()
        assert len(files_in(directory)) < 20
        assert saved.tensors["model.t70001"][0] == 70001
        loaded = saved.load()["model"]
        assert len(loaded) == 100_000
        assert all(int(loaded[f"t{i}"][0]) == i for i in range(0, 100_000, 997))


def test_2000_tiny_tensors_round_trip_in_few_files(tmp_path):
    directory = tmp_path / "store"
    random = np.random.default_rng(3)
    state = {"model": {f"layer.{i}": random.standard_normal(i % 7) for i in range(2000)}}
    with ckptstore.init(directory) as store:
        run = store.run("tiny")
        loaded = run.save(1, state).result().load()
        before = len(files_in(directory))
        assert before < 20
        run.save(2, state).result()
        assert len(files_in(directory)) <= before + 2, "an unchanged state adds its record"
    for name, array in state["model"].items():
        assert loaded["model"][name].tobytes() == array.tobytes()
        assert loaded["model"][name].shape == array.shape


def test_g11_keys_carry_the_whole_hash_and_the_same_folder_is_no_collision(tmp_path):
    attempt = "0" * 26 + "-1-1"
    first = digest_of(b"0")
    twin = bytes([*first[:31], first[31] ^ 1])
    assert chunk_key(first, attempt, 0) != chunk_key(twin, attempt, 0)
    assert ObjectName.parse(chunk_key(first, attempt, 0)).digest == first
    with pytest.raises(ValueError, match="not an object key"):
        ObjectName.parse(f"chunks/00/{first.hex()[:63]}.{attempt}.0")
    # Contents of one length whose hashes begin alike, so that they share a fan-out folder.
    found: dict[str, list[int]] = {}
    for number in range(2000):
        found.setdefault(digest_of(np.full(1024, number, np.int64).tobytes()).hex()[:2], []).append(number)
    numbers = max(found.values(), key=len)
    assert len(numbers) > 4
    state = {"model": {str(n): np.full(1024, n, np.int64) for n in numbers}}
    with ckptstore.init(tmp_path / "store", chunk_bytes=1 << 13) as store:
        loaded = store.run("r").save(1, state).result().load()
        assert len(list((tmp_path / "store" / "chunks").glob("*/*"))) == len(numbers)
    assert all((loaded["model"][str(n)] == n).all() for n in numbers)


def test_g12_steps_are_ints_of_64_bits_and_nothing_else(tmp_path):
    for good in (0, -5, 2**63 - 1, -(2**63), np.int64(7), np.uint8(3)):
        assert check_step(good) == int(good)
        assert type(check_step(good)) is int
    with ckptstore.init(tmp_path / "store") as store:
        run = store.run("r")
        for bad in (10.0, True, np.float32(3), "10", None, 2**63, -(2**63) - 1, np.bool_(True)):
            with pytest.raises(UsageError, match="step"):
                run.save(bad, {"a": np.ones(1)}).result()
        assert not run.exists, "a refused save touched the store"
        for step in (-5, 2**63 - 1, 3):
            run.save(step, {"a": np.ones(1)}).result()
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [-5, 2**63 - 1, 3]
        assert run.latest.step == 3, "the last saved, not the largest"
        assert run[-5].step == -5
        assert run[np.int64(3)].step == 3


def test_metadata_above_its_limit_is_refused_before_anything_is_written(tmp_path):
    with ckptstore.init(tmp_path / "store") as store:
        run = store.run("r")
        with pytest.raises(UsageError, match="metadata"):
            run.save(1, {"a": np.ones(1)}, metadata={"log": "x" * (5 << 20)}).result()
        assert not run.exists
