"""Capture memory: one budget, reused, nothing grows."""

from __future__ import annotations

import logging
import os
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import UsageError
from ckptstore.save.arena import MIN_BUDGET_BYTES, PAGE_BYTES, Arena, default_capture_bytes
from ckptstore.save.capture import Waves, capture
from ckptstore.save.free_memory import free_bytes, local_ranks
from ckptstore.save.pinned import Registration
from tests.capture.made import pieces_of

MIB = 1 << 20


def test_blocks_are_page_aligned_and_reused() -> None:
    arena = Arena(8 * MIB)
    first = arena.take(2)
    assert all(block.array.ctypes.data % PAGE_BYTES == 0 for block in first)
    arena.give_back(first)
    assert arena.take(2) == first
    assert arena.allocated_bytes == 2 * arena.block_bytes == arena.used_bytes


@pytest.mark.parametrize("budget", [MIN_BUDGET_BYTES, 3 * MIB, 10 * MIB + 1, 100 * MIB, 10 << 30])
def test_all_blocks_together_keep_to_the_budget(budget: int) -> None:
    arena = Arena(budget)
    assert 7 / 8 * budget < arena.total_blocks * arena.block_bytes <= budget
    assert arena.block_bytes % PAGE_BYTES == 0


def test_a_budget_below_the_least_is_refused() -> None:
    with pytest.raises(UsageError, match="capture_bytes=1000 is too little"):
        Arena(1000)


def test_who_asks_for_more_than_is_free_waits_for_it() -> None:
    arena = Arena(8 * MIB)
    held = arena.take(arena.total_blocks)
    assert not arena.has_room(1)
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(len(arena.take(3))))
    waiter.start()
    arena.give_back(held[:2])
    assert not got
    arena.give_back(held[2:3])
    waiter.join(10)
    assert got == [3]


def test_who_waits_for_an_abandoned_save_gets_nothing() -> None:
    arena = Arena(8 * MIB)
    held = arena.take(arena.total_blocks)
    waves = Waves(arena)
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(arena.take(1, lambda: waves.abandoned)))
    waiter.start()
    waves.abandon()
    waiter.join(10)
    assert got == [[]]
    arena.give_back(held)
    assert arena.used_bytes == 0


def test_a_chunk_larger_than_a_block_and_than_the_budget_fits_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena = Arena(MIN_BUDGET_BYTES)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        arena.fit(arena.block_bytes + 1)
        assert not caplog.messages
        arena.fit(3 * MIB)
    assert caplog.messages == [
        f"capture_bytes={MIN_BUDGET_BYTES} does not hold one chunk: {3 * MIB} bytes are used"
    ]
    assert (arena.total_blocks, arena.block_bytes, arena.budget_bytes) == (1, 3 * MIB, 3 * MIB)


def test_larger_blocks_wait_for_the_smaller_ones_to_come_back() -> None:
    arena = Arena(8 * MIB)
    held = arena.take(1)
    resized = threading.Thread(target=arena.fit, args=(2 * MIB,))
    resized.start()
    arena.give_back(held)
    resized.join(10)
    assert arena.block_bytes == 2 * MIB
    assert arena.allocated_bytes == 0


def test_prepare_touches_what_the_captures_need_and_no_more() -> None:
    arena = Arena(80 * MIB)
    block = arena.block_bytes
    arena.prepare(block + PAGE_BYTES, 2, pin=False)
    taken = arena.take(arena.total_blocks)
    assert [each.touched_bytes for each in taken[:5]] == [block, PAGE_BYTES, block, PAGE_BYTES, 0]
    arena.give_back(taken)
    arena.prepare(1000 * MIB, 2, pin=False)  # as far as the budget goes
    assert arena.allocated_bytes <= 80 * MIB


def test_prepare_leaves_blocks_in_use_alone() -> None:
    arena = Arena(8 * MIB)
    (held,) = arena.take(1)
    held.array[:] = 7
    arena.prepare(8 * MIB, 1, pin=False)
    assert (held.array == 7).all()
    assert arena.used_bytes == arena.block_bytes


def test_release_keeps_what_is_in_use() -> None:
    arena = Arena(8 * MIB)
    held = arena.take(3)
    arena.give_back(held[:2])
    arena.release()
    assert arena.allocated_bytes == arena.block_bytes
    arena.give_back(held[2:])
    arena.release()
    assert arena.allocated_bytes == 0


