"""How long a training waits at a save that goes on in the background, beside other libraries and floors.

    python -m benchmarks.blocked --gib 1.5 --repeats 3 --dir /data/scratch --json out.json --plot out.png

In each repeat every library is opened anew and saves twice: its *first* save, and a *warm* one, all bytes
changed in between; where it can be told ahead of the first save, it is opened once more for *after prepare*.
The clock is ours, around the call. Each save is waited for, and removed, before the next one.

"Tears": directly after `save` returned, every tensor is overwritten; yes when that shows in what is loaded.
Such a library needs the training to wait somewhere else: the time of `save` alone is not all that it costs.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import async_peers, command, disk, orbax, states
from benchmarks.async_peers import AsyncPeer
from benchmarks.command import GIB, say
from benchmarks.goals import Goal
from benchmarks.measure import timed
from benchmarks.report import OURS, Line, Report

FIRST, PREPARED, WARM = ROWS = ("first save", "after prepare", "warm save")
_MEMCPY_TIMES, _MEMCPY_PLUS_SECONDS = 1.3, 0.020
_FIRST_TIMES, _PREPARED_TIMES = 1.3, 2.0
_PART_BYTES = 16 << 20
_WARM_UP_GIB = 0.002
_SETTLE_SECONDS, _LOOK_SECONDS = 20.0, 0.2
_ORBAX = {"Orbax": "jax", "Orbax, numpy arrays": "numpy"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for; 1 when ckptstore itself failed."""
    parser = command.parser("blocked", __doc__, gib=1.5, repeats=3)
    keys = [*async_peers.CANDIDATES, "orbax"]
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="PEER", help=", ".join(keys))
    options = parser.parse_args(arguments)
    with command.scratch(options.dir, "blocked") as folder:
        report = _run(options, folder)
    report.goals = _goals(report)
    title = f"Seconds blocked, AdamW state of {report.state_bytes / GIB:.2f} GiB"
    command.publish(report, options, title, seconds=True)
    return 1 if OURS in report.skipped else 0


def _run(options: argparse.Namespace, folder: Path) -> Report:
    state = states.adamw_state(options.gib, options.seed)
    size = states.size_bytes(state)
    command.require_space(folder, 4 * size)
    candidates, skipped = async_peers.available([key for key in options.only if key != "orbax"])
    report = Report(
        environment=command.environment(folder),
        state_bytes=size,
        floor_bytes=size,
        skipped=skipped,
        rows=ROWS,
        mark_head="tears",
        pale="yes",
    )
    small = states.adamw_state(_WARM_UP_GIB)
    for peer in list(candidates):  # imports, and what does not work here at all
        report.attempt(candidates, peer, lambda peer: _samples(peer, small, folder / "peer"))
    for repeat in range(options.repeats):
        say(f"repeat {repeat + 1} of {options.repeats}: floors")
        _measure_floors(report, state, repeat)
        order = list(candidates)
        random.Random(options.seed + repeat).shuffle(order)
        for peer in order:
            say(f"repeat {repeat + 1} of {options.repeats}: {peer.name}")
            found = report.attempt(candidates, peer, lambda peer: _samples(peer, state, folder / "peer"))
            for row, seconds in found.items():
                report.add(row, peer.name, repeat, seconds)
        if "orbax" in options.only:
            _orbax(report, state, folder / "orbax", repeat)
    for peer in list(candidates):
        say(f"does it tear? {peer.name}")
        found = report.attempt(
            candidates, peer, lambda peer: {"": float(_tears(peer, state, folder / "peer"))}
        )
        report.marks |= {(row, peer.name): "yes" if found[""] else "no" for row in ROWS if found}
    return report


def _samples(peer: AsyncPeer, state: states.State, folder: Path) -> dict[str, float]:
    """Seconds blocked by row, of a library opened for each of them but the warm save."""
    seconds: dict[str, float] = {}
    with _Opened(peer, folder):
        for step, row in enumerate((FIRST, WARM)):
            seconds[row] = _blocked(peer, state, step)
    with _Opened(peer, folder):
        if peer.prepare(state):
            _let_settle()
            seconds[PREPARED] = _blocked(peer, state, 0)
    return seconds


def _blocked(peer: AsyncPeer, state: states.State, step: int) -> float:
    _change(state)
    os.sync()
    seconds = timed(lambda: peer.save(state, step))
    peer.finish()
    peer.forget(step)
    return seconds


def _let_settle() -> None:
    """Waits while this process works in the background, as it would beside the first steps of a training."""
    ends = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < ends:
        before = time.process_time()
        time.sleep(_LOOK_SECONDS)
        if time.process_time() - before < 0.05 * _LOOK_SECONDS:
            return


def _tears(peer: AsyncPeer, state: states.State, folder: Path) -> bool:
    """Whether what is written to the tensors after a warm save returned is in its checkpoint."""
    with _Opened(peer, folder):
        _blocked(peer, state, 0)
        _change(state)
        wanted = {name: tensor.clone() for name, tensor in states.tensors(state)}
        peer.save(state, 1)
        _change(state)
        peer.finish()
        target = states.blank_like(state)
        states.poison(target)
        peer.load(target, 1)
        return any(not torch.equal(tensor, wanted[name]) for name, tensor in states.tensors(target))


