"""Which format holds which dtype, and conversion of floating-point elements on the way."""

from __future__ import annotations

import functools
import json
import struct
from typing import Any

import numpy as np

from ckptstore.errors import UnsupportedValueError, UsageError
from ckptstore.model.dtypes import BY_NAME, DType

SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""Ours -> the code in the file. It counts 4-bit elements one by one, torch counts pairs."""

FROM_SAFETENSORS = {code: BY_NAME[name] for name, code in SAFETENSORS.items()}

NUMPY = (
    frozenset(BY_NAME)
    - {"bfloat16", "complex32", "float4_e2m1fn_x2"}
    - {name for name in BY_NAME if name.startswith("float8")}
)
"""What numpy itself has a dtype for."""

PAIRED = "float4_e2m1fn_x2"

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"}) | {
    name for name in BY_NAME if name.startswith("float8")
}


def is_floating(dtype: DType) -> bool:
    """Whether a conversion can be asked of it."""
    return dtype.name in _FLOATS


def target_dtype(name: str | None) -> DType | None:
    """The dtype to convert to.

    Raises:
        UsageError: it is not a floating-point dtype.
    """
    if name is None:
        return None
    plain = str(name).removeprefix("torch.")
    if plain not in _FLOATS:
        raise UsageError(f"cannot convert to {name!r}", hint=f"dtype is one of {', '.join(sorted(_FLOATS))}")
    _torch_dtype(BY_NAME[plain])
    return BY_NAME[plain]


def numpy_detail(text: str | None, dtype: DType) -> str | None:
    """The numpy dtype string of an array kept as `dtype`, little-endian; None if `text` is of another one."""
    try:
        found = np.dtype(text or dtype.name).newbyteorder("<")
    except (TypeError, ValueError, SyntaxError):
        return None
    name = f"int{found.itemsize * 8}" if found.kind in "mM" else found.name
    return found.str if found.kind in "biufcmM" and name == dtype.name else None


@functools.cache
def safetensors_reads(code: str) -> bool:
    """Whether the installed safetensors knows this code; True where none is installed to ask."""
    try:
        from safetensors import SafetensorError, deserialize
    except ImportError:
        return True
    shape = [2] if code == "F4" else [1]
    size = 1 if code == "F4" else FROM_SAFETENSORS[code].itemsize
    header = json.dumps({"x": {"dtype": code, "shape": shape, "data_offsets": [0, size]}}).encode()
    try:
        deserialize(struct.pack("<Q", len(header)) + header + bytes(size))  # type: ignore[no-untyped-call,unused-ignore]
    except SafetensorError:
        return False
    return True


def _torch_dtype(dtype: DType) -> Any:
    import torch

    found = getattr(torch, dtype.name, None)
    if found is None:
        raise UnsupportedValueError(
            f"this torch {torch.__version__} has no dtype {dtype.name}", hint="upgrade torch"
        )
    return found


def convert(data: memoryview, source: DType, target: DType) -> tuple[memoryview, bool]:
    """Elements in another floating-point dtype.

    Args:
        data: writable bytes of whole elements.

    Returns:
        The bytes, and whether a finite element became inf or NaN.
    """
    import torch

    if not len(data):
        return data, False
    before = torch.frombuffer(data, dtype=_torch_dtype(source))
    after = before.to(_torch_dtype(target))
    overflowed = False
    if target.itemsize <= source.itemsize and not _is_finite(after).all():
        overflowed = bool((_is_finite(before) & ~_is_finite(after)).any())
    out: memoryview = after.view(torch.uint8).numpy().data
    return out, overflowed


def _is_finite(tensor: Any) -> Any:
    # Some 8-bit floats have no isfinite of their own.
    return (tensor.float() if tensor.element_size() == 1 else tensor).isfinite()
