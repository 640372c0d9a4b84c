"""What an export tells afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) as it goes; an import calls it from several threads."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written, and what the format could not take.

    Attributes:
        paths: the files, in the order of their names.
        format: "safetensors", "torch", "npz" or "dcp".
        tensors: how many were written; ``tensor_bytes`` and ``file_bytes``: their size, and the files'.
        aliases: (name, name it is tied to) of tensors that were written once for several names.
        left_out: names of values that the format cannot hold: safetensors and npz hold tensors only, dcp no
            empty dicts.
        metadata_left_out: names of metadata that are no JSON, or whose name is taken.
        cast: names converted to the dtype that was asked for.
        kept: names left in their dtype because they are not floating point.
        overflowed: names of which finite elements became inf or NaN by the conversion.
        converted: names of numpy arrays that were written as torch tensors.
    """

    paths: tuple[Path, ...]
    format: str
    tensors: int
    tensor_bytes: int
    file_bytes: int
    aliases: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    metadata_left_out: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    overflowed: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    seconds: float = 0.0
