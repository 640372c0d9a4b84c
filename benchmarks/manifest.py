"""The manifest with very many checkpoints: how long `ls`, `show` and the worked questions take.

    python -m benchmarks.manifest --checkpoints 10000 --tensors 2000 --runs 10 --json out.json

The rows are made up and put in by the library's own ingest; the tier gets a commit record for each, so that
what every command does first (looking for news in the tier) is inside the clock too. `rebuild` is measured on
real checkpoints of the same number of tensors, because it reads their records.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore.inspect.query import query
from ckptstore.manifest import LayoutRows, TensorRows
from ckptstore.manifest.questions import QUESTIONS
from ckptstore.model.documents import encode_record
from ckptstore.model.ids import Attempt, digest_of, run_key
from ckptstore.model.record import TABLE_NAMES, CommitRecord, ComponentSummary, EpochDoc, TableRef
from ckptstore.tier import layout as keys
from ckptstore.tier import runs as run_documents

LIMITS = {"ls": 0.2, "ls run": 0.2, "show": 0.3, "question": 1.0}
_BYTES = 4 << 20
_CHANGED = 4  # one tensor of so many changes from checkpoint to checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=2_000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rebuild", type=int, default=100, help="real checkpoints for `rebuild`")
    parser.add_argument("--dir", type=Path, help="keep the store here, and use it again")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="ckptstore-bench-"))
    try:
        result = measure(folder, options)
    finally:
        if options.dir is None:
            shutil.rmtree(folder)
    for name, seconds in result["seconds"].items():
        late = "  LATE" if name in result["late"] else ""
        print(f"{name:<32} {seconds:8.4f} s  (CPU {result['cpu_seconds'][name]:.4f} s){late}")
    print(f"rebuild: {result['rebuild_ms_per_checkpoint']:.2f} ms per checkpoint")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(bool(result["late"]))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything measured; the names of what missed its limit are in `late`."""
    place = folder / "store"
    if not place.exists():
        with ckptstore.init(place) as store:
            fill_store(store, options.checkpoints, options.tensors, options.runs)
    clock = Clock(options.repeats)
    tensor = f"model.layers.{options.tensors // 2}.weight"
    filled = {"run": name_of(0), "tensor": tensor, "metric": "loss"}
    with ckptstore.open(place) as store:
        size = os.path.getsize(place / "manifest.db")
        for question in QUESTIONS:
            params = {name: filled[name] for name in question.parameters}

            def ask(sql: str = question.sql, params: dict[str, str] = params) -> object:
                return list(query(store, sql, params, seconds=60).rows)

            clock.time(f"question {question.name}", ask)
        catalog = store.catalog
        clock.time("refresh", catalog.refresh)
        clock.time("answers only: runs", lambda: catalog.ask(lambda m: m.runs()))
        clock.time("answers only: checkpoints", lambda: catalog.ask(lambda m: m.checkpoints()))
    for name, arguments in {
        "ls": ["ls"],
        "ls run": ["ls", name_of(0)],
        "ls --all": ["ls", "--all"],
        "show": ["show", f"{name_of(0)}@latest"],
    }.items():
        clock.time(name, lambda arguments=arguments: command(place, arguments))  # type: ignore[misc]
    seconds = clock.wall
    limit_of = {
        name: LIMITS.get(name, LIMITS["question"] if name[:8] == "question" else None) for name in seconds
    }
    return {
        "checkpoints": options.checkpoints,
        "tensors": options.tensors,
        "runs": options.runs,
        "manifest_bytes": size,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "seconds": seconds,
        "cpu_seconds": clock.cpu,
        "limits": {name: limit for name, limit in limit_of.items() if limit is not None},
        "late": [name for name, limit in limit_of.items() if limit is not None and seconds[name] > limit],
        "rebuild_checkpoints": options.rebuild,
        "rebuild_ms_per_checkpoint": rebuild(folder / "real", options.rebuild, options.tensors),
    }


