"""Save and load beside other libraries and beside the floors, on one state, in one run.

    python -m benchmarks.save_load --gib 1.5 --repeats 3 --dir /data/scratch --json out.json --plot out.png

Repeats are interleaved: each one measures every floor and every peer once, the peers in another order, so
that a slow minute of the machine meets all of them. Disk use stays below three times the state.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import command, peers, states
from benchmarks.command import GIB, say
from benchmarks.floors import Floors
from benchmarks.goals import Goal
from benchmarks.measure import ROWS, sample
from benchmarks.report import OURS, Line, Report

_WARM_UP_GIB = 0.002
_OF_FLOOR = 0.85
_UNCHECKED = ("safetensors", "torch.load(mmap=True)")
"""Bare mmap loaders that check nothing: a line to read, not a target."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for; 1 when ckptstore itself failed."""
    options = _parser().parse_args(arguments)
    with command.scratch(options.dir, "save-load") as folder:
        report = _run(options, folder)
    report.goals = _goals(report)
    command.publish(report, options, f"AdamW state of {report.state_bytes / GIB:.2f} GiB")
    return 1 if any(name.startswith(OURS) for name in report.skipped) else 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("save_load", __doc__, gib=1.5, repeats=3)
    parser.add_argument("--no-floors", action="store_true", help="leave the floors out")
    keys = [candidate.key for candidate in peers.CANDIDATES]
    parser.add_argument("--only", nargs="+", choices=keys, default=[], metavar="PEER", help=", ".join(keys))
    return parser


def _run(options: argparse.Namespace, folder: Path) -> Report:
    state = states.adamw_state(options.gib, options.seed)
    target = states.blank_like(state)
    size = states.size_bytes(state)
    command.require_space(folder, 3 * size)
    floors = None if options.no_floors else Floors(folder / "floors", size)
    candidates, skipped = peers.available(options.only)
    report = Report(
        environment=command.environment(folder),
        state_bytes=size,
        floor_bytes=floors.size_bytes if floors else 0,
        skipped=skipped,
        marks={(ROWS[0], peer.name): "yes" if peer.durable else "no" for peer in candidates},
    )
    say(f"{len(list(states.tensors(state)))} tensors, {size / GIB:.2f} GiB, {len(candidates)} peers")
    if not report.environment["caches_dropped"]:
        say("no right to drop the system's caches: cold means that the files themselves were dropped")

    small = states.adamw_state(_WARM_UP_GIB)
    warm_up = partial(sample, state=small, target=states.blank_like(small), path=folder / "peer")
    for peer in list(candidates):  # imports, thread pools, what does not work here at all
        report.attempt(candidates, peer, warm_up)
    measured = partial(sample, state=state, target=target, path=folder / "peer")
    for repeat in range(options.repeats):
        if floors:
            say(f"repeat {repeat + 1} of {options.repeats}: floors")
            _measure_floors(report, floors, repeat)
        order = list(candidates)
        random.Random(options.seed + repeat).shuffle(order)
        for peer in order:
            say(f"repeat {repeat + 1} of {options.repeats}: {peer.name}")
            for row, seconds in report.attempt(candidates, peer, measured).items():
                report.add(row, peer.name, repeat, seconds)
    return report


def _measure_floors(report: Report, floors: Floors, repeat: int) -> None:
    try:
        for floor in floors.all():
            if floor.name not in report.skipped:
                try:
                    report.add_floor(floor.row, floor.name, repeat, floor.measure())
                except OSError as error:  # a file system without O_DIRECT
                    report.skipped[floor.name] = str(error)
    finally:
        floors.close()


def _goals(report: Report) -> list[Goal]:
    goals: list[Goal] = []
    for row in ROWS:
        for line in report.lines():
            if line.row == row and line.name.startswith(OURS) and line.of_floor is not None:
                aim = f"at least {_OF_FLOOR} of the floor"
                goals.append(Goal(f"{row}: {line.name}", aim, line.of_floor, _OF_FLOOR, at_most=False))
        nearest = min(_held_against(report, row), key=lambda line: line.times_ours or 0.0, default=None)
        if nearest is not None and nearest.times_ours is not None:
            aim = "faster than every durable peer" if row == ROWS[0] else "faster than every checked loader"
            goals.append(
                Goal(f"{row}: {OURS}", aim, nearest.times_ours, 1.0, at_most=False, note=nearest.name)
            )
    return goals


def _held_against(report: Report, row: str) -> list[Line]:
    """The peers that the aim of this row names: durable ones for a save, no bare mmap for a load."""
    return [
        line
        for line in report.lines()
        if line.row == row
        and not line.name.startswith(OURS)
        and line.times_ours is not None
        and line.mark != report.pale
        and line.name not in _UNCHECKED
    ]


if __name__ == "__main__":
    sys.exit(main())
