"""The result of one run: medians, ratios, and the table, JSON and plot made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import ROWS

OURS = "ckptstore"
_GIB = 1 << 30
_FLOOR = "floor"

Samples = dict[int, float]
"""Seconds by repeat: repeats are interleaved, so ratios are taken within a repeat."""


@dataclass(frozen=True, slots=True)
class Line:
    row: str
    name: str
    durable: bool | None
    """None for a load or a floor."""
    seconds: float
    gib_per_second: float
    times_ours: float | None
    """Median over the repeats of this time by ours: above 1, ours is faster."""
    of_floor: float | None
    """Speed as a share of the best floor of this row; None for a save that is not durable."""
    samples: list[float]


@dataclass(slots=True)
class Report:
    """Everything measured. `add` as samples come; `lines` when all are there."""

    environment: dict[str, Any]
    state_bytes: int
    floor_bytes: int
    skipped: dict[str, str] = field(default_factory=dict)
    peers: dict[tuple[str, str], Samples] = field(default_factory=dict)
    floors: dict[tuple[str, str], Samples] = field(default_factory=dict)
    durable: dict[str, bool] = field(default_factory=dict)

    def add(self, row: str, name: str, repeat: int, seconds: float) -> None:
        self.peers.setdefault((row, name), {})[repeat] = seconds

    def add_floor(self, row: str, name: str, repeat: int, seconds: float) -> None:
        self.floors.setdefault((row, name), {})[repeat] = seconds

    def drop(self, name: str, reason: str) -> None:
        """Forget a peer that failed: half a series compares with nothing."""
        self.skipped[name] = reason
        for key in [key for key in self.peers if key[1] == name]:
            del self.peers[key]

    def lines(self) -> list[Line]:
        """The lines of each row, fastest first."""
        lines = [
            self._line(row, name, samples, self.durable.get(name) if row == "save" else None)
            for (row, name), samples in self.peers.items()
        ]
        return sorted(lines, key=lambda line: (ROWS.index(line.row), line.seconds))

    def floor_lines(self) -> list[Line]:
        return [
            Line(row, name, None, *_speed(samples, self.floor_bytes), None, None, list(samples.values()))
            for (row, name), samples in self.floors.items()
        ]

    def best_floor(self, row: str) -> Line | None:
        """The fastest way through the work of `row`: GiB/s, because the floors' bytes are rounded up."""
        fitting = [line for line in self.floor_lines() if line.row == row]
        return max(fitting, key=lambda line: line.gib_per_second, default=None)

    def table(self) -> str:
        heads = ("", "durable", "median s", "GiB/s", "time / ours", "of floor")
        text: list[str] = []
        for row in ROWS:
            floor = self.best_floor(row)
            body = [_cells(line) for line in self.lines() if line.row == row]
            if floor:
                body.append((f"[{_FLOOR}] {floor.name}", "", *_cells(floor)[2:]))
            if body:
                table = [heads, *body] if row == "save" else [(c[0], *c[2:]) for c in (heads, *body)]
                text += ["", row, *_aligned(table)]
        rest = [(line.name, *_cells(line)[2:4]) for line in self.floor_lines()]
        if rest:
            text += ["", f"{_FLOOR}s", *_aligned([("", heads[2], heads[3]), *rest])]
        text += ["", *(f"skipped {name}: {reason}" for name, reason in self.skipped.items())]
        return "\n".join(text)

    def write_json(self, path: Path) -> None:
        document = {
            "environment": self.environment,
            "state_bytes": self.state_bytes,
            "lines": [asdict(line) for line in self.lines()],
            "floors": [asdict(line) for line in self.floor_lines()],
            "skipped": self.skipped,
        }
        path.write_text(json.dumps(document, indent=2) + "\n")

    def _line(self, row: str, name: str, samples: Samples, durable: bool | None) -> Line:
        seconds, speed = _speed(samples, self.state_bytes)
        floor = None if durable is False else self.best_floor(row)
        return Line(
            row,
            name,
            durable,
            seconds,
            speed,
            _paired(samples, self.peers.get((row, OURS), {})),
            speed / floor.gib_per_second if floor else None,
            list(samples.values()),
        )


def _speed(samples: Samples, size_bytes: int) -> tuple[float, float]:
    seconds = median(samples.values())
    return seconds, size_bytes / _GIB / seconds


def _paired(samples: Mapping[int, float], others: Mapping[int, float]) -> float | None:
    both = samples.keys() & others.keys()
    return median(samples[repeat] / others[repeat] for repeat in both) if both else None


def _cells(line: Line) -> tuple[str, ...]:
    durable = "" if line.durable is None else "yes" if line.durable else "no"
    ours = "" if line.times_ours is None else f"{line.times_ours:.2f}"
    floor = "" if line.of_floor is None else f"{line.of_floor:.2f}"
    return line.name, durable, f"{line.seconds:.3f}", f"{line.gib_per_second:.2f}", ours, floor


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell: the first to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = []
    for row in rows:
        figures = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        text.append("  ".join(["", row[0].ljust(widths[0]), *figures]))
    return text
