"""What ckptstore is held to: an aim, the figure of this run, and whether it was met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """One aim. `figure` and `limit` are in the unit that `aim` names."""

    what: str
    aim: str
    figure: float
    limit: float
    at_most: bool
    """True: the figure is to be at most the limit. False: at least."""
    note: str = ""

    @property
    def met(self) -> bool:
        return self.figure <= self.limit if self.at_most else self.figure >= self.limit


def as_json(goals: Sequence[Goal]) -> list[dict[str, Any]]:
    return [{**asdict(goal), "met": goal.met} for goal in goals]


def table(goals: Sequence[Goal]) -> list[str]:
    """Lines for people: aim, figure, met or MISSED."""
    width = max((len(goal.what) for goal in goals), default=0)
    aims = max((len(goal.aim) for goal in goals), default=0)
    return [
        f"  {goal.what:<{width}}  {goal.aim:<{aims}}  {goal.figure:>9.3f}  "
        f"{'met' if goal.met else 'MISSED':<6}{'  ' + goal.note if goal.note else ''}".rstrip()
        for goal in goals
    ]
