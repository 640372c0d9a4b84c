"""Checking what callers give along with a state, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.errors import UsageError
from ckptstore.model import values
from ckptstore.model.ids import check_name

_MAX_METADATA_BYTES = 4 << 20


def check_metrics(metrics: Mapping[str, int | float]) -> dict[str, int | float]:
    """Metrics as plain numbers by name.

    Raises:
        UsageError: names the metric that is not a real number.
    """
    given: object = metrics
    if not isinstance(given, Mapping):
        raise UsageError(f"metrics must map names to numbers, not be a {type(given).__name__}")
    return {check_name("a metric's name", name): _number(name, value) for name, value in given.items()}


def _number(name: str, value: Any) -> int | float:
    """A metric as a plain int or float; a tensor or array of one element counts as its number."""
    number = value
    if callable(getattr(value, "item", None)):
        try:
            number = value.item()
        except (ValueError, RuntimeError):
            raise UsageError(f"metric {name!r} has more than one element", hint="pass one number") from None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise UsageError(
            f"metric {name!r} must be a number, not {type(value).__name__}", hint="pass float(value)"
        )
    if isinstance(number, float):
        return float(number)
    if not -(2**63) <= number < 2**63:
        raise UsageError(f"metric {name!r} does not fit in 64 bits", hint="pass float(value)")
    return int(number)


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """That metadata can be stored.

    Raises:
        UnsupportedValueError, UsageError: names what cannot.
    """
    for name in metadata:
        if not isinstance(name, str):
            raise UsageError(f"metadata keys must be str, not {type(name).__name__} ({name!r})")
    size = len(values.encode(dict(metadata), "metadata"))
    if size > _MAX_METADATA_BYTES:
        raise UsageError(
            f"metadata takes {size} bytes, more than {_MAX_METADATA_BYTES}", hint="put it into the state"
        )
