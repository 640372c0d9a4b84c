"""Element types: names (torch's), stable codes for the format, sizes.

Codes are append-only: they are part of the format (docs/format.md).
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class DType:
    """One element type; ``itemsize`` in bytes (a packed pair of 4-bit floats is one element)."""

    code: int
    name: str
    itemsize: int


_ROWS: Final = (
    (1, "bool", 1),
    (2, "uint8", 1),
    (3, "int8", 1),
    (4, "uint16", 2),
    (5, "int16", 2),
    (6, "uint32", 4),
    (7, "int32", 4),
    (8, "uint64", 8),
    (9, "int64", 8),
    (10, "float16", 2),
    (11, "bfloat16", 2),
    (12, "float32", 4),
    (13, "float64", 8),
    (14, "complex32", 4),
    (15, "complex64", 8),
    (16, "complex128", 16),
    (17, "float8_e4m3fn", 1),
    (18, "float8_e4m3fnuz", 1),
    (19, "float8_e5m2", 1),
    (20, "float8_e5m2fnuz", 1),
    (21, "float8_e8m0fnu", 1),
    (22, "float4_e2m1fn_x2", 1),
)

BY_CODE: Final = {code: DType(code, name, size) for code, name, size in _ROWS}
BY_NAME: Final = {dtype.name: dtype for dtype in BY_CODE.values()}
