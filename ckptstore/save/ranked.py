"""Saves by many ranks: one start, a part of each, one commit, one outcome (DESIGN part 6).

Rank 0 announces which pins hold; every rank writes its share and says so in its part; rank 0 waits for
all parts and commits. Whoever gives up creates VOID at the commit key: so every rank, garbage collection
and the manifest see the same end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ckptstore.errors import (
    CkptstoreError,
    DeadlineError,
    SaveFailedError,
    SessionSupersededError,
    UsageError,
)
from ckptstore.model.cuts import Int64s
from ckptstore.model.ids import Attempt, Digest
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.layout import Layout
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.model.tables import Locations
from ckptstore.ranks import Backoff, RankOptions, Ranks, show_ranks
from ckptstore.save.agree import Agreement, compared
from ckptstore.save.commit import Assembly, Saved, SaveRequest, commit
from ckptstore.save.cut import Share
from ckptstore.save.flatten import FlatState
from ckptstore.save.joined import Joined
from ckptstore.save.merge import Merger
from ckptstore.save.parts import WRITTEN, Part, Start
from ckptstore.save.phases import Phases
from ckptstore.save.plans import Plans
from ckptstore.save.reuse import Remembered, Reusable, ReuseIndex, pinned_contents
from ckptstore.save.room import ENDED, Room, reasons_of
from ckptstore.save.saver import Reporter, give_up
from ckptstore.save.session import Session
from ckptstore.save.share import write_part
from ckptstore.save.stale import warn_if_stale
from ckptstore.save.tables import TableWriter
from ckptstore.save.work import Work
from ckptstore.tier import commits, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Intent, Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

T = TypeVar("T")

_PATIENCE = 1.2
"""Who waits for rank 0 waits a little longer than rank 0 waits for the others: its word says more."""

_HERE = 0.25
"""After this share of the deadline, who waits for rank 0 says at which call it is."""

_CALLS = 8
"""So many of its own calls a rank remembers, to compare with what rank 0 has said."""

AGREED_CALLS = 2
"""In so many first saves of a session training waits until who writes what is agreed: the state is whole when
the optimizer has made a step. What changes later is agreed in the background."""


class UnwrittenError(SaveFailedError):
    """Who was to write something no longer holds it, and who holds it left it to that rank."""

    kind = "unwritten"


_REASONS = {
    DeadlineError.kind: "rank 0 did not commit it in time",
    UnwrittenError.kind: "who was to write something no longer holds it",
}
"""What a VOID says in a word, where no part says more."""

_UNTOUCHED = "older checkpoints are untouched; the next save starts anew"


@dataclasses.dataclass(frozen=True, slots=True)
class _Memory:
    """What a rank wrote of the last committed save.

    Attributes:
        rows: int64: which chunks of `layout` these are.
        agreement: that was followed.
    """

    stored: Remembered
    layout: Layout
    rows: Int64s
    agreement: Agreement

    def but_shared(self, agreement: Agreement) -> _Memory:
        """Without what was one rank's and is several ranks' by `agreement`: each of them wrote it.

        One copy was kept, perhaps another rank's: a pin does not hold ours.
        """
        kept = (self.agreement.shared(self.layout) | ~agreement.shared(self.layout))[self.rows]
        return _Memory(self.stored.only(kept), self.layout, self.rows[kept], self.agreement)


class RankedSaver:
    """One rank's side of the saves of one session.

    Every rank calls :meth:`agree` and :meth:`save` (or :meth:`cannot`) for the same attempts in the same
    order. Training calls `agree` and `cannot`; `save` may run behind it, one call after another.

    Attributes:
        session: whose saves these are.
    """

    def __init__(
        self,
        tier: Tier,
        session: Session,
        ranks: Ranks,
        options: RankOptions,
        *,
        must_reach: bool = False,
    ) -> None:
        """Begins the saves of a session.

        Args:
            must_reach: a save counts when it is in further tiers, too; of several ranks rank 0's word counts.
        """
        self._must_reach = must_reach
        self._tier = tier
        self.session = session
        self._ranks = ranks
        self._options = options
        self._merger = Merger()
        self._plans = Plans()
        self._forget = False  # the next start says so (rank 0)
        self._memory: _Memory | None = None
        self._told_layout: Digest | None = None  # of this rank's part of the last committed save
        self._warned = False
        self._decided: Room | None = None  # of the last commit, to be cleared (rank 0)
        self._shifts: dict[int, int] = {}  # of the session at this rank's own calls, by number
        self._ended: Attempt | None = None  # which others have given up

    # --- one save -----------------------------------------------------------------------------

    def agree(self, attempt: Attempt, flat: FlatState) -> tuple[Share, int]:
        """What this rank writes and compares of what it holds, and the number of the plan that says so.

        Training waits for the others here at the first two saves of a session, and at no other.

        Raises:
            SaveFailedError: the ranks could not agree; the attempt has ended for all.
        """
        self._shifts = {attempt.number: self.session.shift, **dict(list(self._shifts.items())[:_CALLS])}
        self._plans.begin(attempt.number)
        with self._saying_why(attempt):
            if attempt.number <= AGREED_CALLS:
                self._tier.check_marker()
                self._agree(Room(self._tier, attempt), attempt, flat)
            plan = self._plans.at(attempt.number)
            duty = plan.agreement.duty(flat.layout, self._ranks.rank)
            everything = self._options.check_replicas == "all"
            compare = compared(flat.layout, duty, attempt.number, everything=everything) & ~duty
            return Share(duty, compare), plan.said

    def save(self, request: SaveRequest, work: Work, bases: Sequence[Contents]) -> Saved | CommitRecord:
        """This rank's share of a save; returns when the outcome is known.

        Args:
            work: with the share and plan that :meth:`agree` said.
            bases: checkpoints whose chunks may be reused; only rank 0's count.

        Returns:
            On rank 0 all that was saved, on the others the record.

        Raises:
            SaveFailedError: it did not commit, and never will; names the ranks and their reasons.
            SessionSupersededError, WrongStoreError: nothing was committed.
        """
        try:
            return self._save(request, work, bases)
        finally:
            self._plans.end_in_order(work.attempt.number)

    def _save(self, request: SaveRequest, work: Work, bases: Sequence[Contents]) -> Saved | CommitRecord:
        attempt = work.attempt
        room = Room(self._tier, attempt, self._merger.known)
        with self._saying_why(attempt):
            self._tier.check_marker()
        if self._ranks.leads:
            return self._lead(room, request, work, bases)
        with self._saying_why(attempt):
            part = self._follow(room, work)
        try:
            record = self._outcome(room, attempt)
        except BaseException:
            if self._ended != attempt:
                self._plans.drop()
            raise
        self.session.base = Contents(self._tier, record)
        self._remember(record, part)
        return record

    def reach(self, attempt: Attempt, wait: Callable[[], None]) -> None:
        """After the commit: that it is in every tier that a save must reach; the same outcome on all ranks.

        Args:
            wait: rank 0's wait for those tiers; raises if one is not reached in time.

        Raises:
            SaveFailedError: it is not there, or rank 0 did not say that it is within the deadline.
        """
        if not self._must_reach:
            return
        try:
            if self._ranks.leads:
                self._say_reached(attempt, wait)
            else:
                self._hear_reached(attempt)
        except CkptstoreError as error:
            if isinstance(error, SaveFailedError):
                raise
            raise SaveFailedError(
                f"{self._name(attempt)} is committed in tier {self._tier.name!r}, and whether it is in the "
                f"other tiers is not known to all ranks: {error.message}",
                hint=error.hint or "`ckptstore status` shows what is where",
            ) from error

    def _say_reached(self, attempt: Attempt, wait: Callable[[], None]) -> None:
        room = Room(self._tier, attempt)
        try:
            wait()
        except BaseException as error:
            told = SaveFailedError(f"{type(error).__name__}: {error}")
            room.say_reached(error if isinstance(error, CkptstoreError) else told)
            raise
        room.say_reached(None)

    def _hear_reached(self, attempt: Attempt) -> None:
        room, pauses = Room(self._tier, attempt), self._backoff(_PATIENCE)
        while not room.heard_reached():
            if not pauses.pause():
                raise DeadlineError(
                    f"rank 0 said nothing of them in {self._options.deadline_seconds:g} s",
                    hint="look at the log of rank 0; `ckptstore status` shows what is where",
                )

    @contextlib.contextmanager
    def _saying_why(self, attempt: Attempt) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.cannot(attempt, error)
            told = self._told(attempt, error)
            if told is error:
                raise
            raise told from error

    def cannot(self, attempt: Attempt, error: BaseException) -> None:
        """Says that this rank cannot do its part, so that no other waits for it until the deadline."""
        self._plans.begin(attempt.number)  # it may not have come to `agree`
        try:
            self._cannot(attempt, error)
        finally:
            self._plans.end(attempt.number)

    def _cannot(self, attempt: Attempt, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, CkptstoreError):  # with the remedy, unless that is the usual one
            reason = error.message if error.hint == _UNTOUCHED else str(error)
        if attempt == self._ended:
            reason = ENDED  # each would only repeat all others
        try:
            part = Part.failed(self._ranks.rank, attempt.step, attempt.number, reason[:2000])
            Room(self._tier, attempt).say_part(part)
        except CkptstoreError as second:
            log.warning("rank %d could not say why it failed: %s", self._ranks.rank, second.message)
        self._give_up(attempt, error)

    def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        if give_up(self._tier, self.session, str(attempt), error, leads=self._ranks.leads):
            self._plans.take_back(attempt.number)
        else:
            self._plans.drop()

    def _told(self, attempt: Attempt, error: BaseException) -> BaseException:
        """The error as callers see it."""
        if not isinstance(error, CkptstoreError) or isinstance(
            error, (SessionSupersededError, SaveFailedError)
        ):
            return error
        return SaveFailedError(
            f"{self._name(attempt)} failed: {error.message}", hint=error.hint or _UNTOUCHED
        )

    def _name(self, attempt: Attempt) -> str:
        return f"save of run {self.session.epoch.run!r} step {attempt.step}"

    # --- who writes what ----------------------------------------------------------------------

    def _agree(self, room: Room, attempt: Attempt, flat: FlatState) -> None:
        """At the first saves: rank 0 learns what all hold, and says who writes what."""
        if not self._ranks.leads:
            room.say_holding(self._ranks.rank, flat.layout, flat.may_differ)
            self._plans.agree(self._await_plan(room, attempt), attempt.number)
            return
        layouts = [flat.layout, *self._of_others(room, attempt, room.holdings, "say what they hold")]
        agreement = self._planned(layouts, {*flat.may_differ, *room.may_differ})
        room.say_plan(agreement)
        self._plans.agree(agreement, attempt.number, layouts)

    def _planned(self, layouts: Sequence[Layout], may_differ: Collection[str]) -> Agreement:
        if self._options.replicas == "warn":  # whatever differs, the lowest rank's is to be kept
            may_differ = {name for layout in layouts for name in layout.heads.names}
        return Agreement.of(layouts, may_differ, self._plans.before())

    def _await_plan(self, room: Room, attempt: Attempt) -> Agreement:
        wait = self._backoff(_PATIENCE)
        while True:
            plan = room.plan()
            if plan is not None:
                return plan
            self._raise_not_begun(room, attempt)
            if not wait.pause():
                raise self._nothing_from_rank_0(attempt)

    def _renew(self, parts: Sequence[Part], call: int) -> None:
        """What the ranks hold now is agreed anew, and said with the next start."""
        layouts = [part.layout for part in parts]
        if self._plans.is_news(layouts, call):
            may_differ = {name for names in {part.may_differ for part in parts} for name in names}
            self._plans.renew(self._planned(layouts, may_differ), layouts, call)

    def _merged(self, parts: list[Part], attempt: Attempt) -> tuple[Assembly, list[str]]:
        """One checkpoint of all parts, and notes on what differed by design.

        Raises:
            UnwrittenError: the plans leave something out. All ranks learn so by the VOID and drop them, until
                a new one counts that the next start says; whoever learns it late fails the next save alike.
            SaveFailedError: the parts make no checkpoint.
        """
        try:
            return self._merger.merge(parts, self._name(attempt), replicas=self._options.replicas)
        except SaveFailedError as error:
            if not _leave_something_out(parts):
                raise
            self._plans.drop()
            self._renew(parts, attempt.number)
            # By this kind the VOID names it: of a cause it would name that one's.
            raise UnwrittenError(error.message, hint=error.hint) from None

    # --- rank 0 -------------------------------------------------------------------------------

    def _lead(
        self,
        room: Room,
        request: SaveRequest,
        work: Work,
        bases: Sequence[Contents],
    ) -> Saved:
        tier, session, attempt = self._tier, self.session, work.attempt
        phases = Phases(tier.environment.monotonic)
        pins: dict[Pin, Contents] = {(run_key_of(b.record.run), b.record.attempt): b for b in bases}
        with self._saying_why(attempt):
            intent = Intent.announce(tier, "save", str(attempt), session.epoch.run, pins)
        with intent, self._saying_why(attempt):
            session.check_current()
            surviving = intent.surviving()
            alive = tuple(pin for pin in pins if pin in surviving)
            agreement = self._plans.say(attempt.number)
            if agreement is not None:
                room.say_plan(agreement)
            room.say_start(
                Start(
                    str(attempt),
                    request.step,
                    attempt.number,
                    alive,
                    plan=agreement is not None,
                    world_size=self._ranks.world_size,
                    forget=self._forget,
                    must_reach=self._must_reach,
                )
            )
            index = self._index(attempt, [(pin, pins[pin]) for pin in alive])
            phases.end("prepare")
            part = write_part(tier, self._ranks.rank, work, index)
            phases.end("write")
            parts = [part, *self._of_others(room, attempt, room.parts, "finish")]
            phases.end("parts")
            phases.note("capture" if work.in_background else "wait", work.captured_seconds)
            assembly, notes = self._merged(parts, attempt)
            saved = commit(
                tier,
                session,
                self._noted(request, notes),
                str(attempt),
                assembly,
                TableWriter(tier.backend, index, str(attempt), 0, work.flat.layout.chunk_bytes),
                phases,
                world_size=self._ranks.world_size,
            )
        self._warn_if_stale(saved.contents, work, part)
        session.base = saved.contents
        self._remember(saved.record, part)
        # Ranks that followed different plans may have written the same: one copy of it was kept.
        self._forget = len({other.plan for other in parts}) > 1
        if self._forget:
            self._plans.say_anew(attempt.number)
        self._renew(parts, attempt.number)
        if self._decided is not None:
            # All have done their part of this save, so none waits for the outcome of the one before.
            self._decided.clear()
        self._decided = room
        return saved

    def _warn_if_stale(self, saved: Contents, work: Work, part: Part) -> None:
        """By what rank 0 holds of the state: the trainable tensors of the others change with its own."""
        trainable = work.trainable
        if trainable is not None:
            names = {
                name for name, one in zip(part.layout.heads.names, trainable.tolist(), strict=True) if one
            }
            trainable = np.array([name in names for name in saved.layout.heads.names], bool)
        warn_if_stale(saved, self.session.base, trainable, work)

    def _noted(self, request: SaveRequest, notes: list[str]) -> SaveRequest:
        if not notes:
            return request
        if not self._warned:
            self._warned = True
            log.warning(
                "run %r: what differs between ranks by design is kept of the lowest: %s%s",
                self.session.epoch.run,
                "; ".join(notes[:4]),
                f"; and {len(notes) - 4} more" if len(notes) > 4 else "",
            )
        return dataclasses.replace(request, state_info={**request.state_info, "replicas": notes[:100]})

    def _of_others(self, room: Room, attempt: Attempt, said: Mapping[int, T], what: str) -> list[T]:
        """What each other rank has said, by rank, when all have; `said` is filled by looking."""
        others = range(1, self._ranks.world_size)
        wait = self._backoff()
        while True:
            room.look()
            self._raise_failed(room, attempt)
            missing = [rank for rank in others if rank not in said]
            if not missing:
                return [said[rank] for rank in others]
            if not wait.pause():
                raise self._missing(attempt, missing, what)

    def _raise_failed(self, room: Room, attempt: Attempt) -> None:
        reasons = reasons_of({rank: part.error for rank, part in room.parts.items()})
        if reasons:
            raise SaveFailedError(f"{self._name(attempt)} failed: {reasons}", hint=_UNTOUCHED)

    def _missing(self, attempt: Attempt, ranks: Sequence[int], what: str) -> DeadlineError:
        return DeadlineError(
            f"{show_ranks(ranks)} did not {what} in "
            f"{self._options.deadline_seconds:g} s{self._elsewhere(attempt, ranks)}",
            hint="look at their logs: they may have died, or missed a call of save",
        )

    def _elsewhere(self, attempt: Attempt, ranks: Sequence[int]) -> str:
        """Where the missing ranks are instead: one that missed a call is told so by name."""
        found = sorted(
            (rank, other)
            for rank, other in self._calls(attempt)
            if rank in ranks and other != attempt and other.number >= attempt.number
        )
        lines = [f"rank {rank} was at step {other.step} in its call {other.number}" for rank, other in found]
        return f" (this is call {attempt.number}; {'; '.join(lines[-4:])})" if lines else ""

    def _calls(self, attempt: Attempt) -> set[tuple[int, Attempt]]:
        """(rank, attempt) of what ranks have said in this session, as far as it was not cleared."""
        found = set()
        for info in self._tier.listing("parts/"):
            owner, _, name = info.key.removeprefix("parts/").partition("/")
            said = name.removesuffix(layout.DOCUMENT)
            rank = "0" if said in ("start", "plan") else said.removeprefix("plan.")
            try:
                other = Attempt.parse(owner)
            except ValueError:
                continue
            if other.session == attempt.session and rank.isdigit():
                found.add((int(rank), other))
        return found

    def catch_up(self, attempt: Attempt) -> Attempt:
        """The attempt of this call, of a rank that has joined the session too late for earlier ones."""
        theirs = max((other for rank, other in self._calls(attempt) if rank == 0), key=_number, default=None)
        if theirs is None:
            return attempt
        goes_on = theirs.step == attempt.step and not self._has_ended(theirs)
        self.session.skip_to(theirs.number - 1 if goes_on else theirs.number)
        return self.session.next_attempt(attempt.step)

    def _has_ended(self, attempt: Attempt) -> bool:
        return commits.read_commit(self._tier, self.session.run_key, str(attempt)) is not None

    def _count_as_rank_0(self, attempt: Attempt) -> None:
        """After a call that rank 0 made under another number: from the next on they are the same.

        Training may have made further calls since, and so may rank 0: only how far the numbers of one call
        lie apart tells something. A call that rank 0 has not come to yet tells nothing.
        """
        try:
            said = self._calls(attempt)
        except CkptstoreError as error:
            log.warning("rank 0's count of saves is not known: %s", error.message)
            return
        theirs = sorted((other for rank, other in said if rank == 0), key=_number)
        numbers = {other.step: other.number for other in theirs}
        if attempt in theirs or attempt.step not in numbers:
            return
        self.session.shift_to(self._shifts.get(attempt.number, 0) + numbers[attempt.step] - attempt.number)

    # --- the others ---------------------------------------------------------------------------

    def _follow(self, room: Room, work: Work) -> Part:
        attempt = work.attempt
        start = self._await_start(room, attempt)
        if start.world_size != self._ranks.world_size:
            raise UsageError(
                f"rank 0 saves with {start.world_size} ranks, rank {self._ranks.rank} with "
                f"{self._ranks.world_size}",
                hint="give all ranks the same world_size=",
            )
        if start.plan:
            self._plans.hear(self._await_plan(room, attempt), attempt.number)
        if start.forget:
            self._memory = None
        self._must_reach = start.must_reach
        index = self._index(attempt, [(pin, None) for pin in start.pins])
        part = write_part(self._tier, self._ranks.rank, work, index)
        # Rank 0 keeps the layouts of the last committed save.
        told, self._told_layout = self._told_layout, None
        room.say_part(part, with_layout=told != part.layout.digest)
        return part

    def _await_start(self, room: Room, attempt: Attempt) -> Start:
        wait = self._backoff(_PATIENCE)
        clock = self._tier.environment.monotonic
        # At the first calls what it holds has told already.
        when_to_say = (
            None if attempt.number <= AGREED_CALLS else clock() + _HERE * self._options.deadline_seconds
        )
        while True:
            start = room.start()
            if start is not None:
                return start
            self._raise_not_begun(room, attempt)
            if when_to_say is not None and clock() >= when_to_say:
                room.say_here(self._ranks.rank)
                when_to_say = None
            if not wait.pause():
                raise self._nothing_from_rank_0(attempt)

    def _raise_not_begun(self, room: Room, attempt: Attempt) -> None:
        """Raises if others have given the attempt up, of which rank 0 has said nothing yet."""
        try:
            self._raise_ended(room, attempt)
        except SaveFailedError:
            self._count_as_rank_0(attempt)
            raise

    def _nothing_from_rank_0(self, attempt: Attempt) -> DeadlineError:
        where = self._elsewhere(attempt, [0]) or f" (this is call {attempt.number})"
        self._count_as_rank_0(attempt)
        return DeadlineError(
            f"rank 0 did not begin it in {self._options.deadline_seconds:g} s{where}",
            hint="every rank must call save for the same steps in the same order; look at the log of rank 0",
        )

    def _outcome(self, room: Room, attempt: Attempt) -> CommitRecord:
        """What has become of the attempt; whoever has waited long enough ends it.

        Raises:
            SaveFailedError: it did not commit, with the reasons of all ranks.
        """
        wait = self._backoff(_PATIENCE)
        while True:
            record = self._raise_ended(room, attempt)
            if record is not None:
                return record
            if not wait.pause():
                late = DeadlineError(
                    f"rank 0 did not commit it in {self._options.deadline_seconds:g} s",
                    hint="look at the log of rank 0",
                )
                self._give_up(attempt, late)
                record = self._raise_ended(room, attempt)
                if record is not None:
                    return record
                raise self._told(attempt, late)

    def _raise_ended(self, room: Room, attempt: Attempt) -> CommitRecord | None:
        found = commits.read_commit(self._tier, self.session.run_key, str(attempt))
        if isinstance(found, CommitEnd):
            self._ended = attempt
            if found.reason == UnwrittenError.kind:
                self._plans.drop()
            else:
                self._plans.take_back(attempt.number)
            if found.reason == SessionSupersededError.kind:
                self.session.check_current()  # raises, and says by whom
            reason = room.reasons() or _REASONS.get(found.reason, found.reason)
            if found.kind == "gone":
                reason = "it was committed, and has been collected since"
            raise SaveFailedError(f"{self._name(attempt)} failed: {reason}", hint=_UNTOUCHED)
        return found

    # --- writing ------------------------------------------------------------------------------

    def _index(self, number: Attempt, pins: Sequence[tuple[Pin, Contents | None]]) -> ReuseIndex:
        """What may be reused: of the last save what this rank remembers, of others their tables."""
        found: list[Reusable] = []
        newest = self._plans.newest
        if self._memory is not None and newest is not None and not self._ranks.leads:
            # Of what several write, the lowest rank's is kept: of rank 0, always its own.
            self._memory = self._memory.but_shared(newest.agreement)
        memory = self._memory
        for (run_key, attempt), contents in pins:
            if memory is not None and memory.stored.record.attempt == attempt:
                found.append(memory.stored)
                continue
            if contents is None:
                contents = pinned_contents(self._tier, run_key, attempt)
            if contents is not None:
                found.append(contents)
        return ReuseIndex(found, self._tier.backend, Reporter(self._tier).report, number.number)

    def _remember(self, record: CommitRecord, part: Part) -> None:
        """What the next save may reuse without reading tables: the rows that only this rank wrote."""
        self._told_layout = part.layout.digest
        plan = self._plans.said_with(part.plan)
        if plan is None:
            self._memory = None
            return
        # A box that is not in the agreement was written by all its holders, and one of them was kept.
        mine = np.flatnonzero((part.state == WRITTEN) & plan.agreement.known(part.layout))
        lengths = part.layout.chunks.nbytes[mine]
        locations = Locations(part.objects[mine], part.offsets[mine], lengths, np.zeros(len(mine), np.uint8))
        digests: list[Digest] = [part.digests[row] for row in mine.tolist()]
        stored = Remembered(record, digests, locations, part.keys)
        self._memory = _Memory(stored, part.layout, mine, plan.agreement)

    def _backoff(self, patience: float = 1.0) -> Backoff:
        seconds = self._options.deadline_seconds * patience
        return Backoff(self._tier.environment, seconds, self._ranks.world_size)


def _leave_something_out(parts: Sequence[Part]) -> bool:
    """Whether no rank wrote some chunk that ranks hold."""
    joined = Joined.of([part.layout for part in parts], [])
    if not joined.layout.chunk_count:
        return False
    written = np.zeros(joined.layout.chunk_count, bool)
    written[joined.row[np.concatenate([part.state for part in parts]) == WRITTEN]] = True
    return not written.all()


def _number(attempt: Attempt) -> int:
    return attempt.number