def _change(state: states.State) -> None:
    """Every element gets another value; the last tensors first: a copy in the background gets there last."""
    for _, tensor in reversed(list(states.tensors(state))):
        tensor.mul_(-1.001)


class _Opened:
    """A library opened on an empty folder; closed, and the folder removed, however it ends."""

    def __init__(self, peer: AsyncPeer, folder: Path) -> None:
        self._peer, self._folder = peer, folder

    def __enter__(self) -> None:
        disk.remove(self._folder)
        self._folder.mkdir(parents=True)
        self._peer.open(self._folder)

    def __exit__(self, *error: object) -> None:
        try:
            self._peer.close()
        finally:
            disk.remove(self._folder)
            gc.collect()


def _orbax(report: Report, state: states.State, folder: Path, repeat: int) -> None:
    """Two lines of Orbax: jax arrays cannot be written to, so nothing can tear them; numpy arrays can."""
    for name, kind in _ORBAX.items():
        if name in report.skipped:
            continue
        say(f"repeat {repeat + 1}: {name}")
        try:
            answer = orbax.ask("blocked", folder, shapes=orbax.shapes_of(state), kind=kind)
        except Exception as error:  # noqa: BLE001 - see _try
            report.drop(name, f"{type(error).__name__}: {error}")
            continue
        for row, key in ((FIRST, "first"), (WARM, "warm")):
            report.add(row, name, repeat, answer[key])
            report.marks[row, name] = "yes" if answer.get("tears") else "no"


def _measure_floors(report: Report, state: states.State, repeat: int) -> None:
    """Copies of as many bytes as the state has: into warm memory, and into memory never touched before."""
    source = np.frombuffer(mmap.mmap(-1, report.state_bytes), np.uint8)
    source[:] = 1
    target = np.frombuffer(mmap.mmap(-1, report.state_bytes), np.uint8)
    target[:] = 0
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        seconds = timed(partial(_copy, target, source, threads))
        for row in (WARM, PREPARED):
            report.add_floor(row, f"memcpy, warm, {_counted(threads)}", repeat, seconds)
        for advice, note in ((None, ""), (mmap.MADV_HUGEPAGE, ", huge pages")):
            fresh = mmap.mmap(-1, report.state_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if advice is not None:
                fresh.madvise(advice)
            untouched = np.frombuffer(fresh, np.uint8)
            seconds = timed(partial(_copy, untouched, source, threads))
            report.add_floor(FIRST, f"first touch + copy, {_counted(threads)}{note}", repeat, seconds)


def _counted(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def _copy(
    target: np.ndarray[tuple[int], np.dtype[np.uint8]],
    source: np.ndarray[tuple[int], np.dtype[np.uint8]],
    threads: int,
) -> None:
    if threads == 1:
        np.copyto(target, source)
        return
    with ThreadPoolExecutor(threads) as pool:
        parts = [slice(start, start + _PART_BYTES) for start in range(0, len(source), _PART_BYTES)]
        list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))


def _goals(report: Report) -> list[Goal]:
    goals: list[Goal] = []
    warm, first, prepared = (report.line(row, OURS) for row in (WARM, FIRST, PREPARED))
    memcpy, touch = report.best_floor(WARM), report.best_floor(FIRST)
    if warm is None:
        return goals
    if memcpy is not None:
        limit = _MEMCPY_TIMES * memcpy.seconds + _MEMCPY_PLUS_SECONDS
        aim = f"at most {_MEMCPY_TIMES} x warm memcpy + 20 ms = {limit:.3f} s"
        goals.append(Goal(WARM, aim, warm.seconds, limit, at_most=True))
    if first is not None and touch is not None:
        aim = f"at most {_FIRST_TIMES} x first touch + copy = {_FIRST_TIMES * touch.seconds:.3f} s"
        goals.append(Goal(FIRST, aim, first.seconds, _FIRST_TIMES * touch.seconds, at_most=True))
    if prepared is not None:
        aim = f"at most {_PREPARED_TIMES:g} x a warm save = {_PREPARED_TIMES * warm.seconds:.3f} s"
        goals.append(Goal(PREPARED, aim, prepared.seconds, _PREPARED_TIMES * warm.seconds, at_most=True))
    tuned = ("kept", "lock")
    for is_tuned, aim, limit in (
        (False, "every peer out of the box: at least 2 x ours", 2.0),
        (True, "tuned peers that do not tear: at least ours", 1.0),
    ):
        lines = [
            line
            for line in report.lines()
            if _is_rival(report, line) and any(word in line.name for word in tuned) == is_tuned
        ]
        nearest = min(lines, key=lambda line: line.times_ours or 0.0, default=None)
        if nearest is not None:
            figure = nearest.times_ours or 0.0
            goals.append(Goal(WARM, aim, figure, limit, at_most=False, note=nearest.name))
    return goals


def _is_rival(report: Report, line: Line) -> bool:
    is_peer = line.row == WARM and line.name != OURS and line.times_ours is not None
    return is_peer and line.mark != report.pale


if __name__ == "__main__":
    sys.exit(main())
