"""Values as text for people: times, JSON that any tool reads, metrics kept exactly."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from typing import Any

MAX_JSON_CHARS = 65_536
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_DEPTH = 64
_DECIMAL_BITS = 10_000


def iso(seconds: float | None) -> str | None:
    """UTC as ISO 8601 with milliseconds, like ``2026-11-29T12:00:00.123Z``.

    A time outside the years 1 to 9999 (a broken clock) is shown as its number of seconds.
    """
    if seconds is None:
        return None
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return repr(seconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def people_json(value: Any, *, max_chars: int | None = MAX_JSON_CHARS) -> str:
    """`value` as strict JSON for people to read and SQLite's JSON functions to query.

    What JSON has no word for becomes text (NaN, bytes, a dtype); a text over `max_chars` becomes a note.
    """
    try:
        text = _dump(_plain(value, 0))
    except RecursionError:
        text = '"(nested too deeply to show)"'
    if max_chars is not None and len(text) > max_chars:
        return _dump({"not shown": f"{len(text)} characters of JSON", "begins": text[:200]})
    return text


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(", ", ": "))
    return text


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return "(nested too deeply to show)"
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return _json_number(value)
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(k): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, depth + 1) for item in value), key=str)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return f"bytes[{len(data)}] {data[:32].hex()}"
    return str(value)[:1000]


def number_text(value: int | float) -> str:
    """A number exactly, as text: ``12``, ``0.1``, ``NaN``, ``-Infinity``, ``-0.0``."""
    if isinstance(value, int):
        # Python refuses decimal text of more than 4,300 digits.
        return str(int(value)) if value.bit_length() < _DECIMAL_BITS else hex(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(float(value))


def number_real(value: int | float) -> float | None:
    """The nearest REAL that SQLite can hold: None for NaN, infinity for an int beyond any float."""
    try:
        real = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return None if math.isnan(real) else real


def metrics_json(metrics: Mapping[str, int | float]) -> str:
    """Metrics as strict JSON from which :func:`metrics_from_json` gets every value back exactly."""
    if not metrics:
        return "{}"
    return _dump({name: _json_number(value) for name, value in metrics.items()})


def metrics_from_json(text: str) -> dict[str, int | float]:
    """The inverse of :func:`metrics_json`."""
    return {} if text == "{}" else metrics_from_plain(json.loads(text))


def metrics_from_plain(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Metrics out of decoded JSON, where the text "NaN" stands for what JSON cannot say."""
    found = dict(values)
    for name, value in values.items():
        if value.__class__ is str:
            found[name] = _from_text(value)
    return found


def _from_text(text: str) -> int | float:
    return _SPECIAL[text] if text in _SPECIAL else int(text, 16)


def _json_number(value: int | float) -> int | float | str:
    if isinstance(value, int):
        return int(value) if value.bit_length() < _DECIMAL_BITS else hex(value)
    return float(value) if math.isfinite(value) else number_text(value)


def list_json(items: object) -> str:
    """A list of text or integers as JSON."""
    return "[]" if not items else _dump(list(items))  # type: ignore[call-overload]


def ranges_text(offsets: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """A box as people write it: ``[0:1024, 512:1024]``."""
    return (
        "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(offsets, shape, strict=True)) + "]"
    )
