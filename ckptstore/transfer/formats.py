"""The file formats by name, and which one a path means."""

from __future__ import annotations

import zipfile
from pathlib import Path

from ckptstore.errors import UsageError
from ckptstore.transfer.dcp_metadata import is_dcp

FORMATS = ("safetensors", "torch", "npz", "dcp")
INDEX_SUFFIX = ".safetensors.index.json"

_SUFFIXES = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
    ".npz": "npz",
}


def format_of(path: Path, given: str | None) -> str:
    """The format: as given, else by suffix; a directory or an index means safetensors, never dcp.

    Raises:
        UsageError: neither tells.
    """
    if given is not None:
        if given not in FORMATS:
            raise UsageError(f"no such format: {given!r}", hint=f"formats are {', '.join(FORMATS)}")
        return given
    if path.name.endswith(INDEX_SUFFIX) or path.is_dir():
        return "safetensors"
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise UsageError(
            f"{path.name!r} does not tell its format",
            hint=f"give format= (--format; {', '.join(FORMATS)}), or a name ending in {', '.join(_SUFFIXES)}",
        )
    return found


def sniff(path: Path, given: str | None) -> str:
    """The format of a file or directory that is there: as given, by suffix, else by its content.

    Raises:
        UsageError: none of them tells.
    """
    if given is None and is_dcp(path) and not any(path.glob(f"*{INDEX_SUFFIX}")):
        return "dcp"
    if given is None and path.is_file() and path.suffix.lower() not in _SUFFIXES:
        if zipfile.is_zipfile(path):
            try:
                with zipfile.ZipFile(path) as archive:
                    names = archive.namelist()
            except (zipfile.BadZipFile, NotImplementedError):
                names = []
            if any(name.endswith("/data.pkl") for name in names):
                return "torch"
            if names and all(name.endswith(".npy") for name in names):
                return "npz"
        else:
            with path.open("rb") as file:
                head = file.read(9)
            if (
                len(head) == 9
                and head[8:] == b"{"
                and int.from_bytes(head[:8], "little") < path.stat().st_size
            ):
                return "safetensors"
    return format_of(path, given)
