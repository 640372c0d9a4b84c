"""The text in which Prometheus reads metrics.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/, "Text-based format" (0.0.4).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

from ckptstore.errors import UsageError

Kind = Literal["counter", "gauge", "histogram", "summary"]
Labels: TypeAlias = tuple[tuple[str, str], ...]

NAMESPACE = "ckptstore"

_NAMESPACE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclasses.dataclass(frozen=True, slots=True)
class Definition:
    """A metric: what it is called and what it tells.

    Attributes:
        name: without namespace, and of a counter without ``_total``; ends with the unit.
        labels: names of its labels, in the order in which they are written.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One number of a metric.

    Attributes:
        suffix: of the name: ``_total`` of a counter; ``_bucket``, ``_sum``, ``_count`` of distributions.
    """

    suffix: str
    labels: Labels
    value: int | float


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A metric with its numbers.

    Attributes:
        name: with namespace, and of a counter without ``_total``.
    """

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]


def check_namespace(namespace: str) -> str:
    """A usable beginning of metric names.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise UsageError(
            f"namespace={namespace!r} cannot begin the name of a metric",
            hint="use letters, digits and underscores, a letter first",
        )
    return namespace


def exposition(families: Iterable[Family]) -> str:
    """The text of `families`; those without samples are left out."""
    return "".join(f"{line}\n" for family in families if family.samples for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    # In this version of the format the name of a counter is that of its samples.
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    yield f"# HELP {name} {family.help.translate(_IN_HELP)}"
    yield f"# TYPE {name} {family.kind}"
    for sample in family.samples:
        labels = ",".join(f'{label}="{value.translate(_IN_LABELS)}"' for label, value in sample.labels)
        braces = f"{{{labels}}}" if labels else ""
        yield f"{family.name}{sample.suffix}{braces} {number(sample.value)}"


_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABELS = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def number(value: int | float) -> str:
    """As the format writes it: ``12``, ``0.5``, ``+Inf``, ``NaN``."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
