"""What the shape of a state costs: many small tensors against one, and a state of which most does not change.

    python -m benchmarks.shapes --gib 1.5 --repeats 3 --dir /data/scratch --json out.json --plot out.png

*Small*: 10,000 tensors of 1 KiB, and one tensor of the same bytes, saved in turn. *Frozen*: an AdamW state
of which a head (1 % of the bytes) is trained, saved after all of it changed, and after the head changed; and,
for ckptstore alone, one with small adapters in every layer. Saves are synchronous, each library as it comes:
how durable they are is told by `save_load`. ckptstore saves into one run that goes on; the peers save into a
new folder each time, and nothing of theirs is kept from one save to the next.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import command, disk, goals, orbax, peers, states
from benchmarks.command import GIB, say
from benchmarks.goals import Goal
from benchmarks.measure import timed
from benchmarks.report import OURS
from benchmarks.states import State

_SMALL_COUNT, _SMALL_ELEMENTS = 10_000, 256  # float32: 1 KiB each
_TRAINED = 0.01
_ADAPTED = "attn.qkv.weight"
_SMALL_TIMES, _FROZEN_BYTES, _FROZEN_TIME = 3.0, 0.02, 0.4
_DCP_THREADS = 2
_ORBAX_REPEATS = 2  # it takes a minute for 10,000 tensors
SMALL = "10,000 x 1 KiB / one tensor"
FROZEN = "a head of 1 % changed / all changed"
ADAPTERS = "adapters of 1 % changed / all changed"
ROWS = (SMALL, FROZEN, ADAPTERS)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Medians of one library: of the case that the row names first, and of the one it is held against."""

    row: str
    name: str
    seconds: float
    against_seconds: float
    ratio: float
    """Of the times, the median within the repeats."""
    bytes_ratio: float
    per_tensor_microseconds: float | None
    samples: list[tuple[float, float]]


class Saver:
    """A library that saves a state again and again, each time as another checkpoint."""

    def __init__(self, peer: peers.Peer, folder: Path) -> None:
        self.name = peer.name
        self._peer, self._folder = peer, folder

    def save(self, state: State, tag: str) -> tuple[float, int]:
        """Seconds, and bytes that the disk holds more afterwards."""
        path = self._folder / tag
        self._peer.prepare(state, path)
        os.sync()
        seconds = timed(lambda: self._peer.save(state, path))
        os.sync()
        written = disk.allocated_bytes(path)
        disk.remove(path)
        return seconds, written


