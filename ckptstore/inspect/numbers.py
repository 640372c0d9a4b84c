"""Stored bytes as numbers to compute with: float64, complex128, or integers as they are.

numpy alone: what it has no type for (bfloat16, float8, float4) is decoded by shifting or by table.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.model.dtypes import DType

_PLAIN: Final = {
    "bool": "|u1",
    "uint8": "|u1",
    "int8": "|i1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
# name -> (exponent bits, mantissa bits, bias, what the top codes mean). IEEE: infinity and NaN; "fn": NaN
# at all ones only; "fnuz": NaN where -0 would be. https://onnx.ai/onnx/technical/float8.html
_SMALL: Final = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
    "float4_e2m1fn_x2": (2, 1, 1, "finite"),
}

Numbers = npt.NDArray[Any]


def is_exact_integer(dtype: DType) -> bool:
    """Bool and integers: their differences are computed without rounding."""
    return dtype.name == "bool" or dtype.name.startswith(("int", "uint"))


def decode(data: npt.NDArray[np.uint8], dtype: DType) -> Numbers:
    """The numbers in the bytes of whole elements.

    Returns:
        Integers as they are (bool as uint8), complex128 for complex, else float64. A packed pair of 4-bit
        floats gives two numbers, the low half first.
    """
    with np.errstate(invalid="ignore"):  # signalling NaNs: they stay NaN
        return _decoded(data, dtype)


def _decoded(data: npt.NDArray[np.uint8], dtype: DType) -> Numbers:
    name = dtype.name
    if name in _PLAIN:
        plain = data.view(_PLAIN[name])
        if is_exact_integer(dtype):
            return plain
        return plain.astype(np.complex128 if plain.dtype.kind == "c" else np.float64)
    if name == "bfloat16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if name == "complex32":
        halves = data.view("<f2").astype(np.float64)
        return halves.view(np.complex128)
    if name == "float8_e8m0fnu":
        return _e8m0()[data]
    if name == "float4_e2m1fn_x2":
        both = np.empty((len(data), 2), np.uint8)
        both[:, 0], both[:, 1] = data & 15, data >> 4
        return _table(name)[both.reshape(-1)]
    return _table(name)[data]


def as_float(numbers: Numbers) -> Numbers:
    """Integers as float64; float64 and complex128 as they are."""
    return numbers if numbers.dtype.kind in "fc" else numbers.astype(np.float64)


@functools.cache
def _table(name: str) -> npt.NDArray[np.float64]:
    exponent_bits, mantissa_bits, bias, top = _SMALL[name]
    width = 1 + exponent_bits + mantissa_bits
    values = np.empty(1 << width, np.float64)
    for code in range(1 << width):
        sign = -1.0 if code >> (width - 1) else 1.0
        exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        all_ones = exponent == (1 << exponent_bits) - 1
        is_nan = {
            "fnuz": code == 1 << (width - 1),
            "fn": all_ones and mantissa == (1 << mantissa_bits) - 1,
            "ieee": all_ones and mantissa > 0,
            "finite": False,
        }
        if is_nan[top]:
            values[code] = np.nan
        elif top == "ieee" and all_ones:
            values[code] = sign * np.inf
        elif exponent:
            values[code] = sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        else:
            values[code] = sign * mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
    return values


@functools.cache
def _e8m0() -> npt.NDArray[np.float64]:
    values = 2.0 ** np.arange(-127.0, 129.0)
    values[255] = np.nan
    return values
