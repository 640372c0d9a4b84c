"""Options of the form NAME=VALUE."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TypeVar

import click

T = TypeVar("T")

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LARGEST = 2**63


def pair(text: str) -> tuple[str, str]:
    """``NAME=VALUE``, divided at the first ``=``.

    Raises:
        click.BadParameter: there is none, or nothing before it.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def number_pair(text: str) -> tuple[str, int | float]:
    """``NAME=NUMBER``; nan and inf are numbers.

    Raises:
        click.BadParameter: it is not.
    """
    name, value = pair(text)
    try:
        return name, int(value) if re.fullmatch(r"[+-]?[0-9]{1,18}", value) else float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number, as {name!r} wants to be") from None


def guessed_pair(text: str) -> tuple[str, str | int | float]:
    """``NAME=VALUE``, where a value that is written as a number is one; ``007`` and ``nan`` are text.

    Raises:
        click.BadParameter: it is none.
    """
    name, value = pair(text)
    if _INTEGER.fullmatch(value):
        return name, int(value) if -_LARGEST <= int(value) < _LARGEST else value
    if _REAL.fullmatch(value) and not value.lstrip("+-").isdigit() and math.isfinite(float(value)):
        return name, float(value)
    return name, value


def once(items: Iterable[tuple[str, T]], option: str) -> dict[str, T]:
    """Pairs as a dict.

    Raises:
        click.BadParameter: a name stands twice.
    """
    found: dict[str, T] = {}
    for name, value in items:
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice", param_hint=option)
        found[name] = value
    return found
