"""The metadata of a save and a load at the scale of a whole cluster, without any tensor.

    python -m benchmarks.scale --mesh 126 16 128 8 --json out.json --plot out.png

A Llama 3.1 405B with AdamW over 16,384 ranks: the parts of two saves and more are made up by another process
(random digests, the layout and places of a real save) and taken by the library's own code: as rank 0 reads,
decodes, merges and commits them into a store on disk, as one rank of another mesh plans what to read, as the
manifest and `show` take the new checkpoint in. Memory is the high-water mark of the process that does it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import numpy as np

import ckptstore
from benchmarks.manifest import command
from benchmarks.scale_parts import CHUNK_BYTES, Mesh
from ckptstore.load.plan import Want, plan
from ckptstore.model.ids import Attempt
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.tables import Locations
from ckptstore.save.agree import Agreement
from ckptstore.save.commit import Saved, SaveRequest, commit
from ckptstore.save.merge import Merger
from ckptstore.save.parts import Part, decode_part
from ckptstore.save.phases import Phases
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.session import Session
from ckptstore.save.tables import TableWriter
from ckptstore.tier import runs
from ckptstore.tier.contents import Contents

RUN = "llama-405b"
AIMS = {"second save, beyond its bytes": 1.0, "read plan": 1.0}
AIM_MEMORY_BYTES = 2 << 30


class Clock:
    """Seconds and processor seconds by name, in the order of the work; of repeats the least counts.

    On a machine that does other things, the least of several is the nearest to what the work takes.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if wall < self.seconds.get(name, float("inf")):
            self.seconds[name], self.cpu_seconds[name] = wall, cpu


