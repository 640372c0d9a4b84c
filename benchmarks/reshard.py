"""Loading a sharded checkpoint in another layout, beside torch's DCP: time, and bytes read per host.

    python -m benchmarks.reshard --gib 1 --repeats 5 --dir /data/scratch --json out.json --plot out.png

Real ranks with gloo between them save one state with both libraries; then ranks in another layout load it,
the libraries in turn, in the same processes. A sample is what the slowest rank takes from a common start.
Bytes read are what the kernel gave to all ranks of the host (``rchar`` in ``/proc/self/io``), cached or not.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn

import ckptstore
from benchmarks import disk
from benchmarks.reshard_report import CACHES, DCP, OURS, Sample, draw, lines_of, table

_GIB = 1 << 30
_RUN = "reshard"


@dataclass(frozen=True, slots=True)
class Layout:
    """A 1-D mesh of `world` ranks, each tensor cut along `dim`."""

    world: int
    dim: int


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    saved: Layout
    loaded: Layout


SCENARIOS = (
    Scenario("4 ranks to 3", Layout(4, 0), Layout(3, 0)),
    Scenario("rows to columns", Layout(4, 0), Layout(4, 1)),
    Scenario("same layout", Layout(4, 0), Layout(4, 0)),
)


# --- the state --------------------------------------------------------------------------------------


def shapes(gib: float) -> dict[str, tuple[int, int]]:
    """Weights of a transformer and both moments of each, at least `gib` in all, float32."""
    width = 1024
    layer = {
        "attention.in": (3 * width, width),
        "attention.out": (width, width),
        "mlp.in": (4 * width, width),
        "mlp.out": (width, 4 * width),
    }
    found: dict[str, tuple[int, int]] = {}
    number = 0
    while sum(rows * columns for rows, columns in found.values()) * 4 < gib * _GIB:
        for name, shape in layer.items():
            for part in ("weight", "exp_avg", "exp_avg_sq"):
                found[f"layers.{number}.{name}.{part}"] = shape
        number += 1
    return found


def bits(shape: tuple[int, int], seed: int, rows: slice, columns: slice) -> torch.Tensor:
    """int32: the content of a part of a tensor, each element a function of its global place."""
    row = torch.arange(shape[0], dtype=torch.int32)[rows, None] * 1_664_525 + seed * 7_919
    column = torch.arange(shape[1], dtype=torch.int32)[None, columns] * 22_695_477
    return row ^ column


def _own(shape: tuple[int, int], layout: Layout, rank: int) -> tuple[slice, slice]:
    """Rows and columns of this rank, as ``torch.chunk`` cuts."""
    size = -(-shape[layout.dim] // layout.world)
    mine = slice(min(rank * size, shape[layout.dim]), min((rank + 1) * size, shape[layout.dim]))
    return (mine, slice(0, shape[1])) if layout.dim == 0 else (slice(0, shape[0]), mine)


class State:
    """One rank's part of the state."""

    def __init__(self, gib: float, layout: Layout, rank: int, mesh: DeviceMesh, *, blank: bool) -> None:
        self._layout, self._rank = layout, rank
        self._shapes = shapes(gib)
        self.tensors: dict[str, DTensor] = {}
        for seed, (name, shape) in enumerate(self._shapes.items()):
            rows, columns = _own(shape, layout, rank)
            local = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
            if not blank:
                local.view(torch.int32).copy_(bits(shape, seed, rows, columns))
            whole = torch.Size(shape)
            self.tensors[name] = DTensor.from_local(
                local, mesh, [Shard(layout.dim)], run_check=False, shape=whole, stride=(shape[1], 1)
            )

    def poison(self) -> None:
        for tensor in self.tensors.values():
            tensor.to_local().view(torch.int32).fill_(-1)

    def check(self, name: str) -> None:
        """Raises unless every element is what was saved."""
        for seed, (key, shape) in enumerate(self._shapes.items()):
            local = self.tensors[key].to_local().view(torch.int32)
            if not torch.equal(local, bits(shape, seed, *_own(shape, self._layout, self._rank))):
                raise ValueError(f"{name} gave back other bytes in {key}")


# --- the libraries ----------------------------------------------------------------------------------


def _save(folder: Path, state: State) -> None:
    dcp_save({"model": state.tensors}, storage_writer=FileSystemWriter(folder / DCP))
    with ckptstore.open(folder / OURS) as store, store.run(_RUN) as run:
        run.save(1, {"model": state.tensors}).result()