class OurSaver:
    """One run of ckptstore for each state, which goes on."""

    name = OURS

    def __init__(self, folder: Path) -> None:
        import ckptstore

        self._folder = folder
        self._library: Any = ckptstore
        self._runs: dict[str, Any] = {}
        self._step = 0

    def save(self, state: State, tag: str) -> tuple[float, int]:
        """As `Saver.save`."""
        run = self._runs.get(tag)
        if run is None:
            store = self._library.open(str(self._folder / tag), create=True)
            run = self._runs[tag] = store.run("bench")
        self._step += 1
        os.sync()
        before = disk.allocated_bytes(self._folder / tag)
        seconds = timed(lambda: run.save(self._step, state, wait=True))
        return seconds, disk.allocated_bytes(self._folder / tag) - before

    def begin_again(self, tag: str) -> None:
        """Frees the disk: the next save of this state is the first of a new run."""
        run = self._runs.pop(tag, None)
        if run is not None:
            run.close()
        disk.remove(self._folder / tag)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for; 1 when ckptstore itself failed."""
    parser = command.parser("shapes", __doc__, gib=1.5, repeats=3)
    parser.add_argument(
        "--small-repeats", type=int, default=7, help="repeats of the small tensors alone (default 7)"
    )
    options = parser.parse_args(arguments)
    with command.scratch(options.dir, "shapes") as folder:
        command.require_space(folder, int(5 * options.gib * GIB))
        environment = command.environment(folder)
        lines, skipped = _run(options, folder)
    aims = _goals(lines)
    document = {
        "environment": environment,
        "lines": [dataclasses.asdict(line) for line in lines],
        "goals": goals.as_json(aims),
        "skipped": skipped,
    }
    command.finish(options, table(lines, aims, skipped), document, partial(draw, lines))
    return 1 if OURS in skipped else 0


def _run(options: argparse.Namespace, folder: Path) -> tuple[list[Line], dict[str, str]]:
    candidates: dict[str, Callable[[], peers.Peer]] = {
        "torch.save": peers.TorchSave,
        "safetensors": peers.Safetensors,
        "DCP": lambda: peers.Dcp(_DCP_THREADS),
        "torchsnapshot": peers.Torchsnapshot,
        "torch_checkpointing": peers.TorchCheckpointing,
    }
    (folder / OURS).mkdir()
    ours = OurSaver(folder / OURS)
    savers: list[Saver | OurSaver] = [ours]
    skipped: dict[str, str] = {}
    for name, make in candidates.items():
        try:
            savers.append(Saver(make(), folder))
        except Exception as error:  # noqa: BLE001 - a library broken beside this torch may raise anything
            skipped[name] = f"{type(error).__name__}: {error}"
    samples: dict[tuple[str, str], list[tuple[float, int, float, int]]] = {}

    small = {"model": {f"tensor.{n:05}": torch.rand(_SMALL_ELEMENTS) for n in range(_SMALL_COUNT)}}
    one = {"model": {"tensor": torch.rand(_SMALL_COUNT * _SMALL_ELEMENTS)}}
    for number in range(options.small_repeats + 1):  # the first is a warm-up
        for saver in _shuffled(savers, options.seed + number):
            say(f"small, repeat {number} of {options.small_repeats}: {saver.name}")
            _change([*states.flat(small).values(), *states.flat(one).values()])
            with _Kept(saver, savers, samples, skipped):
                found = (*saver.save(small, "small"), *saver.save(one, "one"))
                if number:
                    samples.setdefault((SMALL, saver.name), []).append(found)
    ours.begin_again("small")
    ours.begin_again("one")

    for row, add in ((FROZEN, _add_head), (ADAPTERS, _add_adapters)):
        state = states.adamw_state((1 - _TRAINED) * options.gib, options.seed)
        trained = add(state, options)
        for number in range(options.repeats):
            for saver in _shuffled(savers, options.seed + number) if row == FROZEN else [ours]:
                say(f"{row}, repeat {number + 1} of {options.repeats}: {saver.name}")
                with _Kept(saver, savers, samples, skipped):
                    if saver is ours:  # the full save has a base to compare with, too
                        ours.begin_again("frozen")
                        ours.save(state, "frozen")
                    _change(list(states.flat(state).values()))
                    full = saver.save(state, "frozen")
                    _change(trained)
                    samples.setdefault((row, saver.name), []).append((*saver.save(state, "frozen"), *full))
            ours.begin_again("frozen")
    lines = [_line(row, name, found) for (row, name), found in samples.items()]
    lines += _orbax(options, folder, small, one, skipped)
    return sorted(lines, key=lambda line: (ROWS.index(line.row), line.seconds)), skipped


class _Kept:
    """Whatever a peer raises takes it out, with the reason, and the run goes on."""

    def __init__(
        self,
        saver: Saver | OurSaver,
        savers: list[Saver | OurSaver],
        samples: dict[tuple[str, str], Any],
        skipped: dict[str, str],
    ) -> None:
        self._saver, self._savers, self._samples, self._skipped = saver, savers, samples, skipped

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._savers.remove(self._saver)
        self._skipped[self._saver.name] = f"{type(error).__name__}: {error}"
        for key in [key for key in self._samples if key[1] == self._saver.name]:
            del self._samples[key]
        return True


def _shuffled(savers: list[Saver | OurSaver], seed: int) -> list[Saver | OurSaver]:
    order = list(savers)
    random.Random(seed).shuffle(order)
    return order


def _add_head(state: State, options: argparse.Namespace) -> list[torch.Tensor]:
    """A small model of its own behind the large one; returns the tensors that are trained."""
    head = states.adamw_state(_TRAINED * options.gib, options.seed)
    for component, entries in head.items():
        state[component] |= {f"head.{name}": entry for name, entry in entries.items()}
    return list(states.flat(head).values())


def _add_adapters(state: State, options: argparse.Namespace) -> list[torch.Tensor]:
    """Two thin matrices (LoRA's) beside each layer's first one, with their moments; returns them all."""
    adapted = [name for name in state["model"] if name.endswith(_ADAPTED)]
    rows, width = state["model"][adapted[0]].shape
    rank = max(1, round(_TRAINED * states.size_bytes(state) / (len(adapted) * (rows + width) * 12)))
    added: list[torch.Tensor] = []
    for name in adapted:
        for part, shape in (("lora_a", (rank, width)), ("lora_b", (rows, rank))):
            weight, mean, square = (torch.randn(shape) for _ in range(3))
            state["model"][f"{name}.{part}"] = weight
            state["optimizer"][f"{name}.{part}"] = {"exp_avg": mean, "exp_avg_sq": square}
            added += [weight, mean, square]
    return added


def _change(tensors: Sequence[torch.Tensor]) -> None:
    """Gives every element another value."""
    for tensor in tensors:
        tensor.mul_(-1.001)


def _line(row: str, name: str, found: list[tuple[float, int, float, int]]) -> Line:
    differences = [seconds - against for seconds, _, against, _ in found]
    return Line(
        row,
        name,
        median(seconds for seconds, *_ in found),
        median(against for _, _, against, _ in found),
        median(seconds / against for seconds, _, against, _ in found),
        median(written / against for _, written, _, against in found),
        median(differences) / _SMALL_COUNT * 1e6 if row == SMALL else None,
        [(seconds, against) for seconds, _, against, _ in found],
    )


def _orbax(
    options: argparse.Namespace, folder: Path, small: State, one: State, skipped: dict[str, str]
) -> list[Line]:
    """Small tensors alone: of frozen ones it writes every byte, as the other peers do."""
    say("small: Orbax")
    trees = [orbax.shapes_of(small), orbax.shapes_of(one)]
    try:
        answer = orbax.ask(
            "shapes", folder / "orbax", trees=trees, repeats=min(_ORBAX_REPEATS, options.repeats)
        )
    except Exception as error:  # noqa: BLE001 - see _Kept
        skipped["Orbax"] = f"{type(error).__name__}: {error}"
        return []
    columns = (answer["seconds"][0], answer["bytes"][0], answer["seconds"][1], answer["bytes"][1])
    return [_line(SMALL, "Orbax", list(zip(*columns, strict=True)))]


def _goals(lines: Sequence[Line]) -> list[Goal]:
    aims: list[Goal] = []
    for line in lines:
        if line.name != OURS:
            continue
        if line.row == SMALL:
            aim = f"at most {_SMALL_TIMES:g} x the time of one tensor"
            aims.append(Goal(line.row, aim, line.ratio, _SMALL_TIMES, at_most=True))
        else:
            aim = f"at most {_FROZEN_TIME:g} of the time"
            aims.append(Goal(line.row, aim, line.ratio, _FROZEN_TIME, at_most=True))
            aim = f"at most {_FROZEN_BYTES:.0%} of the bytes"
            aims.append(Goal(line.row, aim, line.bytes_ratio, _FROZEN_BYTES, at_most=True))
    return aims


def table(lines: Sequence[Line], aims: Sequence[Goal], skipped: dict[str, str]) -> str:
    """For people."""
    text: list[str] = []
    for row in ROWS:
        extra = "us / tensor" if row == SMALL else ""
        text += ["", row, f"{'':24}{'median s':>10}{'against s':>11}{'time':>8}{'bytes':>8}{extra:>13}"]
        for line in lines:
            if line.row == row:
                each = "" if line.per_tensor_microseconds is None else f"{line.per_tensor_microseconds:.1f}"
                text.append(
                    f"  {line.name:<22}{line.seconds:>10.3f}{line.against_seconds:>11.3f}"
                    f"{line.ratio:>8.2f}{line.bytes_ratio:>8.3f}{each:>13}".rstrip()
                )
    text += ["", "aims", *goals.table(aims)]
    text += ["", *(f"skipped {name}: {reason}" for name, reason in skipped.items())]
    return "\n".join(text)


def draw(lines: Sequence[Line], path: Path) -> None:
    """The seconds of both cases, side by side for each library."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 1.2 + 0.55 * (1 + len({line.name for line in lines}))))
    legends = ("10,000 x 1 KiB", "one tensor"), ("1 % changed", "all changed")
    for axis, rows, (first, against) in zip(axes, ((SMALL,), (FROZEN, ADAPTERS)), legends, strict=True):
        here = [line for line in lines if line.row in rows]
        places = range(len(here))
        colours = ["#2f6f4f" if line.name == OURS else "#7b8794" for line in here]
        bars = axis.barh([p - 0.2 for p in places], [line.seconds for line in here], 0.38, color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        pale = ["#a8cbb9" if line.name == OURS else "#d9dee3" for line in here]
        bars = axis.barh([p + 0.2 for p in places], [line.against_seconds for line in here], 0.38, color=pale)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        names = [f"{line.name}, adapters" if line.row == ADAPTERS else line.name for line in here]
        axis.set_yticks(list(places), names)
        axis.set_title(f"seconds: {first} (dark), {against} (pale)", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
        axis.invert_yaxis()
    axes[0].set_xscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
