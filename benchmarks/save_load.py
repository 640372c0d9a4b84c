"""Save and load beside other libraries and beside the floors, on one state, in one run.

    python -m benchmarks.save_load --gib 1.5 --repeats 5 --dir /data/scratch --json out.json --plot out.png

Repeats are interleaved: each one measures every floor and every peer once, the peers in another order, so
that a slow minute of the machine meets all of them. Disk use stays below three times the state.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import disk, peers, plot, states
from benchmarks.floors import Floors
from benchmarks.measure import sample
from benchmarks.report import OURS, Report

_GIB = 1 << 30
_WARM_UP_GIB = 0.002
_LIBRARIES = ("ckptstore", "torch", "safetensors", "torchsnapshot", "blake3", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for; 1 when ckptstore itself failed."""
    options = _parser().parse_args(arguments)
    # DCP says at every call that there is one process only: that is how it is used here.
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="save-load-", dir=options.dir) as folder:
        report = _run(options, Path(folder))
    print(report.table())
    if options.json:
        report.write_json(options.json)
    if options.plot:
        _draw(report, options.plot)
    return 1 if any(name.startswith(OURS) for name in report.skipped) else 0


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save_load", description=summary)
    parser.add_argument("--gib", type=float, default=1.5, help="least size of the AdamW state (default 1.5)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats (default 5)")
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the disk to measure (default .)")
    parser.add_argument("--json", type=Path, help="write every figure and sample here")
    parser.add_argument("--plot", type=Path, help="write a plot here (needs matplotlib)")
    parser.add_argument("--seed", type=int, default=0, help="of the state and of the order of the peers")
    parser.add_argument("--no-floors", action="store_true", help="leave the floors out")
    keys = [candidate.key for candidate in peers.CANDIDATES]
    parser.add_argument("--only", nargs="+", choices=keys, default=[], metavar="PEER", help=", ".join(keys))
    return parser


def _run(options: argparse.Namespace, folder: Path) -> Report:
    state = states.adamw_state(options.gib, options.seed)
    target = states.blank_like(state)
    size = states.size_bytes(state)
    _require_space(folder, 3 * size)
    floors = None if options.no_floors else Floors(folder / "floors", size)
    candidates, skipped = peers.available(options.only)
    report = Report(
        environment=_environment(folder),
        state_bytes=size,
        floor_bytes=floors.size_bytes if floors else 0,
        skipped=skipped,
        durable={peer.name: peer.durable for peer in candidates},
    )
    _say(f"{len(list(states.tensors(state)))} tensors, {size / _GIB:.2f} GiB, {len(candidates)} peers")
    if not report.environment["caches_dropped"]:
        _say("no right to drop the system's caches: cold means that the files themselves were dropped")

    small = states.adamw_state(_WARM_UP_GIB)
    warm_up = partial(sample, state=small, target=states.blank_like(small), path=folder / "peer")
    for peer in list(candidates):  # imports, thread pools, what does not work here at all
        _try(report, candidates, peer, warm_up)
    measured = partial(sample, state=state, target=target, path=folder / "peer")
    for repeat in range(options.repeats):
        if floors:
            _say(f"repeat {repeat + 1} of {options.repeats}: floors")
            _measure_floors(report, floors, repeat)
        order = list(candidates)
        random.Random(options.seed + repeat).shuffle(order)
        for peer in order:
            _say(f"repeat {repeat + 1} of {options.repeats}: {peer.name}")
            for row, seconds in _try(report, candidates, peer, measured).items():
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


def _try(
    report: Report,
    candidates: list[peers.Peer],
    peer: peers.Peer,
    measured: Callable[[peers.Peer], dict[str, float]],
) -> dict[str, float]:
    """One sample of `peer`; whatever it raises takes it out, with the reason, and the run goes on."""
    try:
        return measured(peer)
    except Exception as error:  # noqa: BLE001 - another library may raise anything; the table shows it
        report.drop(peer.name, f"{type(error).__name__}: {error}")
        candidates.remove(peer)
        return {}


def _require_space(folder: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        need = size_bytes / _GIB
        sys.exit(f"{folder}: {free / _GIB:.1f} GiB free, {need:.1f} needed; choose another --dir")


def _environment(folder: Path) -> dict[str, Any]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "file_system": disk.file_system(folder),
        "caches_dropped": disk.drop_caches(),
        "versions": versions,
    }


def _draw(report: Report, path: Path) -> None:
    try:
        plot.draw(report, path)
    except ImportError as error:
        _say(f"no plot: {error}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
