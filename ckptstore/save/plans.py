"""Which agreement on who writes what a rank follows at which call, and which one rank 0 has yet to say.

Training asks for the plan of a call while an older save, in a thread of its own, hears of plans and takes
them back.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

from ckptstore.model.layout import Layout
from ckptstore.save.agree import Agreement

_KEPT_PLANS = 5
"""Older plans than these many nobody follows."""

PLAN_DELAY = 2
"""A plan said with a start counts from so many calls later on: those before may be captured by then."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """An agreement, and when it was said.

    Attributes:
        said: number of the call with which all ranks were told.
        first: place of the first call that follows it.
    """

    agreement: Agreement
    said: int
    first: int


NO_PLAN = Plan(Agreement.of([]), 0, 0)
"""Everybody writes all that it holds: more than needed, never less."""


class Plans:
    """The plans of one rank in one session. Thread-safe.

    A call's *place* is its number among the calls that were not skipped: all ranks skip the same ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: list[Plan] = []  # by when they were said
        self._unsaid: Agreement | None = None  # newer, and not heard by all yet (rank 0)
        self._layouts: Sequence[Layout] | None = None  # what the newest of all was made from (rank 0)
        self._layouts_of = 0  # the call in which ranks held these
        self._places: dict[int, int] = {}  # of the calls under way, by number
        self._count = 0

    # --- calls --------------------------------------------------------------------------------

    def begin(self, call: int) -> None:
        """A call is under way; saying so again changes nothing."""
        with self._lock:
            if call not in self._places:
                self._count += 1
                self._places[call] = self._count

    def end(self, call: int) -> None:
        """A call is not under way any more."""
        with self._lock:
            self._places.pop(call, None)

    def end_in_order(self, call: int) -> None:
        """Neither is any before it."""
        with self._lock:
            ended = self._places.pop(call, 0)
            self._places = {call: place for call, place in self._places.items() if place > ended}

    # --- following ----------------------------------------------------------------------------

    @property
    def newest(self) -> Plan | None:
        """The one said last, whether it counts yet or not."""
        with self._lock:
            return self._plans[-1] if self._plans else None

    def said_with(self, call: int) -> Plan | None:
        """The plan said with a call, unless it was taken back."""
        with self._lock:
            return next((plan for plan in reversed(self._plans) if plan.said == call), None)

    def at(self, call: int) -> Plan:
        """The plan that a call under way follows.

        It is :data:`NO_PLAN` while a call is under way by which others may have heard a plan that counts by
        now. Training does not wait for that one if a call between failed early on this rank alone.
        """
        with self._lock:
            place = self._places[call]
            if any(other <= place - PLAN_DELAY for other in self._places.values()):
                return NO_PLAN
            return next((plan for plan in reversed(self._plans) if plan.first <= place), NO_PLAN)

    def agree(self, agreement: Agreement, call: int, layouts: Sequence[Layout] | None = None) -> None:
        """All ranks have been told in this call, and follow it from this one on.

        Args:
            layouts: of all ranks, on rank 0: what it was made from.
        """
        with self._lock:
            if layouts is not None:
                self._layouts, self._layouts_of, self._unsaid = layouts, call, None
            self._add(Plan(agreement, call, self._places[call]))

    def hear(self, agreement: Agreement, call: int) -> None:
        """A plan came with the start of this call."""
        with self._lock:
            self._add(self._later(agreement, call))

    def take_back(self, call: int) -> None:
        """A plan said with a call that failed was not heard by all: none follows it, and it is said anew.

        Each rank knows of the failure before a call could follow it: see :meth:`at`.
        """
        with self._lock:
            for plan in self._plans[-1:]:  # an older one needs no saying any more
                if plan.said == call:
                    self._unsaid = self._unsaid or plan.agreement
            self._plans = [plan for plan in self._plans if plan.said != call]

    def drop(self) -> None:
        """Where it is not known what the others know: whoever follows no plan leaves nothing unwritten."""
        with self._lock:
            if self._plans:
                self._unsaid = self._unsaid or self._plans[-1].agreement
            self._plans = []

    # --- rank 0 -------------------------------------------------------------------------------

    def say(self, call: int) -> Agreement | None:
        """What is to be said with the start of this call, if anything; :meth:`take_back` if that fails."""
        with self._lock:
            agreement, self._unsaid = self._unsaid, None
            if agreement is not None:
                self._add(self._later(agreement, call))
            return agreement

    def say_anew(self, call: int) -> None:
        """Who did not learn an outcome follows no plan: all are told one, unless one is on its way."""
        with self._lock:
            if self._plans and self._plans[-1].first <= self._place_of(call):
                self._unsaid = self._unsaid or self._plans[-1].agreement

    def is_news(self, layouts: Sequence[Layout], call: int) -> bool:
        """Whether what the ranks held in a call is to be agreed on anew."""
        with self._lock:
            return self._is_news(layouts, call)

    def before(self) -> Agreement | None:
        """What a new agreement goes on from."""
        with self._lock:
            return self._plans[-1].agreement if self._plans else self._unsaid

    def renew(self, agreement: Agreement, layouts: Sequence[Layout], call: int) -> None:
        """What the ranks held in a call has been agreed on; unless a later call has been meanwhile."""
        with self._lock:
            if self._is_news(layouts, call):
                self._layouts, self._layouts_of, self._unsaid = layouts, call, agreement

    # --- with the lock ------------------------------------------------------------------------

    def _is_news(self, layouts: Sequence[Layout], call: int) -> bool:
        # What ranks hold in a later call is agreed already, if training has come to it.
        return layouts != self._layouts and call >= self._layouts_of

    def _later(self, agreement: Agreement, call: int) -> Plan:
        return Plan(agreement, call, self._place_of(call) + PLAN_DELAY)

    def _place_of(self, call: int) -> int:
        return self._places.get(call, self._count)

    def _add(self, plan: Plan) -> None:
        # Of two, training may have heard the later one first.
        self._plans = sorted([*self._plans, plan], key=lambda one: one.said)[-_KEPT_PLANS:]
