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
        paint: color of a cell, given its text.
    """

    title: str
    right: bool = False
    flexible: bool = False
    droppable: bool = False
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
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    sizes = {i: max(width(columns[i].title), *(width(row[i]) for row in rows)) for i in kept}

    def over() -> int:
        return 0 if limit is None else sum(sizes[i] for i in kept) + len(_GAP) * (len(kept) - 1) - limit

    for i in reversed(kept.copy()):
        if over() > 0 and columns[i].droppable:
            kept.remove(i)
    while over() > 0:
        flexible = [i for i in kept if columns[i].flexible and sizes[i] > _MIN_FLEXIBLE]
        if not flexible:
            break
        widest = max(flexible, key=sizes.__getitem__)
        sizes[widest] = max(_MIN_FLEXIBLE, sizes[widest] - over())
    lines = [
        _line(
            [columns[i].title for i in kept], [columns[i] for i in kept], [sizes[i] for i in kept], head=True
        )
    ]
    lines += [
        _line([row[i] for i in kept], [columns[i] for i in kept], [sizes[i] for i in kept]) for row in rows
    ]
    return lines


def _line(
    cells: Sequence[str], columns: Sequence[Column], sizes: Sequence[int], *, head: bool = False
) -> str:
    parts = []
    for cell, column, columns_wide in zip(cells, columns, sizes, strict=True):
        text = clip(cell, columns_wide)
        fill = " " * (columns_wide - width(text))
        if column.paint is not None and not head:
            text = column.paint(text)
        parts.append(fill + text if column.right else text + fill)
    return _GAP.join(parts).rstrip()
