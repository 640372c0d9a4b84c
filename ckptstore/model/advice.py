"""What a run's history says of how often to save: what was measured, and the losses that follow. No I/O."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from ckptstore.errors import UsageError
from ckptstore.model.durations import duration_text
from ckptstore.model.interval import (
    Loss,
    best_interval,
    daly,
    loss_at,
    mtbf_of,
    scaled_mtbf,
    shortest_interval,
    young,
)
from ckptstore.model.record import EpochDoc

CAPTURE = "capture"  # the phase that training waits for
NEWEST = 20
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
# Intervals that people choose; those near the best one are shown beside it.
_ROUND = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(n * _MINUTE for n in (1, 2, 5, 10, 20, 30)),
    *(n * _HOUR for n in (1, 2, 4, 8, 12)),
    *(n * _DAY for n in (1, 2, 7)),
)
_SPREAD = 8.0
_NEAR = 0.05
_FEW_FAILURES = 5
_ROUGH_LOSS = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class SaveFacts:
    """One save of a training, as its commit record tells of it.

    Attributes:
        committed_at: seconds since the epoch.
        timings: seconds per phase; with "capture" the others went on in the background, without it the
            training waited for all of them.
    """

    step: int
    epoch: int
    sequence: int
    committed_at: float
    timings: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What saves cost and how often they were made: medians, in seconds.

    Attributes:
        saves: how many of the newest were looked at.
        synchronous: how many of them the training waited for to the end; their whole time is pause.
        pause: over these saves.
        background: from the end of the pause until committed, over those that were not synchronous.
        interval: from one commit to the next within a session; None without two in a row.
        gaps: how many such intervals there were.
        step_seconds: that one step of training took, saves included; None where steps did not grow.
    """

    saves: int
    synchronous: int
    pause: float
    background: float
    interval: float | None
    gaps: int
    step_seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Failures:
    """How often training fails, and who says so.

    Attributes:
        mtbf: mean time between failures, seconds; scaled to `machines` where they are given.
        source: "given" as a time, "counted" by the caller over a time, or from the run's "sessions".
        failures, seconds: what was counted, and over how long; None for "given".
        machines, of_machines: the MTBF is that of `machines`, of `of_machines` that were looked at.
    """

    mtbf: float
    source: Literal["given", "counted", "sessions"]
    failures: int | None = None
    seconds: float | None = None
    machines: int | None = None
    of_machines: int | None = None

    def scaled(self, machines: int, of_machines: int) -> Failures:
        """The same machines, more or fewer of them."""
        mtbf = scaled_mtbf(self.mtbf, machines=machines, of=of_machines)
        return dataclasses.replace(self, mtbf=mtbf, machines=machines, of_machines=of_machines)

    @property
    def text(self) -> str:
        """How the MTBF was found, for people."""
        if self.failures is None or self.seconds is None:
            text = "as given"
        else:
            noun = "restart" if self.source == "sessions" else "failure"
            many = "" if self.failures == 1 else "s"
            text = f"{self.failures} {noun}{many} in {duration_text(self.seconds)}"
        return (
            text if self.machines is None else f"{text}; for {self.machines} of {self.of_machines} machines"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An interval and its expected loss.

    Attributes:
        marks: of "current", "best" and "asked", those that apply.
    """

    loss: Loss
    marks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """How often a run should be saved. All times in seconds, all losses as fractions of all time.

    Attributes:
        pause, background: that the losses were reckoned with: measured, unless the caller gave others.
        restart: that one restart costs.
        current: how often it was saved lately; None when that is not known.
        young, daly: their intervals, whatever can be kept up.
        best: the advice: Young's, but never shorter than one save takes.
        best_steps: the same in steps of training; None when steps tell no time.
        choices: `current`, `best`, what was asked for and round numbers about them, shortest first.
        notes: what a reader should know before relying on it.
    """

    run: str
    measured: Measured
    failures: Failures
    pause: float
    background: float
    restart: float
    current: float | None
    young: float
    daly: float
    best: float
    best_steps: int | None
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]

    def loss_at(self, interval: float) -> Loss:
        """The expected loss at any interval (seconds)."""
        return loss_at(
            interval,
            pause=self.pause,
            mtbf=self.failures.mtbf,
            restart=self.restart,
            background=self.background,
        )

    @property
    def gain(self) -> float | None:
        """Of all time, what the best interval loses less than the current one; None without a current one."""
        return (
            None if self.current is None else self.loss_at(self.current).total - self.loss_at(self.best).total
        )

    def __str__(self) -> str:
        return f"run {self.run!r}: save every {duration_text(self.best)}"


def measure(saves: Sequence[SaveFacts], *, newest: int = NEWEST) -> Measured | None:
    """Medians over a run's newest saves; None where no save says how long it took.

    Args:
        saves: in the run's order, oldest first. Saves that are gone may be missing.
        newest: how many of them count.
    """
    timed = [save for save in saves if save.timings and all(map(_is_time, save.timings.values()))][-newest:]
    if not timed:
        return None
    split = [_pause_and_background(save.timings) for save in timed]
    written_behind = [background for _, background in split if background is not None]
    gaps = list(_gaps(saves))[-newest:]
    paces = [seconds / steps for seconds, steps in gaps if steps > 0]
    return Measured(
        saves=len(timed),
        synchronous=len(timed) - len(written_behind),
        pause=statistics.median(pause for pause, _ in split),
        background=statistics.median(written_behind) if written_behind else 0.0,
        interval=statistics.median(seconds for seconds, _ in gaps) if gaps else None,
        gaps=len(gaps),
        step_seconds=statistics.median(paces) if paces else None,
    )


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


def _pause_and_background(timings: Mapping[str, float]) -> tuple[float, float | None]:
    """Seconds of both; no background where training waited for all of it."""
    pause = timings.get(CAPTURE)
    behind = sum(seconds for phase, seconds in timings.items() if phase != CAPTURE)
    return (behind, None) if pause is None else (pause, behind)


def _gaps(saves: Sequence[SaveFacts]) -> Iterator[tuple[float, float]]:
    """(seconds, steps) from one save of a session to the next.

    A save between them that is gone by now, or failed, has left a gap in the sequence: the time is shared.
    """
    ordered = sorted(saves, key=lambda save: (save.epoch, save.sequence))
    for a, b in itertools.pairwise(ordered):
        count, seconds = b.sequence - a.sequence, b.committed_at - a.committed_at
        if a.epoch == b.epoch and count > 0 and seconds > 0:  # a clock that was set back tells nothing
            yield seconds / count, (b.step - a.step) / count


def failures_of_sessions(sessions: Sequence[EpochDoc], last_commit: float) -> Failures | None:
    """Counts each session that another followed as a failure, but for a rewind, which somebody decided.

    Args:
        sessions: of the run, in order.
        last_commit: seconds since the epoch; the count is over the time from the first session to it.

    Returns:
        None when nothing failed, or in no time.
    """
    failures = sum(not session.rewound for session in sessions[1:])
    if not failures:
        return None
    seconds = max(last_commit, sessions[-1].started_at) - sessions[0].started_at
    if not seconds > 0:
        return None
    return Failures(mtbf_of(seconds, failures), "sessions", failures, seconds)


def advise(
    run: str,
    measured: Measured,
    failures: Failures,
    *,
    restart: float | None = None,
    pause: float | None = None,
    background: float | None = None,
    intervals: Sequence[float] = (),
) -> Advice:
    """Weighs what saves cost against what failures cost.

    Args:
        restart: seconds from a failure until training goes on; None counts it as 0, with a note.
        pause, background: seconds to reckon with in place of those measured.
        intervals: seconds; further ones for the table.

    Raises:
        UsageError: a time that cannot be, one of `intervals` is shorter than a save, or saves take no time.
    """
    pause = measured.pause if pause is None else pause
    background = measured.background if background is None else background
    best = best_interval(pause, failures.mtbf, background)
    if not best > 0:
        raise UsageError(
            f"the saves of run {run!r} took no time, so none is too often", hint="pass pause= (--pause)"
        )
    marked: dict[float, tuple[str, ...]] = dict.fromkeys(intervals, ("asked",))
    for mark, interval in (("best", best), ("current", measured.interval)):
        if interval is not None:
            marked[interval] = (mark, *marked.get(interval, ()))
    shortest = shortest_interval(pause, background)
    for seconds in intervals:
        if seconds < shortest:
            raise UsageError(
                f"run {run!r} cannot be saved every {duration_text(seconds)}: one save takes "
                f"{duration_text(shortest)}"
            )
    offered = [*marked, *_round_near([best, *marked], shortest)]
    steps = None if measured.step_seconds is None else max(1, round(best / measured.step_seconds))
    advice = Advice(
        run=run,
        measured=measured,
        failures=failures,
        pause=pause,
        background=background,
        restart=restart or 0.0,
        current=measured.interval,
        young=young(pause, failures.mtbf),
        daly=daly(pause, failures.mtbf),
        best=best,
        best_steps=steps,
        choices=(),
        notes=(),
    )
    return dataclasses.replace(
        advice,
        choices=tuple(
            Choice(advice.loss_at(seconds), marked.get(seconds, ())) for seconds in sorted(offered)
        ),
        notes=tuple(_notes(advice, is_restart_known=restart is not None)),
    )


def _round_near(marked: Sequence[float], shortest: float) -> list[float]:
    """Round numbers that can be kept up, about the best one, which is the first, and beside none marked."""
    best = marked[0]
    return [
        seconds
        for seconds in _ROUND
        if max(shortest, best / _SPREAD) <= seconds <= best * _SPREAD
        and all(abs(seconds - other) > _NEAR * other for other in marked)
    ]


def _notes(advice: Advice, *, is_restart_known: bool) -> Iterator[str]:
    measured, failures = advice.measured, advice.failures
    if measured.synchronous:
        yield (
            f"{measured.synchronous} of the newest {measured.saves} saves were synchronous: their whole time "
            "counts as pause"
        )
    if measured.interval is None:
        yield "no session has two saves in a row yet, so the current interval is not known"
    if failures.source == "sessions":
        yield (
            "every start after the first counts as a failure, planned ones too: pass mtbf= (--mtbf) if you "
            "know better"
        )
        if failures.failures is not None and failures.failures < _FEW_FAILURES:
            yield "so few failures tell the MTBF within a factor of two at best"
    shortest = shortest_interval(advice.pause, advice.background)
    if advice.young < shortest:
        yield (
            f"Young's interval, {duration_text(advice.young)}, is shorter than one save takes: "
            f"{duration_text(shortest)} is the limit"
        )
    if not is_restart_known:
        yield "restarts count as 0 s: pass restart= (--restart), the time until training goes on"
    if advice.loss_at(advice.best).total > _ROUGH_LOSS:
        yield "with losses this large the formula says some points too much"
