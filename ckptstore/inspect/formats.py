"""Rows of a query as text: JSON, newline-delimited JSON, CSV, or cells for a table."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from ckptstore.errors import UsageError
from ckptstore.inspect.query import QueryResult

Format = Literal["json", "nl", "csv", "table"]


def lines(result: QueryResult, form: Format) -> Iterator[str]:
    """The result as lines of text without their line ends; they are made as they are taken.

    A value of CSV may hold line ends, so one "line" of it may be several.

    Raises:
        UsageError: there is no such format.
    """
    match form:
        case "json":
            return json_lines(result)
        case "nl":
            return nl_lines(result)
        case "csv":
            return csv_lines(result)
        case "table":
            return table_lines(result)
    raise UsageError(f"there is no format {form!r}", hint=f"it is one of {', '.join(get_args(Format))}")


def json_lines(result: QueryResult) -> Iterator[str]:
    """One JSON document: a list with an object per row, a row per line."""
    names = unique_names(result.columns)
    if not result.row_count:
        yield "[]"
        return
    for number, row in enumerate(result.rows, 1):
        text = _object(names, row)
        start = "[" if number == 1 else " "
        yield f"{start}{text}{']' if number == result.row_count else ','}"


def nl_lines(result: QueryResult) -> Iterator[str]:
    """Newline-delimited JSON: an object per line."""
    names = unique_names(result.columns)
    return (_object(names, row) for row in result.rows)


def csv_lines(result: QueryResult) -> Iterator[str]:
    """CSV with a heading (RFC 4180). Null is empty, an empty text is ``""``, blobs are base64."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="", quoting=csv.QUOTE_MINIMAL)

    def line(values: Iterable[Any]) -> str:
        buffer.seek(0)
        buffer.truncate()
        writer.writerow(values)
        return buffer.getvalue()

    yield line(result.columns)
    for row in result.rows:
        if row == (None,) or "" in row:  # the module writes null and an empty text alike
            yield ",".join('""' if value == "" else line([_csv(value), ""])[:-1] for value in row)
        else:
            yield line(map(_csv, row))


def table_lines(result: QueryResult) -> Iterator[str]:
    """Columns side by side, numbers to the right. All rows are held to measure them."""
    rows = [[cell(value) for value in row] for row in result.rows]
    numeric = [False] * len(result.columns)
    for index in range(len(result.columns)):
        numeric[index] = bool(rows) and all(_is_number_or_empty(row[index]) for row in rows)
    widths = [max(map(len, column)) for column in zip(result.columns, *rows, strict=True)]
    for row in (list(result.columns), ["-" * width for width in widths], *rows):
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        yield "  ".join(parts).rstrip()


def cell(value: Any) -> str:
    """A value for a person; what could disturb a terminal is escaped."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return f"blob[{len(value)}] {value[:16].hex()}"
    if isinstance(value, float):
        return repr(value)
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def unique_names(columns: Iterable[str]) -> list[str]:
    """Column names for JSON objects: a name that repeats gets ``_2``, ``_3``."""
    seen: set[str] = set()
    names = []
    for column in columns:
        name, number = column, 1
        while name in seen:
            number += 1
            name = f"{column}_{number}"
        seen.add(name)
        names.append(name)
    return names


def json_value(value: Any) -> Any:
    """A value in JSON's own types: blobs as ``{"$base64": true, "encoded": ...}``, infinities as texts."""
    if isinstance(value, bytes):
        return {"$base64": True, "encoded": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _object(names: list[str], row: tuple[Any, ...]) -> str:
    document = {name: json_value(value) for name, value in zip(names, row, strict=True)}
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def _csv(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _is_number_or_empty(text: str) -> bool:
    if not text:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True
