"""How much a save to a local tier is slowed while copying to a colder tier goes on."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ckptstore
from benchmarks import states
from benchmarks.measure import timed
from benchmarks.s3_server import S3Server
from benchmarks.tiers_places import COLD, RUN, change, two_tiers

RATE = "50MB"
_SAVES = 4
_RESAMPLES = 10_000
_START_SECONDS = 10.0
_HEADS = ("saves", "idle", "server CPU")


@dataclass(frozen=True, slots=True)
class Slowed:
    """Pairs of saves, with and without copying.

    Attributes:
        times: median of the ratios, with its 95 % interval: 1.05 is 5 % slower.
        idle: saves in whose time copying was not under way from beginning to end.
        server_share: of the CPUs of the machine, what the server took during the saves with copying.
    """

    name: str
    times: float
    low: float
    high: float
    with_seconds: list[float]
    without_seconds: list[float]
    idle: int
    server_share: float | None


def measure(
    name: str, folder: Path, state: states.State, rounds: int, seed: int, server: S3Server | None, cpus: int
) -> Slowed:
    """Rounds of saves, in an order drawn by chance: to one tier, and to two of which one is being copied to.

    Args:
        server: the second tier is a bucket of it; else a folder.
    """
    found: dict[bool, list[float]] = {True: [], False: []}
    idle, used, wall = 0, 0.0, 0.0
    order = random.Random(seed)
    for _ in range(rounds):
        for is_copying in order.sample([True, False], 2):
            with contextlib.ExitStack() as stack:
                place = folder / "slowed"
                stack.callback(shutil.rmtree, place, ignore_errors=True)
                place.mkdir()
                location = place / "hot"
                if is_copying:
                    bucket = stack.enter_context(server.bucket()) if server else ""
                    cold = f"s3://{bucket}/store" if server else str(place / "cold")
                    location = two_tiers(
                        place / "ckptstore.toml", location, cold, replicate="async", rate=RATE
                    )
                seconds, missed, cpu = _saves(location, state, is_copying, server)
            found[is_copying] += seconds
            idle += missed
            if is_copying:
                used += cpu
                wall += sum(seconds)
    ratios = np.asarray(found[True]) / np.asarray(found[False])
    picks = np.random.default_rng(seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975]).tolist()
    share = used / wall / cpus if server else None
    return Slowed(name, float(np.median(ratios)), low, high, found[True], found[False], idle, share)


def _saves(
    location: Path, state: states.State, is_copying: bool, server: S3Server | None
) -> tuple[list[float], int, float]:
    """(seconds of each save, saves beside which nothing was copied, CPU seconds of the server)."""
    seconds: list[float] = []
    idle, cpu = 0, 0.0
    with ckptstore.init(location) as store:
        run = store.run(RUN)
        run.save(0, state, wait=True)
        replicator = store.replication.to(store.tier_named(COLD)) if is_copying else None
        ends = time.monotonic() + _START_SECONDS
        while replicator and replicator.status().copying is None and time.monotonic() < ends:
            time.sleep(0.005)
        for step in range(1, _SAVES + 1):
            change(state)
            begun = replicator is not None and replicator.status().copying is not None
            before = server.cpu_seconds() if server else 0.0
            seconds.append(timed(lambda step=step: run.save(step, state, wait=True)))  # type: ignore[misc]
            cpu += server.cpu_seconds() - before if server else 0.0
            if replicator is not None:
                idle += not begun or replicator.status().copying is None
        store.replication.stop()  # else closing would wait until all is copied
        run.close()
    return seconds, idle, cpu


def lines(found: Sequence[Slowed]) -> list[str]:
    """For people."""
    text = [
        f"a save to a local tier while {RATE}/s are copied to a second one",
        "  ".join(("", " " * 12, " with, s", "without, s", " slowed", "    95 % interval", *_HEADS)),
    ]
    for each in found:
        interval = f"{each.low - 1:+.1%} .. {each.high - 1:+.1%}"
        share = "" if each.server_share is None else f"{each.server_share:.0%}"
        times = f"{np.median(each.with_seconds):>8.3f}  {np.median(each.without_seconds):>10.3f}"
        counts = f"{len(each.with_seconds):>5}  {each.idle:>4}  {share:>10}"
        text.append(f"  {each.name:<12}  {times}  {each.times - 1:>+7.1%}  {interval:>17}  {counts}".rstrip())
    return text
