"""Ranks whose saves overlap while they agree anew on who writes what; one is slower, or fails."""

from __future__ import annotations

import random

import pytest

from ckptstore.errors import SaveFailedError
from ckptstore.model.ids import Attempt
from ckptstore.save.room import is_only_late
from tests.crash._support import records
from tests.saving._team import Member, Team, team, whole

CHANGING = ["rows", "large", *(f"small{i}" for i in range(4))]


def write_once(ranks: Team) -> None:
    """After some saves that nothing disturbs nobody writes what another writes, whatever was before."""
    for step in range(100, 107):
        ranks.train(range(step, step + 1))
        for member in ranks:
            assert step in member.committed, member.told
    model = whole(106)["model"]
    assert sum(ranks.written_bytes(106).values()) == sum(model[name].nbytes for name in CHANGING)


@pytest.mark.parametrize("slow", [None, 0, 2])
def test_all_overlapping_saves_commit_in_order_while_what_ranks_hold_changes(slow):
    with team(seed=1, slow=slow) as ranks:
        ranks.train(range(1, 19))
        assert [member.committed for member in ranks] == [list(range(1, 19))] * 3
        assert ranks.check() == list(range(1, 19))
        found = sorted(records(ranks.tier), key=lambda record: record.sequence)
        assert [Attempt.parse(record.attempt).number for record in found] == list(range(1, 19))
        assert [record.parents for record in found[1:]] == [(record.checkpoint,) for record in found[:-1]]


def test_after_some_saves_each_byte_is_written_once_again():
    with team(seed=2) as ranks:
        ranks.train(range(1, 13))
        write_once(ranks)
        ranks.check()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_whichever_call_of_a_rank_fails_nothing_is_missing_and_all_go_on(rank, seed):
    draw = random.Random(f"{rank} {seed}")
    with team(seed=seed, slow=draw.choice([None, 0, 1, 2])) as ranks:
        ranks.train(range(1, 4))
        before = len(ranks[rank].backend.log)

        def strike(member: Member, step: int) -> None:
            if member.rank == rank and step % 4 == 0:
                member.break_once(draw.randrange(40))

        ranks.train(range(4, 20), strike)
        for member in ranks:
            member.backend.script.clear()
        assert len(ranks[rank].backend.log) > before
        steps = ranks.check()
        for member in ranks:
            # The others know what the place says; whoever could not read it may not know.
            assert set(member.committed) <= set(steps)
            if member.rank != rank:
                missed = set(steps) - set(member.committed)
                assert not missed, f"rank {member.rank}: {missed}"
        # Whoever has not told of a failure yet tells of it now; from then on all commit.
        ranks.train(range(20, 24))
        ranks.train(range(24, 27))
        assert ranks.check()[-3:] == [24, 25, 26], [member.told for member in ranks]
        write_once(ranks)
        ranks.check()


def test_a_failure_that_ranks_hear_of_at_different_calls_ends():
    """One asks for the result, the others hear by the next save, which counts as a call: no ping-pong."""
    with team(seed=5) as ranks:
        ranks.train(range(1, 4))
        ranks[1].break_once(0, "put")

        def ask(member: Member, step: int) -> None:
            if member.rank == 0 and step == 5:
                with pytest.raises(SaveFailedError, match="the disk is gone"):
                    member.pendings[4].result()

        ranks.train(range(4, 12), ask)
        assert ranks.check()[3:][-4:] == [8, 9, 10, 11]
        for member in ranks:
            assert len(member.told) <= 2
            late = [p for p in member.pendings.values() if p.level == "failed" and is_only_late(p._error)]
            assert len(late) <= 2
            member.run.close()  # nobody is left with something untold


def test_with_warn_a_failed_save_costs_no_other(caplog):
    with team(seed=6, on_error="warn") as ranks:
        ranks.train(range(1, 4))
        ranks[2].break_once(0, "put")
        ranks.train(range(4, 12))
        assert not any(member.told for member in ranks)
        failed = {step for step in range(4, 12) if step not in ranks[0].committed}
        assert len(failed) == 1
        assert [member.committed for member in ranks] == [ranks[0].committed] * 3
        assert ranks.check() == ranks[0].committed


def test_skipped_calls_count_on_all_ranks():
    with team(seed=7, slow=1, on_busy="skip") as ranks:
        ranks.train(range(1, 3))
        ranks.train(range(3, 30))
        levels = [[pending.level for pending in member.pendings.values()] for member in ranks]
        assert levels[0] == levels[1] == levels[2]
        assert {"committed", "skipped"} == set(levels[0])
        ranks.check()
        for record in records(ranks.tier):
            assert Attempt.parse(record.attempt).number == record.step