def _load_dcp(folder: Path, state: State) -> None:
    dcp_load({"model": state.tensors}, storage_reader=FileSystemReader(folder / DCP))


def _load_ours(folder: Path, state: State) -> None:
    with ckptstore.open(folder / OURS) as store:
        if store.run(_RUN).restore({"model": state.tensors}) != 1:
            raise ValueError("nothing was restored")


LOADERS: dict[str, Callable[[Path, State], None]] = {OURS: _load_ours, DCP: _load_dcp}


# --- on the ranks -----------------------------------------------------------------------------------


def _on_rank(
    rank: int, world: int, work: Callable[..., None], arguments: tuple[Any, ...], folder: str
) -> None:
    warnings.filterwarnings("ignore", module=r"torch\.distributed")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
    try:
        work(rank, Path(folder), *arguments)
    finally:
        dist.destroy_process_group()


def _spawn(world: int, work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    (folder / f"meet-{world}").unlink(missing_ok=True)
    spawn(_on_rank, (world, work, arguments, str(folder)), nprocs=world)


def _save_all(rank: int, folder: Path, gib: float, layout: Layout) -> None:
    state = State(gib, layout, rank, init_device_mesh("cpu", (layout.world,)), blank=False)
    _save(folder, state)


def _load_all(rank: int, folder: Path, options: argparse.Namespace, scenario: Scenario) -> None:
    layout = scenario.loaded
    state = State(options.gib, layout, rank, init_device_mesh("cpu", (layout.world,)), blank=True)
    order = random.Random(options.seed)
    samples = []
    for repeat in range(-1, options.repeats):  # the first time, which imports and connects, does not count
        names = list(LOADERS)
        order.shuffle(names)
        for name in names:
            for cache in CACHES:
                figures = _sample(rank, folder, state, name, cache)
                state.check(name)
                samples.append(Sample(scenario.name, cache, name, repeat, *figures))
    if rank == 0:
        kept = [asdict(sample) for sample in samples if sample.repeat >= 0]
        Path(folder, "samples.json").write_text(json.dumps(kept))


def _sample(rank: int, folder: Path, state: State, name: str, cache: str) -> tuple[float, float, int]:
    """(seconds of the slowest rank, CPU seconds of all, bytes read by all) of one load."""
    state.poison()
    gc.collect()
    if rank == 0:
        (disk.forget if cache == "cold" else disk.warm)(folder / name)
    dist.barrier()
    before, cpu = _read_so_far(), time.process_time()
    start = time.perf_counter()
    LOADERS[name](folder, state)
    slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    total = torch.tensor([time.process_time() - cpu, _read_so_far() - before], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest), float(total[0]), int(total[1])


def _read_so_far() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for."""
    options = _parser().parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    samples: list[Sample] = []
    for scenario in SCENARIOS:
        if options.only and scenario.name not in options.only:
            continue
        print(f"{scenario.name}: {options.repeats} repeats", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="reshard-", dir=options.dir) as name:
            folder = Path(name)
            ckptstore.init(folder / OURS).close()
            _spawn(scenario.saved.world, _save_all, folder, options.gib, scenario.saved)
            _spawn(scenario.loaded.world, _load_all, folder, options, scenario)
            samples += [Sample(**sample) for sample in json.loads((folder / "samples.json").read_text())]
    state_bytes = sum(rows * columns for rows, columns in shapes(options.gib).values()) * 4
    lines = list(lines_of(samples, state_bytes))
    print(table(lines))
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "environment": _environment(options.dir),
                    "state_bytes": state_bytes,
                    "lines": [asdict(line) for line in lines],
                    "samples": [asdict(sample) for sample in samples],
                },
                indent=1,
            )
            + "\n"
        )
    if options.plot:
        draw(lines, options.plot)
    return 0


def _environment(folder: Path) -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ckptstore": ckptstore.__version__,
        "file_system": disk.file_system(folder),
        "caches_dropped": disk.drop_caches(),
    }


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=summary)
    parser.add_argument("--gib", type=float, default=0.5, help="least size of the state (default 0.5)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats (default 5)")
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the disk to measure (default .)")
    parser.add_argument("--json", type=Path, help="write every figure and sample here")
    parser.add_argument("--plot", type=Path, help="write a plot here (needs matplotlib)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the libraries")
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=[], metavar="SCENARIO", help=", ".join(names)
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
