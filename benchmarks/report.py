"""The result of one run: medians, ratios and aims, and the table and JSON made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

from benchmarks import goals
from benchmarks.goals import Goal
from benchmarks.measure import ROWS

OURS = "ckptstore"
_GIB = 1 << 30
_FLOOR = "floor"


class Named(Protocol):
    """A library that is measured."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)

Samples = dict[int, float]
"""Seconds by repeat: repeats are interleaved, so ratios are taken within a repeat."""


@dataclass(frozen=True, slots=True)
class Line:
    row: str
    name: str
    mark: str
    """What `Report.mark_head` asks: whether a save is durable, say; empty where it does not apply."""
    seconds: float
    gib_per_second: float
    times_ours: float | None
    """Median over the repeats of this time by ours: above 1, ours is faster."""
    of_floor: float | None
    """Speed as a share of the best floor of this row; None for a line whose mark makes it pale."""
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
    rows: tuple[str, ...] = ROWS
    mark_head: str = "durable"
    pale: str = "no"
    """The mark of lines that do less than the rest: shown, but held against no floor."""
    marks: dict[tuple[str, str], str] = field(default_factory=dict)
    """By (row, name)."""
    goals: list[Goal] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    """Further figures, for the JSON alone."""

    def add(self, row: str, name: str, repeat: int, seconds: float) -> None:
        self.peers.setdefault((row, name), {})[repeat] = seconds

    def add_floor(self, row: str, name: str, repeat: int, seconds: float) -> None:
        self.floors.setdefault((row, name), {})[repeat] = seconds

    def drop(self, name: str, reason: str) -> None:
        """Forget a peer that failed: half a series compares with nothing."""
        self.skipped[name] = reason
        for key in [key for key in self.peers if key[1] == name]:
            del self.peers[key]

    def attempt(
        self, candidates: list[N], peer: N, measured: Callable[[N], dict[str, float]]
    ) -> dict[str, float]:
        """What `measured` found of `peer`; whatever it raises takes it out, with the reason, and no more."""
        try:
            return measured(peer)
        except Exception as error:  # noqa: BLE001 - another library may raise anything; the table shows it
            self.drop(peer.name, f"{type(error).__name__}: {error}")
            candidates.remove(peer)
            return {}

    def lines(self) -> list[Line]:
        """The lines of each row, fastest first."""
        lines = [
            self._line(row, name, samples, self.marks.get((row, name), ""))
            for (row, name), samples in self.peers.items()
        ]
        return sorted(lines, key=lambda line: (self.rows.index(line.row), line.seconds))

    def line(self, row: str, name: str) -> Line | None:
        """The line of one peer in one row, None when it was not measured."""
        return next((line for line in self.lines() if (line.row, line.name) == (row, name)), None)

    def floor_lines(self) -> list[Line]:
        return [
            Line(row, name, "", *_speed(samples, self.floor_bytes), None, None, list(samples.values()))
            for (row, name), samples in self.floors.items()
        ]

    def best_floor(self, row: str) -> Line | None:
        """The fastest way through the work of `row`: GiB/s, because the floors' bytes are rounded up."""
        fitting = [line for line in self.floor_lines() if line.row == row]
        return max(fitting, key=lambda line: line.gib_per_second, default=None)

    def table(self) -> str:
        heads = ("", self.mark_head, "median s", "GiB/s", "time / ours", "of floor")
        text: list[str] = []
        for row in self.rows:
            floor = self.best_floor(row)
            body = [_cells(line) for line in self.lines() if line.row == row]
            if floor:
                body.append((f"[{_FLOOR}] {floor.name}", "", *_cells(floor)[2:]))
            if body:
                is_marked = any(marked == row for marked, _ in self.marks)
                table = [heads, *body] if is_marked else [(c[0], *c[2:]) for c in (heads, *body)]
                if not self.floors:
                    table = [cells[:-1] for cells in table]
                text += ["", row, *_aligned(table)]
        rest = list(dict.fromkeys((line.name, *_cells(line)[2:4]) for line in self.floor_lines()))
        if rest:
            text += ["", f"{_FLOOR}s", *_aligned([("", heads[2], heads[3]), *rest])]
        if self.goals:
            text += ["", "aims", *goals.table(self.goals)]
        text += ["", *(f"skipped {name}: {reason}" for name, reason in self.skipped.items())]
        return "\n".join(text)

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "environment": self.environment,
            "state_bytes": self.state_bytes,
            "lines": [asdict(line) for line in self.lines()],
            "floors": [asdict(line) for line in self.floor_lines()],
            "goals": goals.as_json(self.goals),
            "skipped": self.skipped,
            **self.details,
        }

    def _line(self, row: str, name: str, samples: Samples, mark: str) -> Line:
        seconds, speed = _speed(samples, self.state_bytes)
        is_pale = mark != "" and mark == self.pale
        floor = None if is_pale else self.best_floor(row)
        return Line(
            row,
            name,
            mark,
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
    ours = "" if line.times_ours is None else f"{line.times_ours:.2f}"
    floor = "" if line.of_floor is None else f"{line.of_floor:.2f}"
    return line.name, line.mark, f"{line.seconds:.3f}", f"{line.gib_per_second:.2f}", ours, floor


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell: the first to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = []
    for row in rows:
        figures = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        text.append("  ".join(["", row[0].ljust(widths[0]), *figures]))
    return text
