"""Real ranks with torch.distributed that are killed, or stopped for a while, at a numbered call of a save."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.backend import Backend
from ckptstore.errors import DeadlineError, SaveFailedError
from ckptstore.store import Store
from ckptstore.testing import Call, Fault, FaultBackend
from ckptstore.tier.retry import RetryingBackend
from tests.crash._support import check_objects, same
from tests.ranks._plain_ranks import NAME, blank_of, holds, state_of, whole
from tests.ranks.pool import RankPool

WORLD = 4
DEADLINE = 3.0
STOPPED = 1.5 * DEADLINE
"""Seconds, so that all others have given up when it goes on."""

STRUCK = 2


@dataclasses.dataclass(frozen=True)
class Strike:
    """Which rank is struck at which of its calls in the save of step 2.

    Attributes:
        how: "kill" or "stop".
    """

    rank: int
    n: int
    how: str


class _Struck(FaultBackend):
    """A way to the place on which this process dies, or stops, at a numbered call."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.strike: Strike | None = None
        self.was_struck = False

    def _enter(self, op: str, key: str) -> tuple[Call, Fault | None]:
        if self.strike is not None and len(self.log) + 1 == self.strike.n and not self.was_struck:
            self.was_struck = True
            if self.strike.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            # Somebody must wake it up: a stopped process cannot.
            wake = f"import os, time; time.sleep({STOPPED}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
            subprocess.Popen([sys.executable, "-S", "-c", wake])
            os.kill(os.getpid(), signal.SIGSTOP)
        return super()._enter(op, key)


@contextlib.contextmanager
def _struck_store(directory: Path) -> Iterator[tuple[Store, _Struck]]:
    with ckptstore.open(directory) as store:
        retrying = store.tier.backend
        assert isinstance(retrying, RetryingBackend)
        struck = _Struck(retrying.inner)
        store.tier.backend = RetryingBackend(struck)
        yield store, struck


def first_start(rank: int, world: int, directory: Path) -> None:
    """Saves step 1."""
    with ckptstore.open(directory) as store:
        store.run(NAME).save(1, state_of(1, rank, world)).result()


def struck_save(
    rank: int, world: int, directory: Path, strike: Strike | None
) -> tuple[str | None, bool, int]:
    """Restores step 1 and saves step 2, in which one rank is struck; if all live, saves step 3 too.

    Returns:
        What was told of the save (None: it succeeded), whether this rank was struck, its calls in the save.
    """
    import torch.distributed as dist

    with _struck_store(directory) as (store, backend):
        run = store.run(NAME, deadline_seconds=DEADLINE)
        state = blank_of(rank, world)
        assert run.restore(state) == 1
        assert holds(state, 1, rank, world)
        dist.barrier()
        before = len(backend.log)
        if strike is not None and strike.rank == rank:
            backend.strike = dataclasses.replace(strike, n=before + strike.n)
        told = None
        try:
            run.save(STRUCK, state_of(STRUCK, rank, world)).result()
        except (SaveFailedError, DeadlineError) as error:
            told = str(error)
        backend.strike = None  # a save that polled less than it did when counted has fewer calls
        calls = len(backend.log) - before
        if strike is None or strike.how == "stop":
            dist.barrier()  # as the next step of a training: the stopped rank is waited for
            run.save(3, state_of(3, rank, world)).result()
        return told, backend.was_struck, calls


def next_start(rank: int, world: int, directory: Path, newest: int) -> None:
    """Restores the newest and saves once more."""
    with ckptstore.open(directory) as store:
        run = store.run(NAME)
        state = blank_of(rank, world)
        assert run.restore(state) == newest
        assert holds(state, newest, rank, world)
        run.save(9, state_of(9, rank, world)).result()


def count_calls(pool: RankPool, folder: Path) -> list[int]:
    """How many calls each rank makes in the save that is struck."""
    directory = _prepared(pool, folder)
    return [calls for _, _, calls in pool.run(struck_save, directory, None, world=WORLD)]


def _prepared(pool: RankPool, folder: Path) -> Path:
    ckptstore.init(folder, chunk_bytes=64 << 10).close()
    pool.run(first_start, folder, world=WORLD)
    return folder


def strike_once(pool: RankPool, folder: Path, strike: Strike) -> None:
    """Strikes one rank, and checks what all are told, what is there, and that training goes on."""
    directory = _prepared(pool, folder)
    outcomes = pool.outcomes(struck_save, directory, strike, world=WORLD)
    killed = [outcome.rank for outcome in outcomes if outcome.failure is not None]
    assert killed in ([], [strike.rank]), "\n".join(filter(None, (outcome.failure for outcome in outcomes)))
    assert not killed or "SIGKILL" in str(outcomes[strike.rank].failure)
    told: dict[int, Any] = {o.rank: o.value[0] for o in outcomes if o.failure is None}
    steps = _check(directory)
    committed = STRUCK in steps
    assert set(told.values()) == {None} if committed else None not in told.values()
    for rank, text in told.items():
        assert text is None or rank == strike.rank or f"rank {strike.rank}" in text, text
    goes_on = strike.how == "stop" or not killed
    assert steps == [1, *([STRUCK] if committed else []), *([3] if goes_on and strike.how == "stop" else [])]
    pool.run(next_start, directory, steps[-1], world=WORLD)
    assert _check(directory) == [*steps, 9]


def _check(directory: Path) -> list[int]:
    with contextlib.closing(ckptstore.open(directory)) as store:
        found = store.run(NAME).checkpoints()
        for checkpoint in found:
            loaded = checkpoint.load()
            assert loaded.pop("own")["cursor"] == {
                r: f"step {checkpoint.step} rank {r}" for r in range(WORLD)
            }
            assert same(loaded, whole(checkpoint.step))
        check_objects(store.tier.backend)
        return [checkpoint.step for checkpoint in found]
