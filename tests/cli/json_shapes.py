"""What docs/json.md says of the JSON that commands print, and whether a document is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "json.md"

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z")
_ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
_SECTION = re.compile(r"^##+ (.+)\n", re.MULTILINE)
_EXAMPLE = re.compile(
    r"^`(ckptstore [^\n]+?) --json` prints, for example:\n\n```json\n(.+?)\n```$", re.MULTILINE | re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Field:
    type: str
    optional: bool


@dataclasses.dataclass(frozen=True)
class Shape:
    fields: dict[str, Field]
    examples: dict[str, str]  # command -> document


def shapes() -> dict[str, Shape]:
    """Heading -> what stands under it."""
    parts = _SECTION.split(PAGE.read_text(encoding="utf-8"))
    found: dict[str, Shape] = {}
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        fields = {
            name: Field(kind.removesuffix(", optional"), kind.endswith(", optional"))
            for name, kind, _ in _ROW.findall(text)
        }
        base = re.match(r"\nAll fields of \[(.+?)\]", text)
        if base is not None:
            fields = {**found[base[1]].fields, **fields}
        found[heading] = Shape(fields, dict(_EXAMPLE.findall(text)))
    return found


def check(document: Any, heading: str, where: str = "") -> None:
    """That a document is exactly as the table under a heading says."""
    shape = SHAPES[heading]
    assert isinstance(document, dict), (where, document)
    assert shape.fields, f"{heading} has no table"
    required = {name for name, field in shape.fields.items() if not field.optional}
    assert required <= set(document), f"{where}: lacks {required - set(document)}"
    assert set(document) <= set(shape.fields), f"{where}: undocumented {set(document) - set(shape.fields)}"
    for name, value in document.items():
        _check(value, shape.fields[name].type, f"{where}.{name}")


def _check(value: Any, kind: str, where: str) -> None:
    if kind.startswith("list of ") and kind.endswith(" or null"):
        kind, nullable = kind.removesuffix(" or null"), True
    else:
        kind, nullable = kind.removesuffix(" or null"), kind.endswith(" or null")
    if value is None:
        assert nullable or kind == "any", where
    elif kind.startswith("list of "):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            _check(item, kind.removeprefix("list of "), f"{where}[{number}]")
    elif kind.startswith("map of "):
        assert isinstance(value, dict), where
        for name, item in value.items():
            _check(item, kind.removeprefix("map of "), f"{where}.{name}")
    elif kind.startswith("["):
        check(value, kind[1:].partition("](#")[0], where)
    else:
        assert _IS[kind](value), f"{where} is {value!r}, no {kind}"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_IS = {
    "text": lambda value: isinstance(value, str),
    "time": lambda value: isinstance(value, str) and _TIME.fullmatch(value),
    "integer": _is_integer,
    "number": lambda value: (
        _is_integer(value) or isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity")
    ),
    "boolean": lambda value: isinstance(value, bool),
    "any": lambda value: True,
}

SHAPES = shapes()
