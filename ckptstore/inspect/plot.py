"""A run as a picture: metrics, bytes and save times over steps."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

from ckptstore.errors import NotFoundError
from ckptstore.inspect.figures import figure_class, legend_above, picture_path, plain_text, save_figure
from ckptstore.manifest import CheckpointRow
from ckptstore.run_view import RunView

MAX_PANELS = 4
_MAX_BARS = 200
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_LINE = ("#1f5fa8", "#b8540f", "#2f7d4f", "#7a3b8f")
_NEW, _REUSED = "#1f5fa8", "#c7d7ea"
_STATES = {"ok": ("#2f7d4f", "o"), "damaged": ("#b3261e", "X"), "invalid": ("#b8860b", "v")}
_OTHER_STATE = ("#777777", "s")
_PHASES = ("#35618f", "#6ea3c8", "#a7c8dd", "#d9a441", "#b8653a", "#8a8a8a", "#c9c9c9")


def plot(
    run: RunView, path: str | os.PathLike[str], *, metrics: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Draws a run's metrics, kept steps, bytes and save times.

    Args:
        run: as from ``store.run(name)``.
        path: where to; ``.png``, ``.svg`` or ``.pdf`` says how. A file that is there is replaced.
        metrics: which, a panel each; without it the first four by name.

    Returns:
        The metrics that were drawn.

    Raises:
        NotFoundError: the run has no checkpoints, or not these metrics.
        UsageError: the format is not known.
        CkptstoreError: matplotlib is not installed.
    """
    target = picture_path(path)
    store = run._store
    store.catalog.refresh(run.key)
    rows = store.catalog.ask(lambda manifest: manifest.checkpoints(run.key))
    if not rows:
        run.find("latest")  # its error names similar runs
        raise NotFoundError(f"run {run.name!r} has no checkpoints yet")
    known = sorted({name for row in rows for name in row.metrics})
    missing = [name for name in metrics or () if name not in known]
    if missing:
        raise NotFoundError(
            f"run {run.name!r} has no metric {missing[0]!r}", hint=f"it has {', '.join(known) or 'none'}"
        )
    chosen = tuple(metrics if metrics is not None else known[:MAX_PANELS])
    save_figure(_draw(figure_class(), run.name, rows, chosen), target)
    return chosen


def _draw(figure: Any, name: str, rows: list[CheckpointRow], metrics: tuple[str, ...]) -> Any:
    heights = [1.6] * len(metrics) + [0.45, 1.3, 1.3]
    made = figure(figsize=(9.5, 1.25 * sum(heights) + 0.9), layout="constrained")
    axes = made.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    for axis, metric, color in zip(axes, metrics, _LINE * len(metrics), strict=False):
        _metric(axis, rows, metric, color)
    _kept(axes[-3], rows)
    _bytes(axes[-2], rows)
    _seconds(axes[-1], rows)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.02)
        for step in _session_starts(rows):
            axis.axvline(step, color="#999999", linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
    axes[-1].set_xlabel("step", fontsize=9)
    logical, new = sum(row.logical_bytes for row in rows), sum(row.new_bytes for row in rows)
    unit, word = _unit(logical)
    written = f"{new / unit:.1f} of {logical / unit:.1f} {word} written"
    title = f"{plain_text(name)}: {len(rows)} checkpoints, {written}"
    made.suptitle(title, fontsize=11, x=0.01, ha="left")
    return made


def _metric(axis: Any, rows: list[CheckpointRow], metric: str, color: str) -> None:
    points = [(row.step, float(row.metrics[metric]), row.epoch) for row in rows if metric in row.metrics]
    dots = 3.5 if len(rows) <= _MAX_BARS else 0
    for epoch in sorted({point[2] for point in points}):
        part = sorted(point[:2] for point in points if point[2] == epoch)
        axis.plot(*zip(*part, strict=True), color=color, linewidth=1.5, marker="o", markersize=dots)
    good = [point[:2] for point in points if math.isfinite(point[1])]
    axis.set_title(plain_text(metric), loc="left", fontsize=9, pad=4)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    # Which end is the better one only the user knows: both are marked.
    for choose, away in ((min, -12), (max, 6)) if len(good) > 1 else ():
        step, value = choose(good, key=lambda point: point[1])
        axis.annotate(
            f"{choose.__name__} {value:.4g}",
            (step, value),
            textcoords="offset points",
            xytext=(0, away),
            ha="center",
            fontsize=7.5,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )
    axis.margins(y=0.25)


def _kept(axis: Any, rows: list[CheckpointRow]) -> None:
    """Which steps there are, and whether they can be restored."""
    states = list(dict.fromkeys(row.state for row in rows))
    for state in states:
        color, marker = _STATES.get(state, _OTHER_STATE)
        steps = [row.step for row in rows if row.state == state]
        axis.plot(steps, [0] * len(steps), marker, color=color, markersize=6, label=state, linestyle="none")
    for row in rows:
        label = " ".join(("latest",) * row.is_latest + tuple(map(plain_text, row.tags)))
        if label:
            axis.annotate(
                label, (row.step, 0), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=7.5
            )
    axis.set_yticks([])
    axis.set_ylim(-1, 2.2)
    axis.spines["left"].set_visible(False)
    axis.set_title("kept steps", loc="left", fontsize=9, pad=4)
    if states != ["ok"]:
        axis.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(states),
            fontsize=7.5,
            frameon=False,
            handletextpad=0.1,
            borderaxespad=0,
        )


