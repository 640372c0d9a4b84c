"""The picture of a report: one panel per row, the floor as a line."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import OURS, Line, Report

_OURS_COLOUR = "#2f6f4f"
_PEER_COLOUR = "#9aa5b1"
_PALE_COLOUR = "#d9dee3"
_FLOOR_COLOUR = "#b3402a"


def draw(report: Report, path: Path, title: str, *, seconds: bool = False) -> None:
    """Write the plot to `path`; the suffix says the format. Bars are GiB/s, or `seconds`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = report.lines()
    rows = [row for row in report.rows if any(line.row == row for line in lines)]
    counts = [sum(line.row == row for line in lines) for row in rows]
    figure, axes = pyplot.subplots(
        len(rows),
        figsize=(9, 1.2 * len(rows) + 0.32 * sum(counts)),
        gridspec_kw={"height_ratios": counts},
        squeeze=False,
    )
    for axis, row in zip(axes[:, 0], rows, strict=True):
        here = [line for line in lines if line.row == row]
        values = [line.seconds if seconds else line.gib_per_second for line in here]
        colours = [_colour(report, line) for line in here]
        bars = axis.barh([line.name for line in here], values, color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.1)
        floor = report.best_floor(row)
        if floor:
            bound = floor.seconds if seconds else floor.gib_per_second
            axis.axvline(bound, color=_FLOOR_COLOUR, linestyle="--", linewidth=1, label=floor.name)
            axis.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, fontsize=8, frameon=False)
        is_marked = any(line.mark == report.pale for line in here)
        note = f" (pale: {report.mark_head}? {report.pale})" if is_marked else ""
        axis.set_title(f"{row}{note}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("seconds, median" if seconds else "GiB/s, median")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _colour(report: Report, line: Line) -> str:
    if line.name.startswith(OURS):
        return _OURS_COLOUR
    return _PALE_COLOUR if line.mark == report.pale else _PEER_COLOUR