def peak_bytes() -> int:
    """High-water mark of this process's memory (Linux: of this program, not of what was forked)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the high-water mark of memory is only known on Linux")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", type=int, nargs=4, default=(126, 16, 128, 8))
    parser.add_argument("--saves", type=int, default=3, help="the first and so many minus one like it")
    parser.add_argument("--dir", type=Path, help="where the store goes (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--as-reader", metavar="STORE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    mesh = Mesh(*options.mesh)
    if options.as_reader:
        print(json.dumps(read(options.as_reader, mesh)))
        return
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-scale-", dir=options.dir))
    try:
        result = measure(folder, mesh, options.saves)
    finally:
        shutil.rmtree(folder)
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.plot is not None:
        draw(result, options.plot)


# --- rank 0 ------------------------------------------------------------------------------------------------


def measure(folder: Path, mesh: Mesh, saves: int) -> dict[str, Any]:
    """Everything measured."""
    clock = Clock()
    with ckptstore.init(folder / "store", chunk_bytes=CHUNK_BYTES) as store:
        tier = store.tier
        runs.ensure_run(tier, RUN)
        epoch = runs.open_epoch(tier, RUN, resumed_from=None, rewound=False, exclusive=False)
        session = Session(tier, epoch, None)
        merger = Merger()
        saved: Saved | None = None
        sizes: dict[str, int] = {}
        layouts: list[Any] = []
        for number in range(1, saves + 1):
            which = "first" if number == 1 else "second"
            attempt = session.next_attempt(number)
            make_parts(folder / "parts", mesh, attempt, is_known=number > 1)
            with clock.phase(f"{which}: read parts"):
                raw = [(folder / "parts" / f"{rank}.mp").read_bytes() for rank in range(mesh.world_size)]
            sizes[f"parts, {which} save"] = sum(map(len, raw))
            with clock.phase(f"{which}: decode parts"):
                parts = []
                for rank, data in enumerate(raw):
                    parts.append(decode_part(data, "part", merger.known))
                    raw[rank] = b""
            del raw
            if number == 1:
                layouts = [part.layout for part in parts]
                with clock.phase("agree who writes what"):
                    agreement = Agreement.of(layouts)
                    encoded = agreement.encode()
                sizes["agreement"] = len(encoded)
                with clock.phase("agreement, on one rank"):
                    Agreement.decode(encoded).duty(layouts[-1], mesh.world_size - 1)
                del agreement, encoded, layouts
            with clock.phase(f"{which}: merge"):
                assembly, _ = merger.merge(parts, "the save")
            own = parts[0]
            del parts
            with clock.phase(f"{which}: commit"):
                index = ReuseIndex(
                    [] if saved is None else [remembered(saved, own)], tier.backend, lambda *_: None
                )
                tables = TableWriter(tier.backend, index, str(attempt), 0, CHUNK_BYTES)
                saved = commit(
                    tier,
                    session,
                    SaveRequest(number),
                    str(attempt),
                    assembly,
                    tables,
                    Phases(time.monotonic),
                    world_size=mesh.world_size,
                )
            session.base = saved.contents
            with clock.phase(f"{which}: manifest"):
                store.catalog.note_saved(run_key_of(RUN), epoch, saved)
                store.catalog.catch_up()
            sizes[f"tables written, {which} save"] = written = sum(
                piece.size_bytes
                for ref in saved.record.tables.values()
                for piece in ref.pieces
                if str(attempt) in piece.key
            )
            floors(clock, tier.backend, which, written)
            layout = assembly.layout
            sizes |= {
                "boxes": len(layout.box_columns),
                "chunks": layout.chunk_count,
                "objects": len(assembly.keys),
            }
            sizes |= {f"table {name}": ref.size_bytes for name, ref in saved.record.tables.items()}
            del assembly, index, tables
        peak = peak_bytes()
    for _ in range(2):
        with clock.phase("show"):
            command(folder / "store", ["show", f"{RUN}@latest"])
    for _ in range(2):
        reader = subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", "--as-reader", str(folder / "store"), "--mesh"]
            + [str(n) for n in (mesh.layers, mesh.pipeline, max(mesh.data // 2, 1), mesh.tensor)],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(reader.stdout)
        for name, seconds in found["seconds"].items():
            if seconds < clock.seconds.get(name, float("inf")):
                clock.seconds[name], clock.cpu_seconds[name] = seconds, found["cpu_seconds"][name]
    sums(clock)
    return {
        "mesh": {**vars(mesh), "stages": None},
        "ranks": mesh.world_size,
        "logical_bytes": saved.record.logical_bytes if saved else 0,
        "tensors": len(layout.heads),
        **sizes,
        "reads": found["reads"],
        "read_bytes": found["bytes"],
        "coordinator_peak_bytes": peak,
        "reader_peak_bytes": found["peak_bytes"],
        "seconds": clock.seconds,
        "cpu_seconds": clock.cpu_seconds,
        "aims": AIMS,
        "missed": [name for name, aim in AIMS.items() if clock.seconds[name] > aim]
        + (["memory"] if peak > AIM_MEMORY_BYTES else []),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def make_parts(folder: Path, mesh: Mesh, attempt: Attempt, *, is_known: bool) -> None:
    """In another process, so that its memory is not rank 0's."""
    numbers = [str(n) for n in (mesh.layers, mesh.pipeline, mesh.data, mesh.tensor)]
    arguments = ["--attempt", str(attempt), "--number", str(attempt.number), "--mesh", *numbers]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.scale_parts", str(folder), *arguments]
        + (["--known"] if is_known else []),
        check=True,
    )


def remembered(saved: Saved, own: Part) -> Any:
    """What rank 0 knows of its own chunks; the record's tables may be reused too."""
    lengths = own.layout.chunks.nbytes
    return types.SimpleNamespace(
        record=saved.record,
        digests=own.digests,
        locations=Locations(own.objects, own.offsets, lengths, np.zeros(len(lengths), np.uint8)),
        keys=own.keys,
    )


def floors(clock: Clock, backend: Any, which: str, nbytes: int) -> None:
    """What the bytes of the tables take at least: hashed once, copied once, put in pieces."""
    data = np.random.default_rng(0).bytes(nbytes)
    with clock.phase(f"{which}: floor, hash"):
        blake3.blake3(data).digest()
    with clock.phase(f"{which}: floor, put"):
        view = memoryview(data)
        for number, start in enumerate(range(0, nbytes, CHUNK_BYTES)):
            backend.put(
                f"parts/floor/{which}.{time.monotonic_ns()}.{number}", [view[start : start + CHUNK_BYTES]]
            )
        backend.sync()