class Clock:
    """Times actions: the median of `repeats`, after one that warms the page cache.

    On a machine that does other things, `cpu` tells what the action itself took.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def time(self, name: str, action: Callable[[], object]) -> None:
        walls, cpus = [], []
        for _ in range(self._repeats + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            action()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        self.wall[name], self.cpu[name] = statistics.median(walls[1:]), statistics.median(cpus[1:])


def command(place: Path, arguments: list[str]) -> None:
    """A command as a process would run it after its imports, opening of store and manifest included."""
    from ckptstore.cli.app import app

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app.main(["-s", str(place), *arguments])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{arguments} ended with {end.code}") from end


def name_of(run: int) -> str:
    return f"run-{run:03d}"


def fill_store(store: ckptstore.Store, checkpoints: int, tensors: int, runs: int) -> None:
    """Made-up checkpoints, spread evenly over the runs."""
    manifest, uuid = store.catalog.manifest, store.tier.marker.tier_uuid
    table = layout_of(tensors)
    source = np.random.default_rng(0)
    for run in range(runs):
        name, key = name_of(run), run_key(name_of(run))
        run_documents.ensure_run(store.tier, name)
        epoch = run_documents.open_epoch(store.tier, name, resumed_from=None, rewound=False, exclusive=False)
        rows = rows_of(tensors, source)
        for start in range(0, checkpoints // runs, 100):
            with manifest.transaction():
                manifest.put_run(name, key, epoch.started_at)
                manifest.put_epoch(key, epoch)
                for number in range(start, min(start + 100, checkpoints // runs)):
                    rows = changed(rows, source)
                    record = record_of(name, epoch, number, tensors, rows)
                    data = encode_record(record)
                    manifest.put_record(uuid, key, record, table, rows, len(data))
                    store.tier.backend.put(keys.commit_key(key, record.attempt), [data])


def layout_of(tensors: int) -> LayoutRows:
    return LayoutRows(
        digest=f"{tensors:064x}",
        chunk_bytes=16 << 20,
        names=[f"model.layers.{i}.weight" for i in range(tensors)],
        components=["model" if i % 3 == 0 else "optimizer" for i in range(tensors)],
        dtypes=["bfloat16"] * tensors,
        shapes=[(1024, 2048)] * tensors,
        kinds=["torch"] * tensors,
        box_tensor=list(range(tensors)),
        box_offsets=[(0, 0)] * tensors,
        box_shapes=[(1024, 2048)] * tensors,
    )


def rows_of(tensors: int, source: np.random.Generator) -> TensorRows:
    size = np.full(tensors, _BYTES, np.int64)
    return TensorRows(digests(tensors, source), size, size, np.ones(tensors, np.int64))


def digests(count: int, source: np.random.Generator) -> list[str]:
    text = source.bytes(32 * count).hex()
    return [text[i : i + 64] for i in range(0, len(text), 64)]


def changed(rows: TensorRows, source: np.random.Generator) -> TensorRows:
    count = len(rows.digests)
    is_new = source.integers(0, _CHANGED, count) == 0
    fresh = digests(count, source)
    merged = [new if take else old for old, new, take in zip(rows.digests, fresh, is_new, strict=True)]
    return TensorRows(merged, rows.bytes, np.where(is_new, _BYTES, 0).astype(np.int64), rows.chunks)


def record_of(run: str, epoch: EpochDoc, number: int, tensors: int, rows: TensorRows) -> CommitRecord:
    attempt = str(Attempt(epoch.session, 100 * number, number + 1))
    new = int(np.sum(rows.new_bytes))
    return CommitRecord(
        attempt=attempt,
        checkpoint=attempt,
        generation=0,
        run=run,
        step=100 * number,
        epoch=epoch.number,
        sequence=number + 1,
        session=epoch.session,
        origin="save",
        parents=(),
        created_at=epoch.started_at + 60 * number,
        world_size=8,
        host="node-1",
        writer="ckptstore",
        chunk_bytes=16 << 20,
        metrics={"loss": 1 / (number + 1), "val_loss": 1.1 / (number + 1)},
        metadata={"tokens": number * 4_000_000},
        tags=(),
        not_captured=(),
        state_info={},
        timings={"prepare": 0.01, "write": 2.5, "tables": 0.02, "sync": 0.3},
        components=(
            ComponentSummary("model", tensors // 3, tensors // 3, tensors // 3 * _BYTES, new // 3, 0),
            ComponentSummary(
                "optimizer", tensors - tensors // 3, tensors, tensors * _BYTES, new - new // 3, 0
            ),
        ),
        tables={name: TableRef(digest_of(b""), 0, b"") for name in TABLE_NAMES},
    )


def rebuild(place: Path, checkpoints: int, tensors: int) -> float:
    """Milliseconds per checkpoint to read records and tables, and to put them in again."""
    shutil.rmtree(place, ignore_errors=True)
    state = {"model": {f"layers.{i}": np.full(64, i, np.float32) for i in range(tensors)}}
    with ckptstore.init(place) as store:
        run = store.run("rebuild")
        for step in range(checkpoints):
            state["model"]["layers.0"] += 1
            run.save(step, state).result()
        start = time.perf_counter()
        store.rebuild()
        return 1000 * (time.perf_counter() - start) / max(checkpoints, 1)


if __name__ == "__main__":
    main()
