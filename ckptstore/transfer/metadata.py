"""Metadata in a safetensors file: text by name there, typed values here.

What is not text is written as JSON, and the key "ckptstore" says which names that concerns, which names
are tied, and which tensors were numpy arrays. Other tools see plain strings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptstore.checkpoint import Checkpoint

KEY = "ckptstore"
RESERVED = ("format", KEY)


@dataclasses.dataclass(frozen=True, slots=True)
class FileMetadata:
    """What a file says besides its tensors.

    Attributes:
        values: the user's, typed.
        aliases: name -> name of the tensor that it is tied to.
        numpy: name -> numpy dtype string, of tensors that were numpy arrays.
    """

    values: Mapping[str, Any]
    aliases: Mapping[str, str]
    numpy: Mapping[str, str | None]


def own_values(checkpoint: Checkpoint) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The checkpoint's metadata that JSON holds exactly, and the names of the rest."""
    kept = {
        name: value
        for name, value in checkpoint.metadata.items()
        if name not in RESERVED and _is_json(value) and _is_json(name)
    }
    return kept, tuple(sorted(set(checkpoint.metadata) - set(kept)))


def document(
    checkpoint: Checkpoint, aliases: Iterable[tuple[str, str]], numpy: Mapping[str, str | None]
) -> dict[str, Any]:
    """What stands under the key "ckptstore"."""
    return {
        "run": checkpoint.run,
        "step": checkpoint.step,
        "checkpoint": checkpoint.id,
        "aliases": dict(aliases),
        "numpy": dict(numpy),
    }


def as_text(values: Mapping[str, Any], document: dict[str, Any]) -> dict[str, str]:
    """Strings by name, as the format demands."""
    text = {"format": "pt"}  # transformers refuses a file that does not say so
    for alias, name in document["aliases"].items():
        text.setdefault(alias, name)  # as safetensors.torch.save_model tells of tied tensors
    for name, value in values.items():
        text[name] = value if type(value) is str else json.dumps(value, ensure_ascii=False)
    typed = sorted(name for name, value in values.items() if type(value) is not str)
    text[KEY] = json.dumps({**document, "json": typed}, ensure_ascii=False)
    return text


def from_text(header: Mapping[str, Any], names: Iterable[str]) -> FileMetadata:
    """Reads it back, whoever wrote it; values that are no text are kept as they are.

    Args:
        header: the file's ``__metadata__``.
        names: of the tensors in the file.
    """
    known = set(names)
    ours = _document(header.get(KEY))
    values = {name: value for name, value in header.items() if name != KEY}
    for name in _strings(ours.get("json")):
        try:
            values[name] = json.loads(values[name])
        except (KeyError, TypeError, ValueError, RecursionError):
            continue  # somebody changed it: the text stays
    if ours:
        claimed = _texts(ours.get("aliases"))
        values = {name: v for name, v in values.items() if not (name in claimed and claimed[name] == v)}
    else:
        claimed = {name: v for name, v in values.items() if name != "format" and isinstance(v, str)}
    aliases = {name: v for name, v in claimed.items() if v in known and name not in known}
    numpy = {
        n: d for n, d in _dict(ours.get("numpy")).items() if n in known and (d is None or type(d) is str)
    }
    if ours and values.get("format") == "pt":
        del values["format"]
    return FileMetadata(values, aliases, numpy)


def _document(text: Any) -> dict[str, Any]:
    if isinstance(text, str):
        try:
            text = json.loads(text)
        except (ValueError, RecursionError):
            return {}
    return _dict(text)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> dict[str, str]:
    return {name: text for name, text in _dict(value).items() if isinstance(text, str)}


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _is_json(value: Any) -> bool:
    """Whether JSON gives back exactly this."""
    if type(value) is float:
        return value - value == 0  # no inf, no NaN
    if type(value) is str:
        return value.isascii() or value.encode("utf-8", "replace").decode() == value
    if type(value) is list:
        return all(_is_json(item) for item in value)
    if type(value) is dict:
        return all(type(key) is str and _is_json(key) and _is_json(item) for key, item in value.items())
    return value is None or type(value) in (bool, int)