def _bytes(axis: Any, rows: list[CheckpointRow]) -> None:
    unit, word = _unit(max(row.logical_bytes for row in rows))
    new = [row.new_bytes / unit for row in rows]
    reused = [row.reused_bytes / unit for row in rows]
    _stack(axis, rows, {"new": new, "reused": reused}, (_NEW, _REUSED))
    _finish_bars(axis, f"size ({word})", 2)


def _seconds(axis: Any, rows: list[CheckpointRow]) -> None:
    timings = [row.timings for row in rows]
    phases = list(dict.fromkeys(phase for timing in timings for phase in timing))
    series = {phase: [_finite(timing.get(phase, 0.0)) for timing in timings] for phase in phases}
    _stack(axis, rows, series, _PHASES)
    _finish_bars(axis, "save (seconds)", max(len(phases), 1))


def _stack(
    axis: Any, rows: list[CheckpointRow], series: dict[str, list[float]], colors: tuple[str, ...]
) -> None:
    """A bar per checkpoint; steps of one surface where there are too many for bars."""
    order = sorted(range(len(rows)), key=lambda index: rows[index].step)
    steps = [rows[index].step for index in order]
    bottom = [0.0] * len(rows)
    for (name, values), color in zip(series.items(), itertools.cycle(colors), strict=False):
        top = [low + values[index] for low, index in zip(bottom, order, strict=True)]
        if len(rows) <= _MAX_BARS:
            heights = [values[index] for index in order]
            axis.bar(steps, heights, _width(rows), bottom=bottom, color=color, label=plain_text(name))
        else:
            axis.fill_between(
                steps, bottom, top, step="mid", color=color, linewidth=0, label=plain_text(name)
            )
        bottom = top
    axis.set_ylim(0, 1.06 * max(bottom) or 1)


def _finish_bars(axis: Any, title: str, entries: int) -> None:
    axis.set_title(title, loc="left", fontsize=9, pad=4)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    legend_above(axis, min(entries, 7), 7.5)


def _session_starts(rows: list[CheckpointRow]) -> list[float]:
    """Between the last step of a session and the first of the next."""
    ordered = sorted(rows, key=lambda row: (row.epoch, row.sequence))
    return [(a.step + b.step) / 2 for a, b in itertools.pairwise(ordered) if a.epoch != b.epoch]


def _width(rows: list[CheckpointRow]) -> float:
    steps = sorted({row.step for row in rows})
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    return 0.7 * min(gaps, default=1)


def _unit(nbytes: int) -> tuple[int, str]:
    return next((unit, word) for unit, word in _UNITS if nbytes >= unit or unit == 1)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
