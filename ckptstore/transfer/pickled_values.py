"""The plain values that a pickle may hold besides text and numbers: what stands for each name in it.

About what ``torch.load(weights_only=True)`` allows, and numpy numbers; torch is imported only for its own.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.transfer.unpickle import Call, Kind, NotPlainError, Record

_NUMPY_DTYPE = re.compile(r"[biufc][0-9]{1,2}")


def _numpy_dtype(record: Any) -> np.dtype[Any]:
    """Of a pickled numpy dtype: ``numpy.dtype("f8")`` and a state that tells its byte order."""
    if not isinstance(record, Record) or not record.kind.startswith("numpy."):
        raise ValueError("no dtype")
    _, order, *details = record.state
    if order not in ("<", ">", "|", "=") or details != [None, None, None, -1, -1, 0]:
        raise NotPlainError("a numpy value of records, dates or objects")
    found: np.dtype[Any] = np.dtype(order + record.kind.removeprefix("numpy."))
    return found


def _numpy_kind(text: str, *_: bool) -> Record:
    if not _NUMPY_DTYPE.fullmatch(text):
        raise NotPlainError(f"a numpy value of dtype {text[:60]!r}")
    return Record(f"numpy.{text}")


def _numpy_scalar(dtype: Record, data: bytes) -> np.generic:
    (found,) = np.frombuffer(data, _numpy_dtype(dtype))
    assert isinstance(found, np.generic)
    return found


def _ndarray(*_: Any) -> Record:
    return Record("ndarray")


def array_of(state: Any) -> npt.NDArray[Any]:
    """The array of a :class:`Record` of kind "ndarray", in C order.

    Raises:
        NotPlainError: it holds something else than numbers.
        TypeError, ValueError: it is damaged.
    """
    _, shape, dtype, is_fortran, data = state
    array = np.frombuffer(data, _numpy_dtype(dtype))
    return array.reshape(shape, order="F" if is_fortran else "C").copy(order="C")


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in {encoding[:40]!r}")
    return text.encode("latin-1")


def _bytes(*given: Any) -> bytes:
    if given:
        raise ValueError("bytes made of something")
    return b""


def _bytearray(*given: Any) -> bytearray:
    if not given:
        return bytearray()
    return bytearray(_encoded(*given) if len(given) == 2 else _checked(given[0], bytes))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _complex(real: float, imaginary: float) -> complex:
    return complex(_checked(real, float), _checked(imaginary, float))


def _ordered(*given: Any) -> collections.OrderedDict[Any, Any]:
    """As it is pickled: empty and then filled, or (protocol 1) with a list of pairs."""
    return collections.OrderedDict(*(_checked(item, list) for item in given))


def _counter(*given: Any) -> collections.Counter[Any]:
    return collections.Counter(*(_checked(item, dict) for item in given))


def _size(sizes: Sequence[int]) -> Any:
    return _of_torch("Size")(_checked(sizes, tuple))


def _device(*given: Any) -> Any:
    return _of_torch("device")(*given)


def torch_dtype(name: str) -> Any:
    """A dtype of torch that is a value of its own."""
    return _of_torch(name)


def _of_torch(name: str) -> Any:
    try:
        import torch
    except ImportError:
        raise NotPlainError(f"a torch {name}, and torch is not installed") from None
    return getattr(torch, name)


PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Call(_ordered),
    ("collections", "Counter"): Call(_counter),
    ("_codecs", "encode"): Call(_encoded),
    ("torch", "Size"): Call(_size),
    ("torch", "device"): Call(_device),
    ("numpy", "dtype"): Call(_numpy_kind),
    ("numpy", "ndarray"): Kind("numpy.ndarray"),
}
for _module in ("builtins", "__builtin__"):
    PLAIN[_module, "bytes"] = Call(_bytes)
    PLAIN[_module, "bytearray"] = Call(_bytearray)
    PLAIN[_module, "complex"] = Call(_complex)
    PLAIN[_module, "set"] = Call(lambda *given: set(*(_checked(item, list) for item in given)))
    PLAIN[_module, "frozenset"] = Call(lambda *given: frozenset(*(_checked(item, list) for item in given)))
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    PLAIN[_module, "scalar"] = Call(_numpy_scalar)
    PLAIN[_module, "_reconstruct"] = Call(_ndarray)