def sums(clock: Clock) -> None:
    """The lines that have an aim."""
    for times in (clock.seconds, clock.cpu_seconds):
        for which in ("first", "second"):
            work = sum(times[f"{which}: {name}"] for name in ("decode parts", "merge", "commit"))
            floor = times[f"{which}: floor, hash"] + times[f"{which}: floor, put"]
            times[f"{which} save, metadata in all"] = work
            times[f"{which} save, beyond its bytes"] = work - floor
        times["read plan"] = sum(times[f"reader: {name}"] for name in ("layout", "places", "plan"))


# --- one rank that loads -----------------------------------------------------------------------------------


def read(url: str, mesh: Mesh) -> dict[str, Any]:
    """The last checkpoint's read plan for one rank of `mesh`, from nothing."""
    clock = Clock()
    with ckptstore.open(url) as store:
        latest = store.run(RUN).latest
        assert latest is not None
        record = latest.record
        contents = Contents(store.tier, record)
        with clock.phase("reader: layout"):
            layout = contents.layout
        with clock.phase("reader: places"):
            places = contents.locations
        wanted = mesh.layout(mesh.world_size // 2)
        with clock.phase("reader: plan"):
            none = np.zeros(0, np.uint8)
            wants = [
                Want(layout.by_name[tensor.name], box, none)
                for tensor in wanted.tensors
                for box in tensor.boxes
                if box.numel
            ]
            reads = plan(contents, wants)
        needed = sum(box.numel * tensor.dtype.itemsize for tensor in wanted.tensors for box in tensor.boxes)
        with clock.phase("reader: digests"):
            digests = contents.digests
    assert len(places.object) == len(digests) == layout.chunk_count
    return {
        "seconds": clock.seconds,
        "cpu_seconds": clock.cpu_seconds,
        "reads": len(reads),
        "bytes": sum(one.length for one in reads),
        "needed": needed,
        "peak_bytes": peak_bytes(),
    }


# --- what comes out ----------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    for name in ("ranks", "tensors", "boxes", "chunks", "objects"):
        print(f"{name:<34} {result[name]:>12,}")
    for name, seconds in result["seconds"].items():
        aim = AIMS.get(name)
        note = "" if aim is None else f"  aim {aim:g} s" + ("  MISSED" if seconds > aim else "")
        print(f"{name:<34} {seconds:12.3f} s  (CPU {result['cpu_seconds'][name]:.3f} s){note}")
    for name in ("coordinator_peak_bytes", "reader_peak_bytes"):
        print(f"{name:<34} {result[name] / (1 << 20):12.0f} MiB")


def draw(result: dict[str, Any], path: Path) -> None:
    """One bar per phase; the floors beside what must write the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown: dict[str, Callable[[str], bool]] = {
        "#9aa5b1": lambda name: name.startswith("first:") and "floor" not in name,
        "#2f6f4f": lambda name: name.startswith("second:") and "floor" not in name,
        "#b3402a": lambda name: "floor" in name,
        "#4a6a94": lambda name: name.startswith(("reader:", "show")),
    }
    bars = [
        (name, seconds, colour)
        for colour, takes in shown.items()
        for name, seconds in result["seconds"].items()
        if takes(name)
    ]
    figure, axis = pyplot.subplots(figsize=(9, 0.6 + 0.3 * len(bars)))
    drawn = axis.barh([bar[0] for bar in bars], [bar[1] for bar in bars], color=[bar[2] for bar in bars])
    axis.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.1)
    axis.set_xlabel("seconds")
    axis.set_title(
        f"{result['ranks']:,} ranks, {result['boxes']:,} boxes, {result['chunks']:,} chunks (floors in red)",
        loc="left",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
