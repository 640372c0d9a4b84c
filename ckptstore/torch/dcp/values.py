"""The values that DCP hands over as ``torch.save`` bytes: decoded without running any code, and back."""

from __future__ import annotations

import collections
import datetime
import functools
import io
import pathlib
import threading
import uuid
from typing import Any

import numpy as np
import torch

from ckptstore.errors import UnsupportedValueError

_lock = threading.Lock()


@functools.cache
def _constructors() -> list[Any]:
    """What besides torch's own list may stand in such bytes: all of it plain data, nothing that acts."""
    core: Any = getattr(np, "_core", None) or np.core  # numpy 2 and 1
    multiarray = core.multiarray
    return [
        *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
        np.dtype,
        np.ndarray,
        (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
        (multiarray._reconstruct, "numpy._core.multiarray._reconstruct"),
        (multiarray.scalar, "numpy.core.multiarray.scalar"),
        (multiarray.scalar, "numpy._core.multiarray.scalar"),
        *(set, frozenset, complex, bytearray, range, slice, bytes),
        collections.deque,
        collections.defaultdict,
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
        *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, uuid.UUID),
    ]


def decode(data: io.BytesIO, name: str, *, allow_pickle: bool) -> Any:
    """The value in ``torch.save`` bytes.

    Args:
        name: of the item, for errors.
        allow_pickle: unpickle whatever it is; the bytes come from this very process.

    Raises:
        UnsupportedValueError: it is not made of plain values; names the classes that are in the way.
    """
    try:
        with _lock, torch.serialization.safe_globals(_constructors()):  # they are one set for all threads
            data.seek(0)
            return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # torch reports what it refuses, and what it cannot read, in many ways
        if allow_pickle:
            data.seek(0)
            return torch.load(data, map_location="cpu", weights_only=False)
        raise UnsupportedValueError(
            f"{name} holds {_classes_in(data) or f'what torch.load cannot read ({error!r:.200})'}, "
            "which cannot be stored without pickle",
            path=name,
            hint="store plain values instead, or pass allow_pickle=True to StoreWriter and StoreReader",
        ) from error


def _classes_in(data: io.BytesIO) -> str:
    try:
        with _lock, torch.serialization.safe_globals(_constructors()):
            data.seek(0)
            return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data)))
    except Exception:  # noqa: BLE001 - it is no torch.save file: the caller says what torch.load said
        return ""


def encode(value: Any) -> io.BytesIO:
    """A value as DCP's planners expect it."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
