"""Writing safetensors: 8 bytes header length, a JSON header, the tensors end to end.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptstore.errors import ConflictError, UsageError
from ckptstore.transfer import dtypes
from ckptstore.transfer.files import NewFile, check_destination, os_errors, sync_directory
from ckptstore.transfer.flat import Pump, refuse_dtypes, refuse_names
from ckptstore.transfer.pick import Entry

MAX_HEADER_BYTES = 100_000_000
"""What the reference implementation accepts."""

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def check(entries: Sequence[Entry]) -> None:
    """That the format holds them all.

    Raises:
        UnsupportedValueError: names or dtypes that it does not.
    """
    bad = [e.name for e in entries if e.name == "__metadata__" or not _is_unicode(e.name)]
    refuse_names("safetensors", bad, "reserved, or not Unicode")
    missing = [e for e in entries if e.dtype.name not in dtypes.SAFETENSORS]
    scalars = [e for e in entries if e.dtype.name == dtypes.PAIRED and not e.shape]
    refuse_dtypes("safetensors", missing or scalars, "exclude them, or export to torch")
    old = [e for e in entries if not dtypes.safetensors_reads(dtypes.SAFETENSORS[e.dtype.name])]
    refuse_dtypes(
        "the safetensors installed here", old, "upgrade safetensors, exclude them, or export to torch"
    )


def order(entries: Sequence[Entry]) -> list[Entry]:
    """Wide elements first, as the reference does: so every tensor is aligned."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def header_of(entries: Sequence[Entry], metadata: Mapping[str, str] | None) -> bytes:
    """Length and header, for entries in file order.

    Raises:
        UsageError: it would be longer than readers accept.
    """
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for entry in entries:
        shape = list(entry.shape)
        if entry.dtype.name == dtypes.PAIRED:
            shape[-1] *= 2
        table[entry.name] = {
            "dtype": dtypes.SAFETENSORS[entry.dtype.name],
            "shape": shape,
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the header would take {len(header)} bytes, and readers accept {MAX_HEADER_BYTES}",
            hint="export less at once, with only=, or pass metadata=False",
        )
    return struct.pack("<Q", len(header)) + header


def write_into(
    file: NewFile, entries: Sequence[Entry], metadata: Mapping[str, str] | None, pump: Pump
) -> int:
    """Writes one file, durable but not yet published; returns its size."""
    ordered = order(entries)
    header = header_of(ordered, metadata)
    with os_errors(f"cannot write {file.path}"):
        file.file.write(header)
        for _, pieces in pump.by_entry(ordered):
            for data in pieces:
                file.file.write(data)
        return file.finish()


def shards_of(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Entries in order, cut where a shard would be larger; a tensor larger than that has one of its own."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """As transformers names them."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


class ShardedTarget:
    """A directory that gets shards and their index; other files in it stay.

    The index comes last: a directory without it is seen to be unfinished, and never mixes two exports.
    """

    def __init__(self, directory: Path, *, overwrite: bool) -> None:
        self._directory = directory
        self._overwrite = overwrite
        if directory.exists() and not directory.is_dir():
            raise ConflictError(f"{directory} is there and is not a directory", hint="choose another name")
        self._old = self._present()
        if self._old and not overwrite:
            raise ConflictError(
                f"{directory} holds {self._old[0].name} already",
                hint="choose another directory, or pass overwrite=True (--overwrite)",
            )
        self._made = not directory.exists()
        if self._made:
            check_destination(directory, overwrite=False)
            with os_errors(f"cannot make {directory}"):
                directory.mkdir()

    def _present(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        return sorted(
            path
            for path in self._directory.iterdir()
            if path.name in (SINGLE_NAME, INDEX_NAME)
            or (path.name.startswith("model-") and path.name.endswith(".safetensors"))
        )

    def new_file(self, name: str) -> NewFile:
        """A file of the export."""
        return NewFile(self._directory / name, overwrite=self._overwrite)

    def forget(self) -> None:
        """Removes the directory again, if it was made here and nothing is in it."""
        if self._made:
            with contextlib.suppress(OSError):
                self._directory.rmdir()

    def publish(self, files: Sequence[NewFile]) -> None:
        """Gives all their names; the last one is the index, if there is one."""
        with os_errors(f"cannot finish {self._directory}"):
            (self._directory / INDEX_NAME).unlink(missing_ok=True)
            sync_directory(self._directory)
            for file in files:
                file.publish()
            new = {file.path.name for file in files}
            for path in self._old:
                if path.name not in new:
                    path.unlink(missing_ok=True)


def index_of(entries: Sequence[Sequence[Entry]], names: Sequence[str], metadata: Mapping[str, Any]) -> bytes:
    """The index of shards, as transformers reads it."""
    weights = {e.name: name for shard, name in zip(entries, names, strict=True) for e in shard}
    total = sum(e.nbytes for shard in entries for e in shard)
    table = {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(table, ensure_ascii=False, indent=2) + "\n").encode()


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
