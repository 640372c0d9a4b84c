"""``replicate = "commit"`` with several ranks: a save that did not reach the tier has failed for all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptstore.checkpoint import Checkpoint
from ckptstore.environment import Environment
from ckptstore.errors import BackendError, CkptstoreError, DeadlineError, PermissionDeniedError
from ckptstore.replication import Replication
from ckptstore.run import Run
from ckptstore.save import ranked
from ckptstore.testing import Fault, FaultBackend
from tests.ranks._plain_ranks import NAME, state_of
from tests.replicate.made import opened, places

WORLD = 2
DEADLINE = 10.0
"""Seconds: the ranks meet in far fewer."""


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")


class Team:
    """Two ranks in threads, each with a store of its own over the same two places.

    Attributes:
        cold: faults of rank 0's way to the cold tier; only rank 0 copies.
        others: the way of the other rank there.
        words: faults of rank 0's way to the hot one.
    """

    def __init__(self, stack: contextlib.ExitStack, requirement: str = "commit") -> None:
        hot, cold = stack.enter_context(places())
        self.cold, self.others, self.words = FaultBackend(cold), FaultBackend(cold), FaultBackend(hot)
        self.runs: list[Run] = []
        for rank in range(WORLD):
            ways = (hot, self.others) if rank else (self.words, self.cold)
            store = opened(*ways, requirement=requirement, environment=Environment())
            stack.callback(store.close)
            run = store.run(
                NAME, rank=rank, world_size=WORLD, session_key="a start", deadline_seconds=DEADLINE
            )
            self.runs.append(run)
        self._pool = stack.enter_context(ThreadPoolExecutor(WORLD))

    def each(self, work: Callable[[int, Run], Any]) -> list[Any]:
        """What it returns or raises on each rank."""

        def one(rank: int) -> Any:
            try:
                return work(rank, self.runs[rank])
            except CkptstoreError as error:
                return error

        return list(self._pool.map(one, range(WORLD)))

    def save(self, step: int) -> list[Any]:
        return self.each(lambda rank, run: run.save(step, state_of(step, rank, WORLD)).result())


@pytest.fixture
def team() -> Iterator[Team]:
    with contextlib.ExitStack() as stack:
        yield Team(stack)


def test_all_ranks_wait_until_the_tier_has_it(team):
    found = team.save(1)
    assert all(isinstance(one, Checkpoint) for one in found), found
    assert [copy.tier.name for copy in team.runs[1][1].copies] == ["hot", "cold"]


def test_what_is_not_there_in_time_has_failed_on_all_ranks(team, monkeypatch):
    patient = Replication.wait_required
    away = Fault("error", op="put", key="commits/*", times=None, error=PermissionDeniedError("read-only"))
    team.cold.script.append(away)

    def hasty(self: Replication, which: str, what: str, _seconds: float, **more: Any) -> None:
        patient(self, which, what, 0.2, **more)

    def save_and_close(rank: int, run: Run) -> None:
        run.save(2, state_of(2, rank, WORLD))
        run.close()

    with monkeypatch.context() as context:
        context.setattr(Replication, "wait_required", hasty)
        first, other = team.save(1)
        assert "not in 'cold' after" in str(first)
        assert str(other) == str(first)
        first, other = team.each(save_and_close)
        assert "step 2 is committed in tier 'hot', and not in 'cold' after 0.2 s: read-only" in str(first)
        assert str(other) == str(first)
    team.cold.script.clear()  # it is back: it is tried at once, and not when a wait after failures has ended
    assert [one.step for one in team.save(3)] == [3, 3]


def test_a_rank_waits_only_so_long_for_rank_0_to_say_so(team, monkeypatch):
    monkeypatch.setattr(ranked, "_PATIENCE", 0.1)
    mute = Fault("error", op="put", key="parts/*/reached.mp", error=PermissionDeniedError("read-only"))
    team.words.script.append(mute)
    first, other = team.save(1)
    assert "rank 0 said nothing of them in" in str(other)
    assert "not known to all ranks" in str(first)


def test_every_rank_can_wait_for_the_copy_that_rank_0_makes():
    with contextlib.ExitStack() as stack:
        team = Team(stack, "async")
        started = time.monotonic()
        found = team.each(
            lambda rank, run: run.save(1, state_of(1, rank, WORLD)).wait(
                "replicated", timeout=60, tier="cold"
            )
        )
        assert [one.step for one in found] == [1, 1], found
        assert time.monotonic() - started < 30
        denied = PermissionDeniedError("read-only")
        team.cold.script.append(Fault("error", op="put", key="commits/*", times=None, error=denied))
        found = team.each(
            lambda rank, run: run.save(2, state_of(2, rank, WORLD)).wait("replicated", timeout=0.2)
        )
        assert [type(one) for one in found] == [DeadlineError] * 2, found
        assert "step 2 is not in tier 'cold' after 0.2 s" in str(found[1])
        away = BackendError("away", transient=False)
        team.others.script.append(Fault("error", op="list", times=None, error=away))
        second = team.runs[1].checkpoints()[-1]
        with pytest.raises(DeadlineError, match=r"after 0\.05 s"):
            second.wait_replicated(timeout=0.05)
        assert not {call.op for call in team.others.log} & {"put", "delete"}


def test_a_fault_of_our_own_after_the_commit_is_told_too(team, monkeypatch):
    def broken(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Replication, "wait_required", broken)
    run = team.runs[0]._store.run("alone", rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="a mistake"):
        run.save(1, {"a": [1]}).result()
