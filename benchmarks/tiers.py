"""Tiers: copying to S3 and back beside boto3 and obstore, what moves, requests, slowed saves, memory.

    python -m benchmarks.tiers --gib 0.5 --repeats 3 --dir /data/scratch --json out.json --plot out.png

The server is SeaweedFS on loopback, on the same machine and disk: it takes its share of the CPUs, which is
told. First every client, call and thread count is tried once; the best of each client then takes part in the
repeats, which are interleaved, in another order each, every sample in a bucket of its own. Peers are made as
safe as we are (see `benchmarks.object_peers`); raw figures, nothing hashed, stand beside.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import mmap
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ckptstore
from benchmarks import (
    command,
    disk,
    object_peers,
    plot,
    s3_server,
    states,
    tiers_counts,
    tiers_report,
    tiers_slowdown,
)
from benchmarks.command import GIB, say
from benchmarks.measure import WrongAnswer, timed
from benchmarks.object_peers import Object, Peer
from benchmarks.report import OURS, Report
from benchmarks.s3_server import S3Server
from benchmarks.tiers_places import COLD, HOT, RUN, save, two_tiers
from ckptstore_local import LocalBackend

PUSH, FETCH, RESTORE = ROWS = ("replicate to S3", "fetch from S3 to disk", "restore from S3 to memory")
_COUNT_GIB = 0.125
_WARM_UP_GIB = 0.005
_CHOICE_GIB = 0.125
_ROUNDS_PER_REPEAT = 2


@dataclass(slots=True)
class _Place:
    """Where one repeat works: a store of which one checkpoint was saved, and the same as objects."""

    server: S3Server
    folder: Path
    state: states.State
    target: states.State
    objects: list[Object]

    @property
    def hot(self) -> Path:
        return self.folder / "hot"


@dataclass(slots=True)
class _Usage:
    """What the server took while samples were taken."""

    wall_seconds: float = 0.0
    server_seconds: float = 0.0

    def share(self, cpus: int) -> float:
        return self.server_seconds / self.wall_seconds / cpus if self.wall_seconds else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for; 1 when ckptstore itself failed."""
    parser = command.parser("tiers", __doc__, gib=0.5, repeats=3)
    options = parser.parse_args(arguments)
    logging.getLogger("ckptstore").setLevel(logging.ERROR)  # each empty tier that is made is a warning
    try:
        with (
            command.scratch(options.dir, "tiers") as folder,
            s3_server.running(folder / "server") as server,
        ):
            return _run(options, folder, server)
    except s3_server.NoServer as error:
        sys.exit(str(error))


def _run(options: argparse.Namespace, folder: Path, server: S3Server) -> int:
    state = states.adamw_state(options.gib, options.seed)
    size = states.size_bytes(state)
    command.require_space(folder, 12 * size)
    report = Report(
        environment=command.environment(folder),
        state_bytes=size,
        floor_bytes=0,
        rows=ROWS,
        mark_head="checked",
    )
    cpus = report.environment["cpus"]
    usage = {row: _Usage() for row in ROWS}
    _throughput(report, usage, options, folder, server, state)
    say("bytes that move, requests, memory")
    small = states.adamw_state(min(options.gib, _COUNT_GIB), options.seed)
    moved = tiers_counts.second_checkpoint(server, folder, states.adamw_state(options.gib, options.seed))
    counts, tensor, formulas = tiers_counts.requests(server, min(options.gib, _COUNT_GIB), options.seed)
    memory = tiers_counts.memory(server, folder, small if options.gib < 2 * _COUNT_GIB else state)
    slowed = []
    for name, rounds, behind in (
        ("second disk", _ROUNDS_PER_REPEAT * options.repeats, None),
        ("S3", options.repeats, server),
    ):
        say(f"slowed saves: {name}, {rounds} rounds")
        slowed.append(tiers_slowdown.measure(name, folder, state, rounds, options.seed, behind, cpus))
    report.goals = tiers_report.aims(report, moved, tensor, counts, slowed, memory)
    shares = {row: used.share(cpus) for row, used in usage.items()}
    report.details |= {
        "server_cpu_share": shares,
        "second_checkpoint": tiers_counts.as_json(moved),
        "one_tensor": tiers_counts.as_json(tensor),
        "requests": tiers_counts.as_json(counts),
        "formulas": formulas,
        "slowed": tiers_counts.as_json(slowed),
        "memory": tiers_counts.as_json(memory),
    }
    title = f"{size / GIB:.2f} GiB to and from SeaweedFS on loopback"
    command.finish(
        options,
        tiers_report.table(report, shares, moved, counts, tensor, slowed, memory),
        report.document(),
        lambda path: plot.draw(report, path, title),
    )
    return 1 if OURS in report.skipped else 0


