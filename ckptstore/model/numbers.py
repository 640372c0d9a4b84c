"""Stored bytes as numbers to compute with (float64, complex128, or integers as they are), and back.

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

_PLAIN_FLOATS: Final = frozenset({"float16", "float32", "float64", "complex64", "complex128"})

Numbers = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


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


def can_encode(dtype: DType) -> bool:
    """Whether :func:`encode` can write it: floating-point and complex numbers of at least 8 bits.

    Not float8_e8m0fnu: it holds powers of two alone, the scales of other numbers.
    """
    name = dtype.name
    is_small = name in _SMALL and not name.startswith("float4")
    return name in _PLAIN_FLOATS or name in ("bfloat16", "complex32") or is_small


def encode(numbers: Numbers, dtype: DType) -> Bytes:
    """The bytes of float64 or complex128 numbers in a dtype, each rounded once, to the nearest, ties to even.

    What is too large becomes infinity, or NaN where the dtype has none.

    Args:
        dtype: one that :func:`can_encode` says yes to.
    """
    name = dtype.name
    with np.errstate(over="ignore", invalid="ignore"):  # signalling NaNs, and what is too large
        if name in _PLAIN_FLOATS:
            return np.ascontiguousarray(numbers).astype(_PLAIN[name]).view(np.uint8)
        if name == "complex32":
            return np.ascontiguousarray(numbers).view(np.float64).astype("<f2").view(np.uint8)
        if name == "bfloat16":
            return _bfloat16(numbers).view(np.uint8)
        return _small(numbers, name)


def _bfloat16(numbers: Numbers) -> npt.NDArray[np.uint16]:
    """By rounding the float64 itself: by way of float32 it would be rounded twice."""
    spare = 52 - 7  # bits of the mantissa
    bits = numbers.view(np.uint64)
    rounded = (bits + ((1 << (spare - 1)) - 1) + ((bits >> spare) & 1)) & ~np.uint64((1 << spare) - 1)
    quantum = 2.0**-133
    is_normal = np.abs(numbers) >= 2.0**-126
    exact = np.where(is_normal, rounded.view(np.float64), np.rint(numbers / quantum) * quantum)
    exact = np.where(np.isfinite(numbers), exact, numbers)
    found: npt.NDArray[np.uint16] = (exact.astype("<f4").view("<u4") >> 16).astype("<u2")
    found[np.isnan(numbers)] = 0x7FC0  # the upper half of a NaN may look like infinity
    return found


def _small(numbers: Numbers, name: str) -> Bytes:
    values, borders, too_large, nan = _borders(name)
    size = np.abs(numbers)
    codes = np.searchsorted(borders, size)
    # On a border both neighbours are as near, and the even code is the even mantissa.
    is_tie = borders[np.minimum(codes, len(borders) - 1)] == size
    codes += is_tie & (codes % 2 == 1)
    codes[codes >= len(values)] = too_large
    codes[np.isnan(numbers)] = nan
    signed = codes + 128 * np.signbit(numbers)
    if _SMALL[name][3] == "fnuz":  # where -0 would be is NaN
        signed = np.where((codes == 0) | (codes == nan), codes, signed)
    found: Bytes = signed.astype(np.uint8)
    return found


@functools.cache
def _borders(name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], int, int]:
    """(finite values from 0 on, by code; the borders between them; codes of what is too large and of NaN)."""
    positive = _table(name)[:128]
    values = positive[np.isfinite(positive)]
    top = values[-1] + (values[-1] - values[-2])
    borders = (values + np.append(values[1:], top)) / 2
    nan = int(np.flatnonzero(np.isnan(_table(name)))[0])
    infinite = np.flatnonzero(np.isinf(positive))
    return values, borders, int(infinite[0]) if len(infinite) else nan, nan


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
