"""Where output goes: results to stdout, all else to stderr; JSON that every tool reads."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from ckptstore.cli.text import shown

_RED, _YELLOW, _BOLD = "31", "33", "1"


def prepare_streams() -> None:
    """A character that the terminal's encoding lacks is escaped; it never ends a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str = "") -> None:
    """A line of the result."""
    sys.stdout.write(text + "\n")


def flush() -> None:
    """Raises BrokenPipeError here, where it is handled, and not at the end of the process."""
    sys.stdout.flush()
    sys.stderr.flush()


def complain(message: str, hint: str | None) -> None:
    """An error, and what to do about it, on stderr."""
    sys.stdout.flush()  # a file that takes both keeps them in order
    sys.stderr.write(f"{paint('error:', _RED, sys.stderr)} {_block(message)}\n")
    if hint:
        sys.stderr.write(f"hint: {_block(hint)}\n")


def _block(text: str) -> str:
    return "\n  ".join(shown(line) for line in text.split("\n"))


# --- color -------------------------------------------------------------------------------------------


def paint(text: str, code: str, stream: TextIO) -> str:
    """`text` in a color, on a terminal that wants colors (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def bad(text: str) -> str:
    """Something that a person must look at."""
    return paint(text, _RED, sys.stdout)


def odd(text: str) -> str:
    """Something that a person may want to look at."""
    return paint(text, _YELLOW, sys.stdout)


def strong(text: str) -> str:
    """A heading."""
    return paint(text, _BOLD, sys.stdout)


# --- JSON --------------------------------------------------------------------------------------------


def emit_json(document: Any) -> None:
    """One JSON document on stdout. NaN and the infinities are the texts "NaN", "Infinity", "-Infinity"."""
    say(json.dumps(plain(document), ensure_ascii=not _is_utf8(), allow_nan=False, indent=2))


def say_json_text(text: str) -> None:
    """A line of JSON that is text already; what stdout's encoding may lack is escaped as JSON does."""
    if not _is_utf8() and not text.isascii():
        text = re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    say(text)


def _is_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def plain(value: Any) -> Any:
    """`value` in JSON's own types: dataclasses as objects, times as ISO 8601 in UTC."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)
