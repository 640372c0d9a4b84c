"""Interval advice as a picture: expected loss against the interval between saves."""

from __future__ import annotations

import os
from typing import Any

from ckptstore.inspect.figures import figure_class, legend_above, picture_path, plain_text, save_figure
from ckptstore.model.advice import Advice
from ckptstore.model.durations import duration_text
from ckptstore.model.interval import shortest_interval

_POINTS = 400
_SPREAD = 12.0  # how far the axis goes to both sides of the best interval
_ABOVE_BEST, _ABOVE_MARKED = 3.0, 1.35  # how high the axis goes, as multiples of losses
_PARTS = (
    ("restarts", "restarts", "#c9c9c9"),
    ("rework", "work done again", "#6ea3c8"),
    ("pauses", "pauses", "#d9a441"),
)
_BESIDE = 3.0  # dots so near each other, as a ratio of intervals, would have their words in one place
_TOTAL, _TOO_SHORT = "#1d1d1d", "#efefef"
_MARKS = {"best": "#2f7d4f", "current": "#b3261e", "asked": "#555555"}
_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800)


def plot_advice(advice: Advice, path: str | os.PathLike[str]) -> None:
    """Draws what pauses, work done again and restarts cost over the interval; marks current and best.

    Args:
        path: where to; ``.png``, ``.svg`` or ``.pdf`` says how. A file that is there is replaced.

    Raises:
        UsageError: the format is not known.
        CkptstoreError: matplotlib is not installed.
        BackendError: the file cannot be written.
    """
    target = picture_path(path)
    save_figure(_draw(figure_class(), advice), target)


def _draw(figure: Any, advice: Advice) -> Any:
    made = figure(figsize=(8.5, 4.8), layout="constrained")
    axis = made.subplots()
    marked = [choice.loss for choice in advice.choices if choice.marks]
    shortest = shortest_interval(advice.pause, advice.background)
    low = min([advice.best / _SPREAD, *(loss.interval / 2 for loss in marked)])
    high = max([advice.best * _SPREAD, *(loss.interval * 2 for loss in marked)])
    best = advice.loss_at(advice.best).total
    top = min(1.0, max(_ABOVE_BEST * best, _ABOVE_MARKED * max(loss.total for loss in marked)))
    _losses(axis, advice, low, high)
    if shortest > low:
        axis.axvspan(low, shortest, color=_TOO_SHORT, alpha=0.85, linewidth=0, zorder=3)
        axis.text(
            shortest,
            100 * top * 0.97,
            f"shorter than one save ({duration_text(shortest)}) ",
            ha="right",
            va="top",
            rotation=90,
            fontsize=8,
            color="#555555",
            zorder=4,
        )
    _mark(axis, advice)
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set_ylim(0, 100 * top)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axis.set_xticks(ticks, [duration_text(tick) for tick in ticks], fontsize=8)
    axis.minorticks_off()
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("one save every", fontsize=9)
    axis.set_ylabel("lost, % of all time", fontsize=9)
    legend_above(axis, len(_PARTS) + 1, 8)
    made.suptitle(_title(advice), fontsize=10, x=0.01, ha="left")
    return made


def _losses(axis: Any, advice: Advice, low: float, high: float) -> None:
    """The parts of the loss, one upon the other, and their sum."""
    xs = [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    losses = [advice.loss_at(x) for x in xs]
    bottom = [0.0] * len(xs)
    for part, label, color in _PARTS:
        above = [below + 100 * getattr(loss, part) for below, loss in zip(bottom, losses, strict=True)]
        if above != bottom:
            axis.fill_between(xs, bottom, above, color=color, linewidth=0, label=label)
        bottom = above
    axis.plot(xs, bottom, color=_TOTAL, linewidth=1.6, label="lost in all")


def _mark(axis: Any, advice: Advice) -> None:
    """A dot and a few words at every interval that somebody asked about."""
    for choice in advice.choices:
        if not choice.marks:
            continue
        interval, total = choice.loss.interval, 100 * choice.loss.total
        color = _MARKS[choice.marks[0]]
        axis.plot([interval], [total], "o", color=color, markersize=6, zorder=5)
        if choice.marks[0] == "asked":
            continue
        axis.axvline(interval, color=color, linewidth=0.9, linestyle=(0, (3, 2)), zorder=2)
        side, up = _place_of_words(interval / advice.best)
        axis.annotate(
            f"{' and '.join(choice.marks)}: {duration_text(interval)}\n{total:.3g} % lost",
            (interval, total),
            textcoords="offset points",
            xytext=({"left": 7, "right": -7, "center": 0}[side], up),
            ha=side,
            va="bottom",
            fontsize=8.5,
            color=color,
            bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            zorder=6,
        )


def _place_of_words(ratio: float) -> tuple[str, int]:
    """(alignment, points above the dot) of the words at `ratio` times the best interval: inside the curve."""
    if ratio == 1:
        return "center", 10
    up = 10 if ratio > _BESIDE or ratio < 1 / _BESIDE else 40  # above the words at the best
    return ("right" if ratio > 1 else "left"), up


def _title(advice: Advice) -> str:
    parts = [f"pause {duration_text(advice.pause)}"]
    if advice.background:
        parts.append(f"written in {duration_text(advice.background)}")
    parts.append(f"one failure in {duration_text(advice.failures.mtbf)}")
    if advice.restart:
        parts.append(f"restart {duration_text(advice.restart)}")
    return f"{plain_text(advice.run)}: {', '.join(parts)}"
