"""One save by many ranks: start, parts, one commit, one outcome (DESIGN part 6).

Rank 0 announces which pins hold; every rank writes its share and says so in its part; rank 0 waits for
all parts and commits. Whoever gives up creates VOID at the commit key: so every rank, garbage collection
and the manifest see the same end.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from ckptstore.errors import (
    CkptstoreError,
    DamageError,
    DeadlineError,
    SaveFailedError,
    SessionSupersededError,
)
from ckptstore.model.ids import Attempt
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.pool import Pool, default_threads
from ckptstore.ranks import Backoff, show_ranks
from ckptstore.save.agree import Agreement, compared
from ckptstore.save.commit import Saved, SaveRequest, commit
from ckptstore.save.flatten import FlatState
from ckptstore.save.merge import Merger
from ckptstore.save.parts import (
    COMPARED,
    LEFT,
    WRITTEN,
    Part,
    Start,
    decode_part,
    decode_start,
    encode_part,
    encode_start,
)
from ckptstore.save.phases import Phases
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.saver import Reporter, fence
from ckptstore.save.session import Session
from ckptstore.save.tables import TableWriter
from ckptstore.save.write import Writer
from ckptstore.tier import commits, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Intent, Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How the ranks save together.

    Attributes:
        agreement: who writes what.
        replicas: "strict" or "warn", see :func:`ckptstore.save.merge.merge`.
        check_replicas: "sample" or "all".
        deadline_seconds: how long to wait for the others.
    """

    rank: int
    world_size: int
    agreement: Agreement
    replicas: str
    check_replicas: str
    deadline_seconds: float


def lead(
    tier: Tier, session: Session, request: SaveRequest, flat: FlatState, bases: Sequence[Contents], plan: Plan
) -> Saved:
    """Rank 0's save: returns when it is committed.

    Raises:
        SaveFailedError: names the ranks that failed or are missing, with their reasons.
        SessionSupersededError, WrongStoreError: nothing was committed.
    """
    attempt = session.next_attempt(request.step)
    phases = Phases(tier.environment.monotonic)
    tier.check_marker()
    session.check_current()
    pins: dict[Pin, Contents] = {(run_key_of(b.record.run), b.record.attempt): b for b in bases}
    with Intent.announce(tier, "save", str(attempt), session.epoch.run, pins) as intent:
        try:
            alive = tuple(pin for pin in pins if pin in intent.surviving())
            start = Start(str(attempt), request.step, attempt.number, alive)
            tier.put_new(layout.start_key(str(attempt)), encode_start(start))
            index = ReuseIndex([pins[pin] for pin in alive], tier.backend, Reporter(tier).report)
            phases.end("prepare")
            mine = _write(tier, flat, attempt, index, plan)
            phases.end("write")
            parts = _all_parts(tier, session, attempt, mine, plan)
            phases.end("parts")
            assembly, notes = Merger().merge(
                parts, f"save of run {session.epoch.run!r} step {request.step}", replicas=plan.replicas
            )
            for line in notes:
                log.info("run %r step %d: %s", session.epoch.run, request.step, line)
            noted = dataclasses.replace(
                request, state_info={**request.state_info, **({"replicas": notes} if notes else {})}
            )
            tables = TableWriter(tier.backend, index, str(attempt), 0, flat.layout.chunk_bytes)
            saved = commit(
                tier, session, noted, str(attempt), assembly, tables, phases, world_size=plan.world_size
            )
        except BaseException as error:
            _end(tier, session, request, attempt, error)
            raise
    session.base = saved.contents
    return saved


def follow(tier: Tier, session: Session, request: SaveRequest, flat: FlatState, plan: Plan) -> Attempt:
    """Another rank's share of a save: returns when its part is written; see :func:`outcome`.

    Raises:
        SaveFailedError: the save cannot succeed any more; all ranks will be told so.
    """
    attempt = session.next_attempt(request.step)
    try:
        tier.check_marker()
        start = _wait_for_start(tier, session, attempt, plan)
        index = ReuseIndex(_pinned(tier, session, start), tier.backend, Reporter(tier).report)
        part = _write(tier, flat, attempt, index, plan)
        tier.put_new(layout.part_key(str(attempt), plan.rank), encode_part(part))
    except BaseException as error:
        _say_why(tier, attempt, request.step, plan, error)
        _end(tier, session, request, attempt, error)
        raise
    return attempt


def outcome(
    tier: Tier, session: Session, attempt: Attempt, seconds: float | None, rank: int
) -> CommitRecord | None:
    """What has become of an attempt; None when that is not known yet.

    Raises:
        SaveFailedError: it was fenced, with the reason.
    """
    wait = Backoff(tier.environment, seconds if seconds is not None else float("inf"))
    while True:
        found = commits.read_commit(tier, session.run_key, str(attempt))
        if isinstance(found, CommitRecord):
            return found
        if isinstance(found, CommitEnd) and found.kind == "void":
            raise SaveFailedError(
                f"save of run {session.epoch.run!r} step {attempt.step} failed: {_why(tier, attempt) or found.reason}",
                hint="older checkpoints are untouched; the next save starts anew",
            )
        if isinstance(found, CommitEnd):
            return None
        if not wait.pause():
            return None


