"""Trims: a checkpoint's next generation, without some of its components (DESIGN part 8).

A trim is an ordinary saver. It announces itself and pins the old record, reads that record's doom and then
the record, names the chunks that stay (none is copied), writes new tables, and commits under the same
checkpoint id and place in the order. Until that moment the old record counts; from then on it is superseded,
and a round deletes it with what only it names. Nothing is ever taken out from under a live record.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ckptstore.errors import (
    DamageError,
    FormatTooNewError,
    SaveFailedError,
    UsageError,
)
from ckptstore.gc.fates import Fate, Owed, holders_of
from ckptstore.gc.survey import RunSurvey, Survey
from ckptstore.model.documents import encode_record
from ckptstore.model.history import Entry
from ckptstore.model.ids import Attempt
from ckptstore.model.prune import Pruned, without
from ckptstore.model.record import TRIMMED, CommitRecord
from ckptstore.model.retention import Candidate, Keep, decide
from ckptstore.model.tables import encode_digests, written_bytes
from ckptstore.save.commit import Assembly, create_record, summarize
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.saver import Reporter, fence
from ckptstore.save.tables import TableWriter
from ckptstore.tier import commits, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Intent, Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

_RANK = 0

ComponentsOf = Callable[[RunSurvey], Mapping[str, Keep]]


@dataclasses.dataclass(frozen=True, slots=True)
class Trim:
    """Components that a checkpoint loses.

    Attributes:
        attempt: of the record in the tier that has them.
        components: those that it loses.
        reason: for people.
        size_bytes: of the tensors in them; what other checkpoints name too stays all the same.
        made: attempt of the record that counts from now on; empty in a plan.
    """

    run: str
    run_key: str
    step: int
    checkpoint: str
    attempt: str
    components: tuple[str, ...]
    reason: str
    size_bytes: int
    made: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Trims:
    """What became of several.

    Attributes:
        failures: (commit key, error).
        is_cut_short: time was up; the others were not tried.
    """

    done: list[Trim]
    failures: list[tuple[str, str]]
    is_cut_short: bool = False


# --- which ------------------------------------------------------------------------------------------


def components_in(run: RunSurvey) -> Mapping[str, Keep]:
    """What is stored in a tier says which components are kept there."""
    return {} if run.policy is None else run.policy.components


def trims_due(
    components: Mapping[str, Keep],
    candidates: Sequence[Candidate],
    has: Mapping[str, Collection[str]],
    now: float,
) -> list[tuple[Entry, tuple[str, ...]]]:
    """Which components a policy no longer keeps, of which checkpoints. Pure.

    A component's rules see the checkpoints that have it, and no others: ``last=3`` are the last three with
    an optimizer, whatever else was saved since. The newest that has it keeps it, and so does what is pinned,
    being read, damaged or marked invalid.

    Args:
        components: component -> of which checkpoints it is kept.
        candidates: the checkpoints that stay, oldest first, in the run's effective order.
        has: checkpoint -> its components.
        now: seconds since the epoch; see :func:`~ckptstore.model.retention.decide`.
    """
    due: dict[str, list[str]] = {}
    for component, keep in components.items():
        having = [candidate for candidate in candidates if component in has[candidate.entry.checkpoint]]
        for decision in decide(keep, having, now):
            if not decision.keep:
                due.setdefault(decision.checkpoint, []).append(component)
    return [
        (candidate.entry, tuple(due[candidate.entry.checkpoint]))
        for candidate in candidates
        # One that would lose all it has goes on as it is: what checkpoints stay is said by other rules.
        if len(due.get(candidate.entry.checkpoint, ())) not in (0, len(has[candidate.entry.checkpoint]))
    ]


def plan(
    survey: Survey,
    decided: Iterable[Fate],
    held: Mapping[Pin, str],
    owed: Owed,
    now: float,
    components_of: ComponentsOf = components_in,
) -> list[Trim]:
    """The trims that the policies of a tier's runs ask for, of the checkpoints that stay; writes nothing.

    Args:
        decided: of the runs that were asked for.
        held: pinned records -> by whom.
        owed: what other tiers still need of this one goes there whole.
        components_of: of a run, component -> of which checkpoints it is kept.
    """
    stays = {(fate.run_key, fate.checkpoint) for fate in decided if fate.outcome == "keep"}
    found: list[Trim] = []
    for run in survey.runs:
        entries = [entry for entry in run.entries if (run.key, entry.checkpoint) in stays]
        rules = components_of(run) if entries else {}
        if not rules:
            continue
        candidates = [Candidate(entry, holders_of(run, entry, held)) for entry in entries]
        parts = {
            entry.checkpoint: {part.name: part for part in survey.records[run.key, entry.attempt].components}
            for entry in entries
        }
        due = trims_due(rules, candidates, parts, now)
        needed = owed(run.key, [entry for entry, _ in due]) if due else {}
        for entry, components in due:
            if entry.checkpoint in needed:
                continue
            reason = "; ".join(f"{name}: {rules[name]}" for name in components)
            own = parts[entry.checkpoint]
            size = sum(own[name].logical_bytes for name in components)
            found.append(
                Trim(
                    run.name,
                    run.key,
                    entry.step,
                    entry.checkpoint,
                    entry.attempt,
                    components,
                    reason,
                    size,
                )
            )
    return found


def new_bytes(survey: Survey, trims: Iterable[Trim]) -> int:
    """About how much trims free: what these checkpoints wrote themselves, each byte counted once."""
    return sum(
        part.new_bytes
        for each in trims
        for part in survey.records[each.run_key, each.attempt].components
        if part.name in each.components
    )


def apply(tier: Tier, trims: Iterable[Trim], until: float | None = None) -> Trims:
    """Carries trims out, one after the other; one that fails does not stop the others.

    Args:
        until: none begins after this, seconds of ``environment.monotonic``.

    Raises:
        WrongStoreError, BackendError: the tier is not where it was, or failed.
    """
    done: list[Trim] = []
    failures: list[tuple[str, str]] = []
    for each in trims:
        if until is not None and tier.environment.monotonic() >= until:
            return Trims(done, failures, is_cut_short=True)
        try:
            made = trim(tier, each.run_key, each.attempt, each.components, reason=each.reason)
        except (DamageError, FormatTooNewError, SaveFailedError) as error:
            failures.append((layout.commit_key(each.run_key, each.attempt), error.message))
            log.warning("not trimmed: %s", error.message)
            continue
        if made is not None:
            done.append(made)
    return Trims(done, failures)


# --- one --------------------------------------------------------------------------------------------


def trim(tier: Tier, run_key: str, attempt: str, drop: Collection[str], *, reason: str) -> Trim | None:
    """Commits the next generation of a checkpoint without components.

    Args:
        attempt: of the record that counts in the tier.
        drop: top-level keys of the state; those that it does not have are passed over.
        reason: for people; loads that miss a component say it.

    Returns:
        None where there is nothing to do: it has none of them, or it is being deleted.

    Raises:
        UsageError: nothing would be left of it.
        DamageError: an object that stays is missing; its checkpoint is marked damaged.
        SaveFailedError: fenced; nothing changed.
        WrongStoreError, BackendError: the old record counts as before, or the trim is committed.
    """
    tier.check_marker()
    old = commits.read_commit(tier, run_key, attempt)
    if not isinstance(old, CommitRecord):
        return None
    number = Attempt(tier.environment.new_ulid(), old.step, 1)
    pin = (run_key, attempt)
    with Intent.announce(tier, "trim", str(number), old.run, [pin], reason) as intent:
        record = intent.surviving().get(pin)
        contents = None if record is None else Contents(tier, record)
        if contents is None or not (gone := _present(contents, drop)):
            return None
        try:
            made = _commit(tier, run_key, number, contents, gone, reason)
        except BaseException as error:
            fence(tier, run_key, str(number), error)
            raise
    size = sum(part.logical_bytes for part in contents.record.components if part.name in gone)
    log.info("run %r step %d has no %s any more: %s", old.run, old.step, ", ".join(gone), reason)
    return Trim(old.run, run_key, old.step, old.checkpoint, attempt, gone, reason, size, made.attempt)


def _present(contents: Contents, drop: Collection[str]) -> tuple[str, ...]:
    """Those of the components that it has.

    Raises:
        UsageError: it has no others.
    """
    own = contents.saved_tree.components
    gone = tuple(name for name in own if name in drop)
    if gone and len(gone) == len(own):
        raise UsageError(
            f"{contents} would be left without any component",
            hint="`ckptstore forget` deletes a checkpoint; a policy's components= leaves one out",
        )
    return gone


def _commit(
    tier: Tier, run_key: str, number: Attempt, contents: Contents, gone: Sequence[str], reason: str
) -> CommitRecord:
    old, attempt = contents.record, str(number)
    index = ReuseIndex([contents], tier.backend, Reporter(tier).report, number.number)
    left = without(
        gone,
        layout=contents.layout,
        tree=contents.tree,
        digests=contents.digests,
        locations=contents.locations,
        keys=contents.keys,
    )
    _check_same(contents, left)
    for key, size in zip(left.keys.keys, left.keys.sizes.tolist(), strict=True):
        if not index.check(key, size):
            raise DamageError(
                f"{contents} is not trimmed: {key} is missing",
                hint="`ckptstore repair` mends it from another tier",
            )
    tables = TableWriter(tier.backend, index, attempt, _RANK, left.layout.chunk_bytes)
    refs = {
        "layout": tables.write(left.layout.encode()),
        "tree": tables.write(left.tree),
        "digests": tables.write(encode_digests(left.digests)),
        "locations": tables.write(left.locations.encode()),
        "keys": tables.write(left.keys.encode()),
    }
    tier.backend.sync()
    new = written_bytes(left.layout, left.locations, left.keys, attempt)
    names = tuple(part.name for part in old.components if part.name not in gone)
    assembly = Assembly(left.layout, left.tree, left.digests, left.locations, left.keys, names)
    now = tier.environment.now()
    said = {**dict(old.state_info.get(TRIMMED, {})), **{name: {"reason": reason, "at": now} for name in gone}}
    record = dataclasses.replace(
        old,
        attempt=attempt,
        generation=old.generation + 1,
        origin="trim",
        components=summarize(assembly, new),
        state_info={**old.state_info, TRIMMED: said},
        tables=refs,
    )
    tier.check_marker()
    create_record(tier, run_key, record, encode_record(record))
    return record


def _check_same(contents: Contents, left: Pruned) -> None:
    """That what is left is what it was, as a loader reads it: the old record is deleted after this.

    Raises:
        DocumentError, SaveFailedError: it is not.
    """
    before, after = contents.layout, left.layout
    problems = after.check_coverage()
    for row, old_row in enumerate(left.rows):
        span, old_span = (
            slice(int(table.chunks.first[at]), int(table.chunks.first[at + 1]))
            for table, at in ((after, row), (before, old_row))
        )
        heads, old_heads = after.heads, before.heads
        if (heads.dtypes[row], heads.shapes[row]) != (
            old_heads.dtypes[old_row],
            old_heads.shapes[old_row],
        ) or left.digests.array[span].tobytes() != contents.digests.array[old_span].tobytes():
            problems.append(f"{heads.names[row]} would be another tensor")
    if problems:
        raise SaveFailedError(f"{contents} is not trimmed: {problems[0]}", hint="a mistake in this program")