# --- throughput -----------------------------------------------------------------------------------


def _throughput(
    report: Report,
    usage: dict[str, _Usage],
    options: argparse.Namespace,
    folder: Path,
    server: S3Server,
    state: states.State,
) -> None:
    warm = states.adamw_state(_WARM_UP_GIB)
    with _place(server, folder, warm, states.blank_like(warm)) as place:
        _ours(place)
    target = states.blank_like(state)
    part = states.adamw_state(min(options.gib, _CHOICE_GIB), options.seed)
    with _place(server, folder, part, part) as place, server.bucket() as bucket:
        best = _choose(place, bucket, report)
    for repeat in range(options.repeats):
        with _place(server, folder, state, target) as place:
            work: list[tuple[str, Callable[[], dict[str, tuple[float, float]]]]] = [
                (OURS, lambda: _ours(place))
            ]
            for client, chosen in best.items():
                work += [(client, _peer_of(place, chosen, is_checked)) for is_checked in (True, False)]
            random.Random(options.seed + repeat).shuffle(work)
            for name, measured in work:
                say(f"repeat {repeat + 1} of {options.repeats}: {name}")
                for line, (seconds, cpu) in measured().items():
                    row, _, label = line.partition("|")
                    report.add(row, label, repeat, seconds)
                    report.marks[row, label] = "no" if label.endswith(", raw") else "yes"
                    if label == OURS:
                        usage[row].wall_seconds += seconds
                        usage[row].server_seconds += cpu


@contextlib.contextmanager
def _place(server: S3Server, folder: Path, state: states.State, target: states.State) -> Iterator[_Place]:
    """A new store with one checkpoint, in the first of two tiers; everything is removed afterwards."""
    where = folder / "repeat"
    where.mkdir()
    try:
        with ckptstore.init(where / "hot") as store:
            save(store, 1, state)
            objects = object_peers.objects_of(store.checkpoint(f"{RUN}@latest"))
        yield _Place(server, where, state, target, objects)
    finally:
        shutil.rmtree(where)


def _ours(place: _Place) -> dict[str, tuple[float, float]]:
    """Replicating, filling an empty disk, restoring with an empty disk: seconds, the server's CPU."""
    found = {}
    with place.server.bucket() as bucket:
        cold = f"s3://{bucket}/store"
        with ckptstore.open(two_tiers(place.folder / "a.toml", place.hot, cold), create=True) as store:
            store.refresh()
            disk.forget(place.hot)
            found[f"{PUSH}|{OURS}"] = _with_cpu(
                place.server, lambda: store.replication.run([store.tier_named(COLD)])
            )
        fresh = place.folder / "fresh"
        with ckptstore.open(two_tiers(place.folder / "b.toml", fresh, cold), create=True) as store:
            entry = store.checkpoint(f"{RUN}@latest").entry
            key = store.run(RUN).key
            found[f"{FETCH}|{OURS}"] = _with_cpu(place.server, lambda: store.replication.fetch(key, entry))
            if HOT not in {copy.tier.name for copy in store.checkpoint(f"{RUN}@latest").copies}:
                raise WrongAnswer(f"{OURS} fetched nothing")
        disk.remove(fresh)
        with ckptstore.open(two_tiers(place.folder / "c.toml", fresh, cold), create=True) as store:
            checkpoint = store.checkpoint(f"{RUN}@latest")
            states.poison(place.target)
            found[f"{RESTORE}|{OURS}"] = _with_cpu(place.server, lambda: checkpoint.restore(place.target))
            wrong = states.differences(states.flat(place.state), states.flat(place.target))
            if wrong:
                raise WrongAnswer(f"{OURS} gave back other bytes in {len(wrong)} tensors")
        disk.remove(fresh)
    return found