def _write(tier: Tier, flat: FlatState, attempt: Attempt, index: ReuseIndex, plan: Plan) -> Part:
    duty = plan.agreement.duty(flat.layout, plan.rank)
    compare = compared(flat.layout, duty, attempt.number, everything=plan.check_replicas == "all")
    threads = default_threads(tier.backend.capabilities.concurrency)
    with Pool(threads, name="ckptstore-save") as pool:
        writer = Writer(tier.backend, pool, index, str(attempt), plan.rank, flat.layout)
        writer.share(duty, compare)
        writer.write(flat.sources)
    tier.backend.sync()
    keys = writer.key_list()
    locations = writer.locations(keys)
    state = np.where(duty, WRITTEN, np.where(compare, COMPARED, LEFT)).astype(np.uint8)
    return Part(
        rank=plan.rank,
        step=attempt.step,
        counter=attempt.number,
        error=None,
        layout=flat.layout,
        state=state,
        digests=writer.digests,
        objects=locations.object,
        offsets=locations.offset,
        keys=keys,
        tree=flat.tree,
        components=flat.components,
        may_differ=flat.may_differ,
    )


def _all_parts(tier: Tier, session: Session, attempt: Attempt, mine: Part, plan: Plan) -> list[Part]:
    found: dict[int, Part] = {plan.rank: mine}
    wait = Backoff(tier.environment, plan.deadline_seconds)
    while True:
        for rank in range(plan.world_size):
            if rank in found:
                continue
            key = layout.part_key(str(attempt), rank)
            data = tier.read(key)
            if data is not None:
                found[rank] = decode_part(data, key)
        failed = [part for part in found.values() if part.error is not None]
        if failed:
            reasons = "; ".join(f"rank {part.rank}: {part.error}" for part in failed)
            raise SaveFailedError(f"save of run {session.epoch.run!r} step {attempt.step} failed: {reasons}")
        missing = [rank for rank in range(plan.world_size) if rank not in found]
        if not missing:
            return [found[rank] for rank in sorted(found)]
        if not wait.pause():
            raise DeadlineError(
                f"save of run {session.epoch.run!r} step {attempt.step}: {show_ranks(missing)} "
                f"did not finish in {plan.deadline_seconds:g} s{_elsewhere(tier, attempt, missing)}",
                hint="look at their logs: they may have died, or missed a call of save",
            )


def _elsewhere(tier: Tier, attempt: Attempt, missing: Sequence[int]) -> str:
    """Where the missing ranks are instead: a rank that missed a call is told so by name."""
    lines = []
    for info in tier.listing("parts/"):
        owner, _, name = info.key.removeprefix("parts/").partition("/")
        rank = name.removesuffix(layout.DOCUMENT)
        try:
            other = Attempt.parse(owner)
        except ValueError:
            continue
        if other.session == attempt.session and other != attempt and rank.isdigit() and int(rank) in missing:
            if other.number >= attempt.number or other.step != attempt.step:
                lines.append(f"rank {rank} was at step {other.step} in its call {other.number}")
    return f" (this is call {attempt.number}; {'; '.join(sorted(set(lines))[-4:])})" if lines else ""


def _wait_for_start(tier: Tier, session: Session, attempt: Attempt, plan: Plan) -> Start:
    key = layout.start_key(str(attempt))
    wait = Backoff(tier.environment, plan.deadline_seconds)
    while True:
        data = tier.read(key)
        if data is not None:
            return decode_start(data, key)
        if isinstance(commits.read_commit(tier, session.run_key, str(attempt)), CommitEnd):
            raise SaveFailedError(f"rank 0 ended the save of step {attempt.step} before it began")
        if not wait.pause():
            raise DeadlineError(
                f"save of run {session.epoch.run!r} step {attempt.step}: rank 0 did not begin it in "
                f"{plan.deadline_seconds:g} s (this is call {attempt.number} of rank {plan.rank})",
                hint="every rank must call save for the same steps, in the same order",
            )


def _pinned(tier: Tier, session: Session, start: Start) -> list[Contents]:
    """What the surviving pins hold; one that cannot be read is not reused, and that is all."""
    found = []
    for run_key, attempt in start.pins:
        base = session.base
        if base is not None and base.record.attempt == attempt:
            found.append(base)
            continue
        try:
            record = commits.read_commit(tier, run_key, attempt)
        except DamageError as error:
            log.warning("nothing is reused from %s: %s", attempt, error)
            continue
        if isinstance(record, CommitRecord):
            session.base = Contents(tier, record)
            found.append(session.base)
    return found


def _say_why(tier: Tier, attempt: Attempt, step: int, plan: Plan, error: BaseException) -> None:
    """The part of a rank that could not: rank 0 need not wait for the deadline."""
    reason = error.message if isinstance(error, CkptstoreError) else f"{type(error).__name__}: {error}"
    part = Part.failed(plan.rank, step, attempt.number, reason)
    try:
        tier.put_new(layout.part_key(str(attempt), plan.rank), encode_part(part))
    except CkptstoreError as second:
        log.warning("rank %d could not say why it failed: %s", plan.rank, second)


def _why(tier: Tier, attempt: Attempt) -> str:
    """What the ranks that failed have said."""
    reasons = []
    for info in tier.listing(layout.part_prefix(str(attempt))):
        try:
            data = tier.read(info.key)
            part = decode_part(data, info.key) if data is not None else None
        except CkptstoreError:
            continue
        if part is not None and part.error is not None:
            reasons.append(f"rank {part.rank}: {part.error}")
    return "; ".join(sorted(reasons))


def _end(tier: Tier, session: Session, request: SaveRequest, attempt: Attempt, error: BaseException) -> None:
    """Fences the attempt; raises SaveFailedError for an error that does not say yet what failed."""
    fence(tier, session, str(attempt), error)
    if not isinstance(error, CkptstoreError) or isinstance(error, (SessionSupersededError, SaveFailedError)):
        return
    raise SaveFailedError(
        f"save of run {session.epoch.run!r} step {request.step} failed: {error.message}",
        hint=error.hint or "older checkpoints are untouched; the next save starts anew",
    ) from error
