"""The demonstration from beginning to end."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ckptstore
from ckptstore.demo.compare import Comparison, compare
from ckptstore.demo.kill import Cut, kill_in_a_save
from ckptstore.demo.program import Training, find_program
from ckptstore.errors import ConflictError, OutOfSpaceError
from ckptstore.verify import VerifyReport

RUN = "gpt"
TUNED_RUN = "gpt-tuned"
_MIN_FREE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How much is trained: these take about a minute on two cores.

    Attributes:
        kill_from_step: the first save at or after this step is killed.
        tuned_steps: of the run that begins with the trained weights and trains only the last block.
    """

    steps: int = 60
    save_every: int = 10
    kill_from_step: int = 30
    tuned_steps: int = 20
    tuned_save_every: int = 5
    frozen_blocks: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What came out.

    Attributes:
        store: of the killed training and the run made from it.
        resumed_from_step: where the second process went on.
        logical_bytes, new_bytes: of all checkpoints in `store`; the difference was reused.
    """

    store: Path
    cut: Cut
    resumed_from_step: int
    comparison: Comparison
    verified: VerifyReport
    logical_bytes: int
    new_bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Nothing differs and nothing is damaged."""
        return self.comparison.identical and not self.verified.problems


@dataclasses.dataclass(frozen=True, slots=True)
class Reporter:
    """Who is told how it goes: of each part, and of each line that a training prints."""

    part: Callable[[str], None]
    line: Callable[[str], None]


def demonstrate(folder: Path, settings: Settings, report: Reporter) -> Result:
    """Trains, kills, resumes and compares, in an empty folder.

    Raises:
        ConflictError: `folder` is not empty.
        OutOfSpaceError: there is less than 1 GiB free.
        CkptstoreError: a training failed.
    """
    started = time.monotonic()
    program = find_program()
    _check(folder)
    whole = _training(program, folder, "whole", settings)
    killed = _training(program, folder, "killed", settings)
    with ckptstore.init(whole.store), ckptstore.init(killed.store) as store:
        with _timed(report, f"A. Train {settings.steps} steps, never interrupted"):
            whole.finish(report.line)
        with _timed(report, "B. Train the same in another store, and kill it in the middle of a save"):
            cut = kill_in_a_save(killed, store, settings.kill_from_step, report.line)
        report.line(_cut_text(cut))
        with _timed(report, "   Start it again: a new process goes on from the newest whole checkpoint"):
            killed.finish(report.line)
        with _timed(report, f"C. Begin run {TUNED_RUN} with those weights and train only the last block"):
            _tuned(killed, settings).finish(report.line)
        with _timed(report, "Verify: read everything back and compare it with its hashes"):
            verified = store.verify()
        return Result(
            store=killed.store,
            cut=cut,
            resumed_from_step=_resumed_from(store),
            comparison=compare(whole, killed),
            verified=verified,
            logical_bytes=sum(c.nbytes for name in (RUN, TUNED_RUN) for c in store.run(name).checkpoints()),
            new_bytes=sum(row.new_bytes for row in store.runs()),
            seconds=time.monotonic() - started,
        )


def _check(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConflictError(
            f"{folder} is not empty; the demo wants a folder of its own", hint="name a new one"
        )
    if shutil.disk_usage(folder).free < _MIN_FREE_BYTES:
        raise OutOfSpaceError(f"the demo needs 1 GiB free in {folder}", hint="name another folder: --dir DIR")


def _training(program: Path, folder: Path, name: str, settings: Settings) -> Training:
    return Training(
        program=program,
        store=folder / name,
        run=RUN,
        steps=settings.steps,
        save_every=settings.save_every,
        losses=folder / f"{name}.losses",
        digest=folder / f"{name}.digest",
    )


def _tuned(killed: Training, settings: Settings) -> Training:
    return dataclasses.replace(
        killed,
        run=TUNED_RUN,
        steps=settings.tuned_steps,
        save_every=settings.tuned_save_every,
        losses=killed.losses.with_name("tuned.losses"),
        digest=killed.digest.with_name("tuned.digest"),
        more=("--fork-from", RUN, "--freeze", str(settings.frozen_blocks)),
    )


def _resumed_from(store: ckptstore.Store) -> int:
    run = store.run(RUN)
    resumed_from = run.sessions()[-1].resumed_from
    return 0 if resumed_from is None else run.find(resumed_from).step


def _cut_text(cut: Cut) -> str:
    return (
        f"SIGKILL in the save of step {cut.step}: announced, {cut.objects} objects written "
        f"({cut.bytes >> 20} MiB), {cut.unfinished} files unfinished, no commit record"
    )


@contextmanager
def _timed(report: Reporter, title: str) -> Iterator[None]:
    report.part(title)
    started = time.monotonic()
    yield
    report.line(f"({time.monotonic() - started:.1f} s)")