def _peer_of(
    place: _Place, chosen: dict[str, Peer], is_checked: bool
) -> Callable[[], dict[str, tuple[float, float]]]:
    """The best of one client in each row."""
    suffix = "" if is_checked else ", raw"

    def measured() -> dict[str, tuple[float, float]]:
        found = {}
        with place.server.bucket() as bucket:
            for row in ROWS:
                peer = chosen[row]
                found[f"{row}|{_label(row, peer)}{suffix}"] = _sample(place, peer, row, bucket, is_checked)
        return found

    return measured


def _label(row: str, peer: Peer) -> str:
    return peer.name if row == PUSH else f"{peer.client} ranged get, {peer.threads} threads"


def _sample(place: _Place, peer: Peer, row: str, bucket: str, is_checked: bool) -> tuple[float, float]:
    put, get_into = peer.connect(bucket)
    if row == PUSH:
        disk.forget(place.hot)
        source = LocalBackend(place.hot)
        return _with_cpu(place.server, lambda: peer.push(source, place.objects, put, check=is_checked))
    if row == FETCH:
        target = LocalBackend(place.folder / "fetched")
        target.create_root()
        try:
            return _with_cpu(
                place.server, lambda: peer.fetch(place.objects, get_into, target, check=is_checked)
            )
        finally:
            disk.remove(place.folder / "fetched")
    # It exists, as the tensors do that ours fills.
    memory = mmap.mmap(
        -1, sum(each.size for each in place.objects), flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE
    )
    return _with_cpu(
        place.server, lambda: peer.restore(place.objects, get_into, memoryview(memory), check=is_checked)
    )


def _choose(place: _Place, bucket: str, report: Report) -> dict[str, dict[str, Peer]]:
    """By client and row, the peer that was fastest in one checked try of each."""
    tried: dict[tuple[str, str], list[tuple[float, Peer]]] = {}
    said: dict[str, float] = {}
    for peer in object_peers.candidates():
        say(f"trying {peer.name}")
        try:
            # Getting is the same for every call of a client.
            first = next(call for client, call in object_peers.CALLS if client == peer.client)
            for row in ROWS if peer.call == first else (PUSH,):
                seconds, _ = _sample(place, peer, row, bucket, True)
                tried.setdefault((peer.client, row), []).append((seconds, peer))
                said[f"{row}: {_label(row, peer)}"] = seconds
        except Exception as error:  # noqa: BLE001 - another library may raise anything; the table shows it
            report.skipped[peer.name] = f"{type(error).__name__}: {error}"
    report.details["tried"] = said
    best: dict[str, dict[str, Peer]] = {}
    for (client, row), results in tried.items():
        best.setdefault(client, {})[row] = min(results, key=lambda result: result[0])[1]
    return {client: chosen for client, chosen in best.items() if len(chosen) == len(ROWS)}


def _with_cpu(server: S3Server, work: Callable[[], object]) -> tuple[float, float]:
    os.sync()  # else what was written before is written back now
    before = server.cpu_seconds()
    seconds = timed(work)
    return seconds, server.cpu_seconds() - before


if __name__ == "__main__":
    sys.exit(main())
