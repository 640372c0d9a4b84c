"""Names, sizes and times as people read them."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

import click

from ckptstore.errors import UsageError
from ckptstore.model.byte_sizes import bytes_of

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def shown(text: str) -> str:
    """`text` on one line: what does not print (newlines, escape codes, lone surrogates) is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def width(text: str) -> int:
    """Columns that printable `text` takes on a terminal: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def clip(text: str, columns: int) -> str:
    """`text` in at most so many columns, with … for what was left out."""
    if width(text) <= columns:
        return text
    kept, used = [], 1
    for char in text:
        used += _columns(char)
        if used > columns:
            break
        kept.append(char)
    return "".join(kept) + "…"


def size(nbytes: int | None) -> str:
    """Like ``512 B`` and ``37.3 MiB``; ``-`` for None."""
    if nbytes is None:
        return "-"
    value = float(nbytes)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def ago(seconds: float | None, now: float) -> str:
    """How long before `now`, in one unit; ``-`` for None."""
    if seconds is None:
        return "-"
    gone = now - seconds
    if gone < -60:
        return "in the future"
    for unit, length in (("y", 365 * 86400), ("d", 86400), ("h", 3600), ("min", 60)):
        if gone >= 2 * length or (gone >= length and unit == "min"):
            return f"{int(gone // length)} {unit} ago"
    return f"{max(0, int(gone))} s ago"


def duration(seconds: float) -> str:
    """Like ``0.3 s``, ``12 s``, ``4 min 10 s`` and ``3 h 5 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def number(value: int | float) -> str:
    """A metric, short."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def metrics(values: Mapping[str, int | float]) -> str:
    """Like ``loss=2.31 lr=0.001``."""
    if not values:
        return ""
    return " ".join(f"{shown(name)}={number(value)}" for name, value in sorted(values.items()))


def shape_text(shape: Sequence[int]) -> str:
    """Like ``64x100``; ``scalar`` for one without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first few names, and how many more there are."""
    text = ", ".join(map(shown, names[:most]))
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def plural(count: int, noun: str) -> str:
    """``1 checkpoint``, ``2 checkpoints``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def parse_size(text: str) -> int:
    """A number of bytes on the command line: ``1048576``, ``16MiB``, ``10G`` (binary), ``10GB`` (decimal).

    Raises:
        click.BadParameter: says how a size is written.
    """
    try:
        return bytes_of(text, "SIZE")
    except UsageError as error:
        raise click.BadParameter(f"{text!r} is not a size; write it like 16MiB or 10GiB") from error
