"""Tables for a terminal: aligned whatever the names are, and never wider than it."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence

from ckptstore.cli.text import clip, width

_GAP = "  "
_MIN_FLEXIBLE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        right: align to the right, as numbers are.
        flexible: may be cut short with … where the terminal is narrow.
        droppable: may be left out there, before anything is cut.
        always: is there even if it is empty in every row.
        paint: color of a cell, given its text.
    """

    title: str
    right: bool = False
    flexible: bool = False
    droppable: bool = False
    always: bool = False
    paint: Callable[[str], str] | None = None


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None where it is none, and nothing may be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, limit: int | None = None) -> list[str]:
    """The lines of a table; columns that are empty in every row are left out.

    Args:
        rows: cells of printable text.
        limit: columns of the terminal.
    """
    shown = [
        _Shown(column, [row[i] for row in rows])
        for i, column in enumerate(columns)
        if column.always or any(row[i] for row in rows)
    ]

    def over() -> int:
        return (
            0 if limit is None else sum(item.columns for item in shown) + len(_GAP) * (len(shown) - 1) - limit
        )

    for item in reversed(shown.copy()):
        if over() > 0 and item.column.droppable:
            shown.remove(item)
    while over() > 0:
        flexible = [item for item in shown if item.column.flexible and item.columns > _MIN_FLEXIBLE]
        if not flexible:
            break
        widest = max(flexible, key=lambda item: item.columns)
        widest.columns = max(_MIN_FLEXIBLE, widest.columns - over())
    return [_GAP.join(parts).rstrip() for parts in zip(*(item.lines() for item in shown), strict=True)]


class _Shown:
    """A column with its cells, and how many columns of the terminal it takes."""

    def __init__(self, column: Column, cells: list[str]) -> None:
        self.column = column
        self.cells = cells
        self.columns = max(map(width, (column.title, *cells)))

    def lines(self) -> list[str]:
        """Title and cells, each as wide as the column."""
        return [
            self._fit(self.column.title),
            *map(self._fit if self.column.paint is None else self._painted, self.cells),
        ]

    def _fit(self, cell: str) -> str:
        if cell.isascii() and len(cell) <= self.columns:
            return cell.rjust(self.columns) if self.column.right else cell.ljust(self.columns)
        text = clip(cell, self.columns)
        fill = " " * (self.columns - width(text))
        return fill + text if self.column.right else text + fill

    def _painted(self, cell: str) -> str:
        fitted = self._fit(cell)
        text = fitted.strip()
        assert self.column.paint is not None
        return fitted.replace(text, self.column.paint(text), 1) if text else fitted
