"""The metrics of a store, read from its manifest: for a cron job beside the trainings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import get_args

from ckptstore.events import CAPTURE, public_url
from ckptstore.manifest import CheckpointRow, Manifest, RunRow
from ckptstore.manifest.figures import TierBytes, bytes_by_tier, void_reasons
from ckptstore.metrics import definitions as metric
from ckptstore.metrics.exposition import Family
from ckptstore.metrics.figures import Series
from ckptstore.model.history import State
from ckptstore.store import Store

STATES: tuple[str, ...] = get_args(State)

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


@dataclasses.dataclass(frozen=True, slots=True)
class LastSave:
    """The newest checkpoint that can be restored, by the time of its commit.

    Attributes:
        created_at: seconds since the epoch.
        seconds_since: from then until it was asked.
        blocked_seconds: how long training waited for it; None where the record does not tell.
        phase_seconds: by phase.
        new_bytes, reused_bytes: tensor bytes that it wrote, and that it did not have to.
    """

    step: int
    checkpoint: str
    created_at: float
    seconds_since: float
    blocked_seconds: float | None
    phase_seconds: Mapping[str, float]
    new_bytes: int
    reused_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunMetrics:
    """What monitoring wants to know of a run.

    Attributes:
        sessions: how many times it was trained.
        checkpoints: state -> how many.
        unreadable: commit records that are there and cannot be read.
        last_save: None where nothing can be restored.
        tiers: bytes of its checkpoints, per tier.
        failures: kind -> attempts that failed and left word of it (VOID); a killed process leaves none.
    """

    run: str
    sessions: int
    checkpoints: Mapping[str, int]
    unreadable: int
    last_save: LastSave | None
    tiers: tuple[TierBytes, ...]
    failures: Mapping[str, int]


def measure(store: Store, runs: Iterable[str] | None = None) -> list[RunMetrics]:
    """The metrics of `runs`, in that order; of all runs by name without any.

    Raises:
        NotFoundError: there is no such run; names similar ones.
    """
    known = {row.run: row for row in store.runs()}
    wanted = list(known) if runs is None else list(dict.fromkeys(runs))
    if not known.keys() >= set(wanted):
        for name in wanted:
            if name not in known:
                store.run(name).find("latest")  # its error names similar runs
        known = {row.run: row for row in store.runs()}  # all are there now: some began just then
    now = store.tier.environment.now()
    return [_of_run(store, known[name], now) for name in wanted]


def _of_run(store: Store, row: RunRow, now: float) -> RunMetrics:
    key = row.run_key

    def ask(manifest: Manifest) -> tuple[list[CheckpointRow], list[TierBytes], dict[str, int]]:
        return manifest.checkpoints(key), bytes_by_tier(manifest, key), void_reasons(manifest, key)

    rows, tiers, reasons = store.catalog.ask(ask)
    states = dict.fromkeys(STATES, 0)
    for found in rows:
        states[found.state] += 1
    failures: dict[str, int] = {}
    for reason, count in reasons.items():
        # A label must take few values; what is no word of ours could be any text.
        word = reason if _WORD.fullmatch(reason) else "other"
        failures[word] = failures.get(word, 0) + count
    good = [found for found in rows if found.restorable]
    return RunMetrics(
        run=row.run,
        sessions=row.sessions,
        checkpoints=states,
        unreadable=len(store.catalog.unreadable.get(key, {})),
        # Not the newest in the run's order: after a rewind that one may be old.
        last_save=_last_save(max(good, key=lambda found: found.created_at), now) if good else None,
        tiers=tuple(dataclasses.replace(tier, tier=public_url(tier.tier)) for tier in tiers),
        failures=failures,
    )


def _last_save(row: CheckpointRow, now: float) -> LastSave:
    timings = {phase: float(seconds) for phase, seconds in row.timings.items()}
    return LastSave(
        step=row.step,
        checkpoint=row.checkpoint,
        created_at=row.created_at,
        seconds_since=now - row.created_at,
        # Without a capture, training waited to the end.
        blocked_seconds=timings.get(CAPTURE, sum(timings.values())) if timings else None,
        phase_seconds=timings,
        new_bytes=row.new_bytes,
        reused_bytes=row.reused_bytes,
    )


def families(found: Iterable[RunMetrics], tier: str) -> list[Family]:
    """As metrics.

    Args:
        tier: URL of the tier that the last saves went to.
    """
    series = Series()
    for run in found:
        name = run.run
        for state, count in run.checkpoints.items():
            series.set(metric.CHECKPOINTS, count, run=name, state=state)
        for sums in run.tiers:
            series.set(metric.KEPT_BYTES, sums.new_bytes, run=name, tier=sums.tier, kind="new")
            series.set(metric.KEPT_BYTES, sums.reused_bytes, run=name, tier=sums.tier, kind="reused")
        for kind, count in run.failures.items():
            series.set(metric.FAILED_ATTEMPTS, count, run=name, kind=kind)
        series.set(metric.UNREADABLE, run.unreadable, run=name)
        series.set(metric.SESSIONS, run.sessions, run=name)
        if run.last_save is not None:
            _set_last(series, name, run.last_save, public_url(tier))
    return series.families(metric.OF_A_STORE)


def _set_last(series: Series, run: str, last: LastSave, tier: str) -> None:
    series.set(metric.LAST_SUCCESS, last.created_at, run=run)
    series.set(metric.LAST_STEP, last.step, run=run)
    if last.blocked_seconds is not None:
        series.set(metric.LAST_BLOCKED, last.blocked_seconds, run=run)
    for phase, seconds in last.phase_seconds.items():
        series.set(metric.LAST_PHASE, seconds, run=run, phase=phase)
    for kind, nbytes in (("new", last.new_bytes), ("reused", last.reused_bytes)):
        series.set(metric.LAST_BYTES, nbytes, run=run, tier=tier, kind=kind)
