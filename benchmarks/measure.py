"""One sample of one peer or floor: what is inside the clock and what is not."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import disk
from benchmarks.peers import Orbax, Peer
from benchmarks.states import State, differences, flat, poison, size_bytes

ROWS = ("save", "load cold", "load warm")
_LEAST_WRITTEN = 0.99  # of the state's bytes; the state is random, so nothing shrinks it honestly


class WrongAnswer(Exception):
    """A peer did not write the state, or gave back other bytes."""


def sample(peer: Peer | Orbax, state: State, target: State, path: Path) -> dict[str, float]:
    """Seconds for each row of `peer`, from one save into a fresh folder and its loads.

    Outside the clock: `prepare`, flushing what came before, dropping or filling the page cache, poisoning the
    target and comparing it afterwards. The folder is gone when this returns or raises.
    """
    seconds: dict[str, float] = {}
    disk.remove(path)
    if isinstance(peer, Orbax):
        return peer.sample(state, path)
    try:
        peer.prepare(state, path)
        before = disk.allocated_bytes(path)
        os.sync()
        spent = timed(lambda: peer.save(state, path))
        written = disk.allocated_bytes(path) - before
        if written < _LEAST_WRITTEN * size_bytes(state):
            raise WrongAnswer(f"{peer.name} wrote {written} of {size_bytes(state)} bytes")
        if "save" in peer.rows:
            seconds["save"] = spent
        if "load" in peer.rows:
            seconds["load cold"] = _load(peer, state, target, path, disk.forget)
            seconds["load warm"] = _load(peer, state, target, path, disk.warm)
    finally:
        disk.remove(path)
    return seconds


def _load(peer: Peer, state: State, target: State, path: Path, ready: Callable[[Path], object]) -> float:
    held = flat(target)  # the tensors that exist: they are to be filled, not replaced
    poison(target)
    ready(path)
    seconds = timed(lambda: peer.load(target, path))
    wrong = differences(flat(state), held)
    if wrong:
        raise WrongAnswer(f"{peer.name} gave back other bytes in {len(wrong)} tensors, first {wrong[0]}")
    return seconds


def thread_clock(native_id: int) -> int:
    """The clock of a thread's own CPU time, for `time.clock_gettime`; as clock_getcpuclockid(3) makes it.

    Reading it raises OSError once the thread has ended.
    """
    return (~native_id << 3) | 6


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work()`, the garbage of what came before collected first."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
