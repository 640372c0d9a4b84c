"""What saving costs a training: steps per second in windows with one save, against windows without.

    python -m benchmarks.slowdown --mib 400 --windows 40 --seconds 10 --dir /data/scratch --json out.json

A window with a save and one without stand side by side, in either order; the libraries take turns. A save
begins with its window, and whatever it makes the training wait is inside. One that has not finished when its
window ends is waited for outside (the table says how often that was). The figure is the median of the ratios
within the pairs, with the 95 % interval of a bootstrap over the pairs.

The CPU of a save is what the threads that the training does not use spent while it was on its way. It leaves
out what the kernel spends by itself, such as writing back pages that a library left in the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import async_peers, command, goals
from benchmarks.async_peers import AsyncPeer
from benchmarks.command import GIB, say
from benchmarks.goals import Goal
from benchmarks.measure import thread_clock
from benchmarks.report import OURS
from benchmarks.training import Training

_LIMIT = 0.03
_RESAMPLES = 10_000
_ARMS = {
    "ckptstore": async_peers.Ckptstore,
    "dcp": lambda: async_peers.DcpAsync(kept=True),
    "torchsnapshot": async_peers.Torchsnapshot,
    "torch_checkpointing": async_peers.TorchCheckpointingLocked,
}
_DEFAULT_ARMS = ["ckptstore", "dcp", "torchsnapshot"]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """One pair: a window with a save, and the one without beside it."""

    with_rate: float
    without_rate: float
    blocked_seconds: float
    saved_seconds: float
    """From the call of `save` to the end of the save."""
    background_cpu_seconds: float

    @property
    def ratio(self) -> float:
        return self.with_rate / self.without_rate


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One library. `slowed` is 1 - the median ratio; CPU seconds are blocked plus background, per GiB."""

    name: str
    slowed: float
    slowed_low: float
    slowed_high: float
    blocked_seconds: float
    saved_seconds: float
    background_cpu_seconds: float
    cpu_seconds_per_gib: float
    unfinished: int
    """Windows that ended before their save did."""
    windows: list[Window]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for; 1 when ckptstore itself failed."""
    parser = command.parser("slowdown", __doc__, gib=None, repeats=None)
    parser.add_argument("--mib", type=float, default=400, help="least size of the state in MiB (default 400)")
    parser.add_argument(
        "--windows", type=int, default=40, help="windows with a save, of each library (default 40)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window (default 10)")
    parser.add_argument(
        "--only", nargs="+", choices=list(_ARMS), default=_DEFAULT_ARMS, metavar="PEER", help=", ".join(_ARMS)
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    training = Training(options.mib, options.seed)
    with command.scratch(options.dir, "slowdown") as folder:
        command.require_space(folder, 4 * training.state_bytes())
        environment = command.environment(folder)
        windows, skipped = _measure(options, training, folder)
    lines = [_line(name, found, training, options) for name, found in windows.items()]
    aims = [
        Goal("slowed", f"at most {_LIMIT:.0%}", line.slowed, _LIMIT, at_most=True)
        for line in lines
        if line.name == OURS
    ]
    document = {
        "environment": environment,
        "state_bytes": training.state_bytes(),
        "window_seconds": options.seconds,
        "lines": [dataclasses.asdict(line) for line in lines],
        "goals": goals.as_json(aims),
        "skipped": skipped,
    }
    command.finish(options, table(lines, aims, skipped), document, partial(draw, lines))
    return 1 if OURS in skipped else 0


def _measure(
    options: argparse.Namespace, training: Training, folder: Path
) -> tuple[dict[str, list[Window]], dict[str, str]]:
    training.run(min(options.seconds, 3.0))
    clock = BackgroundClock()  # before any library has made threads
    skipped: dict[str, str] = {}
    arms: dict[str, AsyncPeer] = {}
    for key in options.only:
        try:
            arms[key] = _ARMS[key]()
            (folder / key).mkdir()
            arms[key].open(folder / key)
            _save_once(arms[key], training, step=0)  # its buffers are there from here on
        except Exception as error:  # noqa: BLE001 - another library may raise anything; the table shows it
            skipped[key] = f"{type(error).__name__}: {error}"
            arms.pop(key, None)
    windows: dict[str, list[Window]] = {arm.name: [] for arm in arms.values()}
    random_order = random.Random(options.seed)
    try:
        for number in range(options.windows):
            order = list(arms.values())
            random_order.shuffle(order)
            for arm in order:
                say(f"window {number + 1} of {options.windows}: {arm.name}")
                with_first = random_order.random() < 0.5
                windows[arm.name].append(
                    _pair(arm, training, clock, options.seconds, number + 1, with_first=with_first)
                )
    finally:
        for arm in arms.values():
            arm.close()
    return windows, skipped


def _save_once(arm: AsyncPeer, training: Training, step: int) -> None:
    arm.save(training.state(), step)
    arm.finish()
    arm.forget(step)


def _pair(
    arm: AsyncPeer, training: Training, clock: BackgroundClock, seconds: float, step: int, *, with_first: bool
) -> Window:
    without = None if with_first else training.run(seconds)
    cpu = clock.seconds()
    start = time.perf_counter()
    ended: list[float] = []
    arm.save(training.state(), step)
    blocked = time.perf_counter() - start

    def wait() -> None:
        arm.finish()
        ended.append(time.perf_counter())

    waiter = threading.Thread(target=wait)
    waiter.start()
    beside = training.run(seconds, begun=start)
    waiter.join()
    cpu = clock.seconds() - cpu
    if not ended:
        raise RuntimeError(f"{arm.name}: the save of step {step} failed")
    arm.forget(step)
    os.sync()
    without = without or training.run(seconds)
    return Window(beside.rate, without.rate, blocked, ended[0] - start, cpu)


class BackgroundClock:
    """CPU seconds of this process outside the threads that there were when the clock was made."""

    def __init__(self) -> None:
        self._clocks = [thread_clock(int(number)) for number in os.listdir("/proc/self/task")]

    def seconds(self) -> float:
        """Counts threads that have ended since, too."""
        return time.process_time() - sum(time.clock_gettime(clock) for clock in self._clocks)


def _line(name: str, windows: list[Window], training: Training, options: argparse.Namespace) -> Line:
    ratios = np.array([window.ratio for window in windows])
    picks = np.random.default_rng(options.seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    blocked = median(window.blocked_seconds for window in windows)
    cpu = median(window.background_cpu_seconds for window in windows)
    return Line(
        name,
        1 - float(np.median(ratios)),
        1 - float(high),
        1 - float(low),
        blocked,
        median(window.saved_seconds for window in windows),
        cpu,
        (blocked + cpu) / (training.state_bytes() / GIB),
        sum(window.saved_seconds > options.seconds for window in windows),
        windows,
    )


def table(lines: Sequence[Line], aims: Sequence[Goal], skipped: dict[str, str]) -> str:
    """For people."""
    heads = ("slowed %", "95 % interval", "blocked s", "saved s", "CPU s / GiB", "unfinished")
    text = [f"{'':32}" + "".join(f"{head:>15}" for head in heads)]
    for line in lines:
        interval = f"{100 * line.slowed_low:.2f} - {100 * line.slowed_high:.2f}"
        text.append(
            f"  {line.name:<30}{100 * line.slowed:>15.2f}{interval:>15}{line.blocked_seconds:>15.3f}"
            f"{line.saved_seconds:>15.3f}{line.cpu_seconds_per_gib:>15.2f}"
            f"{f'{line.unfinished}/{len(line.windows)}':>15}"
        )
    text += ["", "aims", *goals.table(aims)]
    text += ["", *(f"skipped {name}: {reason}" for name, reason in skipped.items())]
    return "\n".join(text)


def draw(lines: Sequence[Line], path: Path) -> None:
    """How much each library slows the training, with its interval, and CPU seconds per GiB beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 1.2 + 0.5 * len(lines)), sharey=True)
    names = [line.name for line in lines]
    colours = ["#2f6f4f" if line.name == OURS else "#9aa5b1" for line in lines]
    slowed = [100 * line.slowed for line in lines]
    errors: Any = [
        [100 * (line.slowed - line.slowed_low) for line in lines],
        [100 * (line.slowed_high - line.slowed) for line in lines],
    ]
    left.barh(names, slowed, color=colours, xerr=errors, ecolor="#333333", capsize=3)
    left.axvline(100 * _LIMIT, color="#b3402a", linestyle="--", linewidth=1)
    left.set_title("training slowed by, % (line: the aim)", loc="left", fontsize=10)
    bars = right.barh(names, [line.cpu_seconds_per_gib for line in lines], color=colours)
    right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.set_title("blocked + background CPU, seconds per GiB", loc="left", fontsize=10)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    left.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
