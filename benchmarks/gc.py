"""Collecting in a tier of a million objects and 10,000 checkpoints, and the requests of a round in a bucket.

    python -m benchmarks.gc --objects 1000000 --checkpoints 10000 --json out.json --plot out.png

Needs 5 GB of disk and a million inodes there. The files are made directly (`gc_place`), each round runs in a
process of its own (`gc_round`), and `ls` is timed as in `benchmarks.manifest`.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from benchmarks import command, goals
from benchmarks.gc_place import FILE_BYTES, Shape, fill, keep
from benchmarks.goals import Goal
from benchmarks.manifest import Clock, name_of
from benchmarks.manifest import command as run_command

DRY_SECONDS = 20.0
DRY_BYTES = 1 << 30
LS_SECONDS = 0.2
SHARE = 0.01
"""Of the checkpoints, which a round deletes."""

_MIB = 1 << 20
_BUCKET_STEPS = (10, 40)
_BUCKET_GONE = 8
DRY, IDLE, DELETING = "gc --dry-run", "gc, nothing to delete", "gc, 1 % deleted"


def main() -> None:
    parser = command.parser("gc", __doc__, gib=None, repeats=5)
    parser.add_argument("--objects", type=int, default=1_000_000, help="files of chunks (default 1000000)")
    parser.add_argument("--checkpoints", type=int, default=10_000, help="of all runs (default 10000)")
    parser.add_argument("--runs", type=int, default=10, help="default 10")
    parser.add_argument("--no-s3", action="store_true", help="count no requests in a bucket")
    options = parser.parse_args()
    shape = Shape(options.objects, options.checkpoints, options.runs)
    require_room(options.dir, shape)
    with command.scratch(options.dir, "gc") as folder:
        result = measure(folder / "store", shape, options.repeats)
        result["requests"] = {} if options.no_s3 else bucket_rounds(folder / "server")
    aims = aims_of(result)
    result |= {"goals": goals.as_json(aims), "load": os.getloadavg()[0]}
    result["environment"] = command.environment(options.dir)
    text = "\n".join(["", *lines(shape, result), "", "aims", *goals.table(aims)])
    command.finish(options, text, result, partial(draw, result))


def require_room(folder: Path, shape: Shape) -> None:
    """Ends the program where bytes or inodes would not do."""
    folder.mkdir(parents=True, exist_ok=True)
    command.require_space(folder, int(1.3 * FILE_BYTES * shape.files) + (1 << 30))
    room = os.statvfs(folder)
    if room.f_files and room.f_favail < 1.1 * shape.files:
        sys.exit(f"{folder}: {room.f_favail} inodes free, {shape.files} needed; choose another --dir")


def measure(place: Path, shape: Shape, repeats: int) -> dict[str, Any]:
    """A dry run, a round with nothing to delete, one that deletes, and `ls` before and after."""
    command.say(f"making {shape.files} files")
    began = time.perf_counter()
    fill(place, shape)
    os.sync()
    command.say(f"made in {time.perf_counter() - began:.0f} s")
    clock = Clock(repeats)
    for name, arguments in (("ls", ["ls"]), (f"ls {name_of(0)}", ["ls", name_of(0)])):
        clock.time(name, partial(run_command, place, arguments))
    goes = max(round(SHARE * shape.of_run), 2)  # of the first one all objects stay: others name them
    rounds = {IDLE: one_round(place)}
    with ckptstore.open(place) as store:
        keep(store, shape.of_run - goes)
    rounds[DRY] = one_round(place, "--dry-run")
    rounds[DELETING] = one_round(place)
    gone = goes * shape.runs
    check(rounds[DRY]["going"] == gone, "the dry run says something else")
    check(rounds[DELETING]["collected"] == gone, "the round deleted other checkpoints")
    check(rounds[DELETING]["deleted_objects"] == (goes - 1) * shape.of_checkpoint * shape.runs, "objects")
    clock.time("ls, after it", partial(run_command, place, ["ls"]))
    return {
        "objects": shape.objects,
        "checkpoints": shape.checkpoints,
        "runs": shape.runs,
        "rounds": rounds,
        "ls_seconds": clock.wall,
        "ls_cpu_seconds": clock.cpu,
    }


def check(holds: bool, what: str) -> None:
    """A figure of a round that did something else is worth nothing."""
    if not holds:
        raise RuntimeError(f"wrong: {what}")


def one_round(place: Path, *options: str) -> dict[str, Any]:
    """What a process that carries out one round says."""
    environment = {**os.environ, "CKPTSTORE_MANIFEST": ""}
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.gc_round", str(place), *options],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={name: value for name, value in environment.items() if value},
    )
    found: dict[str, Any] = json.loads(made.stdout)
    command.say(f"{' '.join(options) or 'round'}: {found['seconds']:.1f} s")
    return found


# --- in a bucket ------------------------------------------------------------------------------------------


def bucket_rounds(folder: Path) -> dict[str, dict[str, int]]:
    """Requests by kind of rounds in a bucket, counted as they are sent; empty without a server."""
    from benchmarks import s3_server

    try:
        with s3_server.running(folder) as server:
            found: dict[str, dict[str, int]] = {}
            for steps in _BUCKET_STEPS:
                with server.bucket() as bucket:
                    found |= _bucket_rounds(f"s3://{bucket}/store", steps)
            return found
    except s3_server.NoServer as error:
        command.say(str(error))
        return {}


def _bucket_rounds(url: str, steps: int) -> dict[str, dict[str, int]]:
    from benchmarks.s3_server import counted

    source = np.random.default_rng(0)
    with ckptstore.init(url, chunk_bytes=1 << 20) as store:
        keep(store, steps)
        with store.run("run", auto_gc=False) as run:
            for step in range(1, steps + 1):
                run.save(step, {"model": {"weight": source.bytes(8 << 10)}, "own": source.random(1 << 10)})
    found = {}
    for name, last in ((f"{steps} records", steps), (f"{_BUCKET_GONE} of {steps} go", steps - _BUCKET_GONE)):
        with ckptstore.open(url) as store:
            keep(store, last)
            store.refresh()
            with counted() as traffic:
                (report,) = store.gc()
        check(len(report.collected) == steps - last, "the round in the bucket deleted something else")
        found[name] = _by_kind(traffic.requests) | {"objects deleted": report.deleted_objects}
    return found


def _by_kind(requests: Mapping[str, int]) -> dict[str, int]:
    from benchmarks.tiers_counts import KINDS

    known = {name: kind for kind, names in KINDS.items() for name in names}
    by_kind: collections.Counter[str] = collections.Counter()
    for name, count in requests.items():
        by_kind[known.get(name, name)] += count
    return dict(sorted(by_kind.items()))


# --- for people -------------------------------------------------------------------------------------------


def per_object(result: Mapping[str, Any]) -> float:
    """Seconds of a round that deletes, beyond those of one that has nothing to delete, by object deleted."""
    deleting, idle = result["rounds"][DELETING], result["rounds"][IDLE]
    extra = max(deleting["seconds"] - idle["seconds"], 0.0)
    return float(extra / max(deleting["deleted_objects"], 1))


def aims_of(result: Mapping[str, Any]) -> list[Goal]:
    dry = result["rounds"][DRY]
    note = "" if result["objects"] >= 1_000_000 else f"at {result['objects']:,} objects"
    made = [
        Goal("dry run", "<= 20 s", dry["seconds"], DRY_SECONDS, True, note),
        Goal(
            "memory of the dry run",
            "<= 1 GiB",
            dry["peak_bytes"] / (1 << 30),
            DRY_BYTES / (1 << 30),
            True,
            note,
        ),
    ]
    return made + [
        Goal(name, "<= 0.2 s", seconds, LS_SECONDS, True, note)
        for name, seconds in result["ls_seconds"].items()
    ]


def lines(shape: Shape, result: Mapping[str, Any]) -> list[str]:
    text = [
        f"{shape.objects:,} objects, {shape.checkpoints:,} checkpoints in {shape.runs} runs",
        f"  {'':<26}{'seconds':>9}{'CPU s':>9}{'peak MiB':>10}",
    ]
    for name, found in result["rounds"].items():
        figures = f"{found['seconds']:>9.2f}{found['cpu_seconds']:>9.2f}{found['peak_bytes'] / _MIB:>10.0f}"
        text.append(f"  {name:<26}{figures}")
    for name, seconds in result["ls_seconds"].items():
        text.append(f"  {name:<26}{seconds:>9.3f}{result['ls_cpu_seconds'][name]:>9.3f}")
    deleted = result["rounds"][DELETING]["deleted_objects"]
    text.append(
        f"  {deleted:,} objects deleted: {1e6 * per_object(result):.0f} microseconds each, beyond looking"
    )
    if result["requests"]:
        text += ["", "requests of a round in a bucket, one object of its own in each checkpoint"]
        for name, found in result["requests"].items():
            kinds = ", ".join(f"{count} {kind}" for kind, count in found.items() if kind.isupper())
            text.append(f"  {name:<14} {kinds}; {found['objects deleted']} objects deleted")
    return text


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Seconds of each round, and the aim."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 2.6))
    names = list(result["rounds"])
    bars = axis.barh(names, [result["rounds"][name]["seconds"] for name in names], color="#2f6f4f")
    axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axis.axvline(DRY_SECONDS, color="#b3402a", linestyle="--", linewidth=1, label="aim of a dry run")
    axis.legend(fontsize=8, frameon=False)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("seconds")
    title = f"gc: {result['objects']:,} objects, {result['checkpoints']:,} checkpoints, local disk"
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