def _save(arena: Arena, state: dict[str, Any]) -> None:
    waves = Waves(arena)
    capture(pieces_of(state), arena, waves)
    for _ in waves:
        pass


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell resident memory")
def test_200_saves_of_changing_size_take_no_more_memory_than_the_first_ones() -> None:
    arena = Arena(32 * MIB)
    states = [
        {"m": {"w": np.ones(size, np.uint8), **{f"b{i}": np.ones(100, np.uint8) for i in range(20)}}}
        for size in (6 * MIB, 5 * MIB + 12345, 100, 6 * MIB - 1)
    ]

    for number in range(8):
        _save(arena, states[number % 4])
    allocated, resident = arena.allocated_bytes, _resident_pages()
    for number in range(200):
        _save(arena, states[number % 4])
    assert arena.allocated_bytes == allocated <= 8 * MIB
    assert arena.used_bytes == 0
    assert (_resident_pages() - resident) * PAGE_BYTES < 2 * MIB


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.skipif(
    not hasattr(resource, "RUSAGE_THREAD"), reason="the system does not count a thread's faults"
)
@pytest.mark.parametrize("prepared", [False, True], ids=["second capture", "first one after prepare"])
def test_memory_is_touched_for_the_first_time_only_once(prepared: bool) -> None:
    state = {"m": {f"w{i}": np.ones(4 * MIB, np.uint8) for i in range(4)}}
    arena = Arena(1 << 30)
    if prepared:
        arena.prepare(16 * MIB, 1, pin=False)
    else:
        _save(arena, state)
    before = _faults()
    _save(arena, state)
    assert _faults() - before < 16 * MIB // PAGE_BYTES // 16


# --- how much there is ----------------------------------------------------------------------------


def _host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 100 kB\nMemAvailable:   1000000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": MEMINFO}, 1000000 << 10),
        ({}, 4 << 30),
        (
            {  # v2: page cache counts as free, "max" as no limit, and a parent may be tighter
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/jobs/one\n",
                "sys/fs/cgroup/jobs/one/memory.max": "max\n",
                "sys/fs/cgroup/jobs/one/memory.current": "10\n",
                "sys/fs/cgroup/jobs/memory.max": "10000\n",
                "sys/fs/cgroup/jobs/memory.current": "6000\n",
                "sys/fs/cgroup/jobs/memory.stat": "anon 1\ninactive_file 1500\n",
            },
            5500,
        ),
        (
            {  # inside a container, where only the mount itself is there
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/host/path\n",
                "sys/fs/cgroup/memory.max": "9000\n",
                "sys/fs/cgroup/memory.current": "9500\n",
            },
            0,
        ),
        (
            {  # v1
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:cpu,cpuacct:/\n3:memory:/job\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "7000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "2000\n",
                "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 500\n",
            },
            5500,
        ),
    ],
    ids=["host", "unknown", "v2", "container", "v1"],
)
def test_free_memory_is_the_hosts_or_what_the_cgroup_leaves(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert free_bytes(_host(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "8(x2),3"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": ""}, 1),
    ],
)
def test_local_ranks_come_from_the_launcher(environ: dict[str, str], expected: int) -> None:
    assert local_ranks(environ) == expected


def test_the_default_is_divided_among_the_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.save.free_memory.free_bytes", lambda: 100 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_capture_bytes() == 10 << 30
    assert default_capture_bytes(1) == 40 << 30
    assert default_capture_bytes(100000) == 64 * MIB


# --- locking for CUDA -----------------------------------------------------------------------------


class FakeCudart:
    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


def test_locked_memory_is_unlocked_once() -> None:
    cudart = FakeCudart()
    array = np.zeros(PAGE_BYTES, np.uint8)
    registration = Registration(array, cudart)
    assert registration.locked
    registration.close()
    registration.close()
    address = array.ctypes.data
    assert cudart.calls == [("register", address, PAGE_BYTES, 1), ("unregister", address)]


def test_forgotten_memory_is_unlocked_too() -> None:
    cudart = FakeCudart()
    registration = Registration(np.zeros(PAGE_BYTES, np.uint8), cudart)
    del registration
    assert cudart.calls[-1][0] == "unregister"


def test_a_forked_child_does_not_unlock(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    registration = Registration(np.zeros(PAGE_BYTES, np.uint8), cudart)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    registration.close()
    assert len(cudart.calls) == 1


def test_a_system_that_refuses_to_lock_is_said_and_slower(caplog: pytest.LogCaptureFixture) -> None:
    registration = Registration(np.zeros(PAGE_BYTES, np.uint8), FakeCudart(error=801))
    registration.close()
    assert not registration.locked
    assert caplog.messages == [
        "memory for captures could not be locked (CUDA error 801): copies from the device are slower"
    ]
