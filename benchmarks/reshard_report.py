"""The result of `benchmarks.reshard`: medians and ratios, as a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS, DCP = "ckptstore", "DCP"
CACHES = ("cold", "warm")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One load by all ranks."""

    scenario: str
    cache: str
    name: str
    repeat: int
    seconds: float
    cpu_seconds: float
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """Medians of one library in one row; `times_ours` is the median of the ratios within a repeat."""

    scenario: str
    cache: str
    name: str
    seconds: float
    cpu_seconds: float
    read_bytes: int
    times_ours: float
    of_needed: float


def lines_of(samples: Sequence[Sample], state_bytes: int) -> Iterator[Line]:
    """A line for each scenario, cache and library, in the order of the samples."""
    rows: dict[tuple[str, str, str], dict[int, Sample]] = {}
    for sample in samples:
        rows.setdefault((sample.scenario, sample.cache, sample.name), {})[sample.repeat] = sample
    scenarios = list(dict.fromkeys(sample.scenario for sample in samples))
    order = [(scenario, cache, name) for scenario in scenarios for cache in CACHES for name in (OURS, DCP)]
    for scenario, cache, name in order:
        found = rows[scenario, cache, name]
        ours = rows[scenario, cache, OURS]
        read = int(statistics.median(sample.read_bytes for sample in found.values()))
        yield Line(
            scenario,
            cache,
            name,
            statistics.median(sample.seconds for sample in found.values()),
            statistics.median(sample.cpu_seconds for sample in found.values()),
            read,
            statistics.median(sample.seconds / ours[repeat].seconds for repeat, sample in found.items()),
            read / state_bytes,
        )


def table(lines: Sequence[Line]) -> str:
    """For people."""
    text = [f"{'':34}{'median s':>10}{'time / ours':>13}{'CPU s':>8}{'read, GiB':>11}{'read / needed':>15}"]
    text += [
        f"{line.scenario + ', ' + line.cache:<24}{line.name:<10}{line.seconds:>10.3f}"
        f"{line.times_ours:>13.2f}{line.cpu_seconds:>8.2f}"
        f"{line.read_bytes / _GIB:>11.2f}{line.of_needed:>15.2f}"
        for line in lines
    ]
    return "\n".join(text)


def draw(lines: Sequence[Line], path: Path) -> None:
    """Seconds and bytes read, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 1 + 0.35 * len(lines)), sharey=True)
    labels = [f"{line.scenario}, {line.cache}: {line.name}" for line in lines]
    colours = ["#2f6f4f" if line.name == OURS else "#9aa5b1" for line in lines]
    values = {
        "seconds, median": [line.seconds for line in lines],
        "bytes read per host / bytes needed": [line.of_needed for line in lines],
    }
    for axis, (title, numbers) in zip(axes, values.items(), strict=True):
        axis.bar_label(axis.barh(labels, numbers, color=colours), fmt="%.2f", padding=3, fontsize=8)
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
