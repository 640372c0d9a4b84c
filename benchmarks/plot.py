"""The picture of a report: one panel per row, the floor as a line."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import ROWS
from benchmarks.report import OURS, Line, Report

_OURS_COLOUR = "#2f6f4f"
_PEER_COLOUR = "#9aa5b1"
_NOT_DURABLE_COLOUR = "#d9dee3"
_FLOOR_COLOUR = "#b3402a"


def draw(report: Report, path: Path) -> None:
    """Write the plot to `path`; the suffix says the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = report.lines()
    rows = [row for row in ROWS if any(line.row == row for line in lines)]
    counts = [sum(line.row == row for line in lines) for row in rows]
    figure, axes = pyplot.subplots(
        len(rows),
        figsize=(9, 1.2 * len(rows) + 0.32 * sum(counts)),
        gridspec_kw={"height_ratios": counts},
        squeeze=False,
    )
    for axis, row in zip(axes[:, 0], rows, strict=True):
        here = [line for line in lines if line.row == row]
        speeds = [line.gib_per_second for line in here]
        bars = axis.barh([line.name for line in here], speeds, color=[_colour(line) for line in here])
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.1)
        floor = report.best_floor(row)
        if floor:
            axis.axvline(
                floor.gib_per_second, color=_FLOOR_COLOUR, linestyle="--", linewidth=1, label=floor.name
            )
            axis.legend(loc="lower right", fontsize=8, frameon=False)
        note = " (pale: left in the page cache)" if row == "save" else ""
        axis.set_title(f"{row}{note}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("GiB/s, median")
    figure.suptitle(f"AdamW state of {report.state_bytes / (1 << 30):.2f} GiB", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _colour(line: Line) -> str:
    if line.name.startswith(OURS):
        return _OURS_COLOUR
    return _NOT_DURABLE_COLOUR if line.durable is False else _PEER_COLOUR
