"""Writing ``.npz``: a zip of ``.npy`` files, which ``numpy.load`` reads by name."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

import numpy as np

from ckptstore.transfer import dtypes
from ckptstore.transfer.files import NewFile, os_errors
from ckptstore.transfer.flat import Pump, refuse_dtypes, refuse_names
from ckptstore.transfer.pick import Entry
from ckptstore.transfer.zips import ZipWriter

_MAX_NAME_BYTES = 60_000


def check(entries: Sequence[Entry]) -> None:
    """That the format holds them all.

    Raises:
        UnsupportedValueError: names or dtypes that it does not.
    """
    refuse_names("npz", [e.name for e in entries if not _is_member(e.name)], "no name of a zip member")
    bad = [e for e in entries if e.dtype.name not in dtypes.NUMPY]
    hint = "pass dtype='float32' (--dtype float32), exclude them, or export to safetensors"
    refuse_dtypes("npz", bad, hint)


def write_into(file: NewFile, entries: Sequence[Entry], pump: Pump) -> int:
    """Writes the file, durable but not yet published; returns its size."""
    with os_errors(f"cannot write {file.path}"):
        with ZipWriter(file.file) as archive:
            for entry, pieces in pump.by_entry(entries):
                archive.add(f"{entry.name}.npy", itertools.chain([_npy_header(entry)], pieces))
        return file.finish()


def _npy_header(entry: Entry) -> bytes:
    dtype = np.dtype(entry.dtype.name)
    if entry.kind == "numpy" and entry.detail and np.dtype(entry.detail).kind in "mM":
        dtype = np.dtype(entry.detail)
    out = io.BytesIO()
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype.newbyteorder("<")),
        "fortran_order": False,
        "shape": entry.shape,
    }
    np.lib.format.write_array_header_2_0(out, header)
    return out.getvalue()


def _is_member(name: str) -> bool:
    """Whether zip holds the name as it is: no NUL, no surrogates, at most 64 KiB.

    Names that a careless unpacker would write outside of its directory are refused, too.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    parts = name.split("/")
    return size <= _MAX_NAME_BYTES and "\0" not in name and ".." not in parts and not name.startswith("/")
