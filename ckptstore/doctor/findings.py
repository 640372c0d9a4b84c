"""What doctor says of one thing that it looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeAlias

from ckptstore.errors import CkptstoreError

Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: of the probe; stable.
        status: "warn": it works, but a person should know; "fail": something does not work.
        found: what was seen.
        meaning: what follows from it, or what to do; empty where all is well.
        tier: name of the tier that it is about; None for the installation and the store as a whole.
    """

    name: str
    status: Status
    found: str
    meaning: str = ""
    tier: str | None = None


def judged(name: str, found: str, meaning: str, *, bad: bool, status: Status = "warn") -> Finding:
    """A finding that is as `status` says if `bad`, and without a meaning if not."""
    return Finding(name, status if bad else "ok", found, meaning if bad else "")


Probe: TypeAlias = Callable[[], Iterator[Finding]]


def made(probes: Iterable[Probe], tier: str | None) -> Iterator[Finding]:
    """What each probe finds, as it is found; a probe that fails is a finding, and the next one follows.

    Args:
        tier: name of the tier that all of them are about.
    """
    for probe in probes:
        try:
            for finding in probe():
                yield finding if tier is None else dataclasses.replace(finding, tier=tier)
        except CkptstoreError as error:
            yield Finding("probe", "fail", error.message, error.hint or "", tier)
        except OSError as error:
            yield Finding("probe", "fail", str(error), "the file system did not answer", tier)
