"""What ranks do together in saves and restores, by explicit checks: four torch-free ranks in one process."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import (
    BackendError,
    ChunkDamagedError,
    ConflictError,
    DeadlineError,
    PermissionDeniedError,
    SaveFailedError,
    SessionSupersededError,
    StateMismatchError,
    UnsupportedValueError,
    UsageError,
)
from ckptstore.model.ids import Attempt
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.testing import Fault
from ckptstore.tier import commits, runs
from ckptstore.tier.contents import Contents
from tests.crash._support import ends, records
from tests.inline import all_inline
from tests.ranks import _plain_ranks as plain
from tests.ranks._plain_ranks import DEADLINE, NAME, Crew, Rank, check_place, crew, holds, new_place, whole

LONGEST = 1.3 * DEADLINE


@pytest.fixture(autouse=True)
def _same_calls_each_time(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    all_inline(monkeypatch)


@pytest.fixture
def ranks():
    with crew() as made:
        yield made


@pytest.fixture
def place():
    with new_place() as made:
        yield made


def save(step: int) -> plain.Work:
    return lambda rank: rank.save(step)


def errors_of(chosen: list[Rank]) -> dict[int, BaseException]:
    return {rank.rank: rank.error for rank in chosen if rank.error is not None}


def all_fail(ranks: Crew, work: Any, kind: type[BaseException] = SaveFailedError) -> dict[int, str]:
    """Their messages by rank: all fail, in time."""
    chosen = ranks.try_each(work)
    found = errors_of(chosen)
    assert len(found) == len(chosen), [rank.value for rank in chosen]
    for rank in chosen:
        assert isinstance(rank.error, kind), repr(rank.error)
        assert rank.seconds <= LONGEST
    return {rank: str(error) for rank, error in found.items()}


def objects_of(ranks: Crew, number: int) -> dict[int, dict[str, int]]:
    """What each rank has put for its n-th attempt: object -> bytes, without the tables."""
    found: dict[int, dict[str, int]] = collections.defaultdict(dict)
    for info in ranks.place.list(""):
        kind, _, name = info.key.partition("/")
        if kind in ("chunks", "packs"):
            _, attempt, rank = name.rsplit(".", 2)
            if Attempt.parse(attempt).number == number:
                found[int(rank)][info.key] = info.size_bytes
    return found


# --- sessions and attempts --------------------------------------------------------------------


def test_all_ranks_save_in_one_session_and_get_the_same_checkpoint(ranks):
    for step in (10, 20):
        made = ranks.each(save(step))
        assert len({checkpoint.id for checkpoint in made}) == 1
        assert [checkpoint.step for checkpoint in made] == [step] * 4
    (epoch,) = [
        runs.read_epoch(ranks.tier, ranks[0].run.key, number)
        for number in runs.epoch_numbers(ranks.tier, ranks[0].run.key)
    ]
    assert epoch.session_key == f"{ranks.key}/1"
    first, second = sorted(records(ranks.tier), key=lambda record: record.step)
    assert first.attempt == f"{epoch.session}-10-1"
    assert second.attempt == f"{epoch.session}-20-2"
    assert [(r.epoch, r.sequence, r.world_size) for r in (first, second)] == [(1, 1, 4), (1, 2, 4)]
    assert check_place(ranks.place) == [10, 20]


def test_looking_at_a_run_and_restoring_from_it_opens_no_session(ranks):
    assert ranks.each(lambda rank: rank.restore()[0]) == [None] * 4
    assert ranks.each(lambda rank: rank.run.latest) == [None] * 4
    assert not list(ranks.place.list("runs/"))
    ranks.each(save(1))
    ranks.each(lambda rank: rank.restore())
    assert runs.epoch_numbers(ranks.tier, ranks[0].run.key) == [1]


def test_start_opens_one_session_for_all(ranks):
    opened = ranks.each(lambda rank: rank.run.start())
    assert len({epoch.session for epoch in opened}) == 1
    made = ranks.each(save(1))
    assert {checkpoint.record.session for checkpoint in made} == {opened[0].session}
    assert {checkpoint.record.epoch for checkpoint in made} == {1}


def test_restoring_an_older_one_and_saving_opens_the_next_session_together(ranks):
    for step in (1, 2):
        ranks.each(save(step))
    assert ranks.each(lambda rank: rank.restore(before_step=2)[0]) == [1] * 4
    made = ranks.each(save(3))
    assert {(c.record.epoch, c.record.sequence, c.record.parents) for c in made} == {
        (2, 1, (ranks[0].run[1].id,))
    }
    ranks.each(save(4))
    assert check_place(ranks.place) == [2, 1, 3, 4], "what was gone back to is newer than what was left"


def test_rewind_counts_at_once_for_all(ranks):
    for step in (1, 2):
        ranks.each(save(step))
    back = ranks.each(lambda rank: rank.run.rewind(1))
    assert {checkpoint.step for checkpoint in back} == {1}
    assert [c.step for c in ranks.each(lambda rank: rank.run.latest)] == [1] * 4
    ranks.each(save(2))
    assert ranks.each(lambda rank: rank.restore())[3][0] == 2
    assert ranks.each(lambda rank: rank.run.latest.record.epoch) == [2] * 4


def test_rewind_to_what_is_not_there_fails_on_all_and_opens_nothing(ranks):
    ranks.each(save(1))
    chosen = ranks.try_each(lambda rank: rank.run.rewind(7))
    assert {type(rank.error).__name__ for rank in chosen} == {"NotFoundError"}
    assert str(chosen[2].error).startswith("rank 0: ")
    ranks.each(save(2))
    assert runs.epoch_numbers(ranks.tier, ranks[0].run.key) == [1]


def test_a_run_is_forked_by_all_and_trained_on(ranks):
    ranks.each(save(1))
    source = ranks.each(lambda rank: rank.run[1])

    def fork(rank: Rank) -> ckptstore.Run:
        run = rank.store.run(
            "fork", rank=rank.rank, world_size=4, session_key=f"{ranks.key} fork", deadline_seconds=DEADLINE
        )
        assert run.fork_from(source[rank.rank]).step == 1
        assert run.save(2, rank.state(2)).result().step == 2
        return run

    forked = ranks.each(fork)
    assert len({run[2].id for run in forked}) == 1
    assert forked[0][2].record.parents == (forked[0][1].id,)
    assert forked[0][2].record.reused_bytes > 0
    chosen = ranks.try_each(lambda rank: forked[rank.rank].fork_from(source[rank.rank]))
    assert all(isinstance(rank.error, ConflictError) for rank in chosen)


def test_the_key_of_an_earlier_start_is_refused(place):
    with crew(place) as first:
        first.each(save(1))
        key = first.key
    with crew(place, session_key=key) as second:
        second.try_each(save(2))
        assert isinstance(second[0].error, UsageError)
        assert key in str(second[0].error)
        assert "new at each start" in str(second[0].error)
        for rank in second.ranks[1:]:
            assert isinstance(rank.error, ckptstore.CkptstoreError)
            assert rank.seconds <= LONGEST
    assert check_place(place) == [1]


def test_many_ranks_without_a_key_are_refused(ranks, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="session_key"):
        ranks[0].store.run(NAME, rank=0, world_size=4).save(1, {}).result()
    monkeypatch.setenv("SLURM_JOB_ID", "77")

    def alike(rank: Rank) -> str:
        run = rank.store.run(NAME, rank=rank.rank, world_size=4, deadline_seconds=DEADLINE)
        return run.save(1, rank.state(1)).result().id

    assert len(set(ranks.each(alike))) == 1


@pytest.mark.parametrize("given", [{"rank": "1", "world_size": 2}, {"rank": 0, "world_size": 2.0}])
def test_a_rank_that_is_no_int_is_refused_with_the_remedy(ranks, given):
    with pytest.raises(UsageError, match=r"must be an int, not ('1'|2\.0)") as caught:
        ranks[0].store.run(NAME, session_key="any", **given)
    assert "int(os.environ" in caught.value.hint


# --- one save ---------------------------------------------------------------------------------


def test_the_order_of_a_save(ranks):
    ranks.each(save(1))
    before = [len(rank.calls) for rank in ranks]
    made = ranks.each(save(2))[0]
    attempt = made.id
    for rank in ranks:
        calls = [(call.op, call.key) for call in rank.calls[before[rank.rank] :]]
        stored = [
            n for n, (op, key) in enumerate(calls) if op == "put" and key.startswith(("chunks/", "packs/"))
        ]
        synced = max(n for n, (op, _) in enumerate(calls) if op == "sync")
        assert stored
        assert max(stored) < synced
        start = ("put" if rank.rank == 0 else "get", f"parts/{attempt}/start.mp")
        assert calls.index(start) < min(stored), "nothing is written before the pins are announced"
        record = ("put", f"commits/{rank.run.key}/{attempt}.mp")
        if rank.rank == 0:
            assert calls.index(("put", f"intents/{attempt}.mp")) < calls.index(start)
            for other in (1, 2, 3):
                assert calls.index(("get", f"parts/{attempt}/{other}.mp")) < synced < calls.index(record)
        else:
            assert record not in calls, "only rank 0 commits"
            assert synced < calls.index(("put", f"parts/{attempt}/{rank.rank}.mp"))


def test_every_byte_is_written_once_and_the_work_is_spread(ranks):
    made = ranks.each(save(1))[0]
    written = objects_of(ranks, 1)
    sizes = {rank: sum(found.values()) for rank, found in written.items()}
    assert sum(sizes.values()) == made.record.logical_bytes
    assert set(sizes) == {0, 1, 2, 3}
    large = whole(1)["model"]
    biggest = max(large["large"].nbytes, large["frozen"].nbytes)
    assert max(sizes.values()) - min(sizes.values()) <= biggest
    # Each rank writes the rows that only it holds.
    contents = Contents(ranks.tier, made.record)
    rows = [tensor.name for tensor in contents.layout.tensors].index("model.rows")
    first, last = contents.layout.chunks.first[rows : rows + 2]
    keys = [contents.keys.keys[row] for row in contents.locations.object[first:last].tolist()]
    assert [int(key.rpartition(".")[2]) for key in keys] == [0, 1, 2, 3]


def test_what_has_not_changed_is_not_written_again_nor_are_tables_read(ranks):
    ranks.each(save(1))
    before = [len(rank.calls) for rank in ranks]
    made = ranks.each(lambda rank: rank.run.save(2, rank.state(1)).result())
    assert {checkpoint.record.new_bytes for checkpoint in made} == {0}
    assert objects_of(ranks, 2) == {}
    for rank in ranks:
        calls = rank.calls[before[rank.rank] :]
        assert not [call for call in calls if call.op == "read_into"]
        got = {call.key.partition("/")[0] for call in calls if call.op == "get"}
        assert got <= (
            {"ckptstore.json", "parts", "commits", "runs"}
            if rank.rank == 0
            else {"ckptstore.json", "parts", "commits"}
        )
        if rank.rank:
            asked = {call.key for call in calls if call.key.startswith("commits/")}
            assert asked == {f"commits/{rank.run.key}/{made[0].id}.mp"}, "it remembers what it wrote"


def test_after_a_restore_each_rank_reuses_what_is_stored(ranks):
    ranks.each(save(1))
    with crew(ranks.place) as next_start:
        next_start.each(lambda rank: rank.restore())
        made = next_start.each(lambda rank: rank.run.save(2, rank.state(1)).result())
        assert {checkpoint.record.new_bytes for checkpoint in made} == {0}


def test_the_rooms_of_decided_saves_are_cleared(ranks):
    for step in (1, 2):
        ranks.each(save(step))
    before = [len(rank.calls) for rank in ranks]
    ranks.each(save(3))
    listed = {
        call.key
        for rank, first in zip(ranks, before, strict=True)
        for call in rank.calls[first:]
        if call.op == "list"
    }
    assert listed == {f"parts/{ranks[0].run[3].id}/"}  # also when the room of the one before is cleared
    rooms = {info.key.split("/")[1] for info in ranks.place.list("parts/")}
    assert rooms == {ranks[0].run[3].id}
    assert not list(ranks.place.list("intents/"))


def grown(step: int) -> plain.Work:
    def work(rank: Rank) -> ckptstore.Checkpoint:
        state = rank.state(1)
        state["extra"] = {"new": np.full(5000, step, np.int32)}
        return rank.run.save(step, state).result()

    return work


def test_a_tensor_of_the_second_save_is_written_by_one_rank(ranks):
    """As the optimizer's are, when the first save came before its first step."""
    ranks.each(save(1))
    ranks.each(grown(2))
    assert sum(len(found) for found in objects_of(ranks, 2).values()) == 1


def test_a_tensor_that_appears_later_is_written_by_all_until_it_is_agreed_on_and_then_by_one(ranks):
    ranks.each(save(1))
    ranks.each(save(1))
    made = ranks.each(grown(3))[0]
    contents = Contents(ranks.tier, made.record)
    kept = [key for key in contents.keys.keys if made.id in key]
    assert [key.rpartition(".")[2] for key in kept] == ["0"], "of equal ones the lowest rank's counts"
    for step in (3, 4, 5):  # said with the start of 4; 5 may have been captured before
        if step > 3:
            ranks.each(grown(step))
        assert {rank: len(found) for rank, found in objects_of(ranks, step).items()} == {
            0: 1,
            1: 1,
            2: 1,
            3: 1,
        }
    ranks.each(grown(6))
    assert sum(len(found) for found in objects_of(ranks, 6).values()) == 1
    assert ranks[0].run[6].load()["extra"]["new"][0] == 6


def test_only_objects_that_a_pin_holds_are_reused_when_others_come_to_hold_a_tensor(ranks):
    def save_with(holders: set[int], step: int) -> plain.Work:
        def work(rank: Rank) -> ckptstore.Checkpoint:
            state: dict[str, Any] = {"own": {str(rank.rank): np.arange(20000) - 1e6 * rank.rank}}
            if rank.rank == 1:  # so that rank 2 has the least to write
                state["own"]["more"] = np.arange(40000)
            if rank.rank in holders:
                state["ema"] = {"w": np.arange(20000) + 0.25 * min(step, 2)}
            return rank.run.save(step, state).result()

        return work

    ranks.each(save_with({2}, 1))
    second = ranks.each(save_with({1, 2}, 2))[0]  # both write it, and rank 1's is kept
    third = ranks.each(save_with({1, 2}, 3))[0]
    held = set(Contents(ranks.tier, second.record).keys.keys)
    found = set(Contents(ranks.tier, third.record).keys.keys)
    assert {key for key in found - held if third.id not in key} == set()
    assert (ranks[0].run[3].load()["ema"]["w"] == np.arange(20000) + 0.5).all()


def test_a_state_of_other_shapes_later_is_agreed_on_anew(ranks):
    def narrow(step: int) -> plain.Work:
        def work(rank: Rank) -> ckptstore.Checkpoint:
            return rank.run.save(step, {"only": {"x": np.arange(step, dtype=np.float32)}}).result()

        return work

    ranks.each(save(1))
    for step in (10, 20, 30):
        ranks.each(narrow(step))
    ranks.each(save(40))
    assert ranks[2].run[20].load()["only"]["x"].tolist() == list(range(20))
    ranks[0].store.verify()


def test_replicas_that_differ_fail_the_save_by_name_and_the_next_one_works(ranks):
    ranks.each(save(1))

    def flipped(rank: Rank) -> ckptstore.Checkpoint:
        state = rank.state(2)
        if rank.rank == 2:
            state["model"]["small"]["1"][3] = -1.0
        return rank.run.save(2, state).result()

    for text in all_fail(ranks, flipped).values():
        assert "model.small.1" in text
        assert "rank 2" in text or "ranks 0, 1, 3" in text
    ranks.each(save(3))
    assert check_place(ranks.place) == [1, 3]


def test_replicas_that_differ_are_kept_of_the_lowest_rank_if_so_wanted():
    with crew(replicas="warn") as ranks:

        def flipped(rank: Rank) -> ckptstore.Checkpoint:
            state = rank.state(2)
            if rank.rank in (1, 3):
                state["model"]["small"]["1"][3] = -1.0
            return rank.run.save(2, state).result()

        made = ranks.each(flipped)[0]
        assert "model.small.1" in str(made.record.state_info["replicas"])


# --- ranks that cannot, or do not come --------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("who", [0, 2])
def test_what_one_rank_cannot_save_fails_the_save_on_all_by_name(ranks, at, who):
    for step in range(1, at):
        ranks.each(save(step))

    def work(rank: Rank) -> ckptstore.Checkpoint:
        state = rank.state(at)
        if rank.rank == who:
            state["optimizer"]["hook"] = lambda: None
        return rank.run.save(at, state).result()

    chosen = ranks.try_each(work)
    for rank in chosen:
        if rank.rank == who:
            assert isinstance(rank.error, UnsupportedValueError)
        else:
            assert isinstance(rank.error, SaveFailedError)
            assert f"rank {who}: " in str(rank.error)
        assert "optimizer.hook" in str(rank.error)
        assert rank.seconds < DEADLINE / 4, "nobody waits for the deadline"
    ranks.each(save(8))
    ranks.each(save(9))
    assert check_place(ranks.place)[-2:] == [8, 9]


@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_at_another_step_is_named_with_where_it_is(ranks, at, who):
    for step in range(1, at):
        ranks.each(save(step))
    work = {rank: save(10 if rank != who else 20) for rank in range(4)}
    texts = all_fail(ranks, work)
    asked = texts[0] if who else texts[1]
    where = f"rank {who} was at step 20 in its call {at}"
    assert where in asked, asked
    ranks.each(save(30))
    ranks.each(save(40))
    assert check_place(ranks.place)[-2:] == [30, 40]


@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_that_left_out_a_call_is_named_and_back_after_the_next(ranks, at, who):
    for step in range(1, at):
        ranks.each(save(step))
    others = [rank for rank in range(4) if rank != who]
    ranks.try_each(save(10), others)
    for rank in others:
        error = ranks[rank].error
        assert isinstance(error, (SaveFailedError, DeadlineError))
        assert f"rank {who}" in str(error)
        assert ranks[rank].seconds <= LONGEST
    ranks.try_each(save(20))
    ranks.each(save(30))
    ranks.each(save(40))
    assert check_place(ranks.place)[-2:] == [30, 40]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_that_never_comes_is_named_within_the_deadline(ranks, at, who):
    for step in range(1, at):
        ranks.each(save(step))
    others = [rank for rank in range(4) if rank != who]
    for rank in ranks.try_each(save(at), others):
        assert isinstance(rank.error, (SaveFailedError, DeadlineError))
        assert f"rank {who}" in str(rank.error)
        assert DEADLINE * 0.9 <= rank.seconds <= LONGEST
        assert rank.error.hint
    with crew(ranks.place) as restarted:
        restarted.each(save(5))
        assert check_place(ranks.place)[-1] == 5


def test_storage_that_fails_for_one_rank_fails_the_save_of_all_with_its_reason(ranks):
    ranks.each(save(1))
    broken = BackendError("the disk of rank 3 is gone (made to)")
    ranks[3].points.script[:] = [Fault("error", op="put", key="*s/??/*", times=None, error=broken)]
    for text in all_fail(ranks, save(2)).values():
        assert "the disk of rank 3 is gone" in text
    ranks[3].points.script.clear()
    ranks.each(save(3))
    assert check_place(ranks.place) == [1, 3]


def test_a_rank_that_is_told_of_a_failure_only_by_its_next_save_keeps_no_other_waiting(ranks):
    ranks.each(save(1))

    def asking(step: int, bad: int | None = None) -> plain.Work:
        def work(rank: Rank) -> Any:
            state = {"x": object()} if rank.rank == bad else rank.state(step)
            pending = rank.run.save(step, state)
            return pending.result() if rank.rank != 2 else pending

        return work

    ranks.try_each(asking(2, bad=0))
    assert sorted(errors_of(list(ranks))) == [0, 1, 3], "rank 2 has not asked"
    started = ranks.now
    ranks.try_each(asking(3))
    assert "step 2 failed" in str(ranks[2].error)
    for other in (0, 1, 3):
        assert "rank 2: it was told only now" in str(ranks[other].error)
    assert ranks.now - started < DEADLINE / 2
    ranks.each(asking(4))
    assert check_place(ranks.place) == [1, 4]


# --- one outcome ------------------------------------------------------------------------------


def test_a_commit_whose_reply_is_lost_is_a_success_everywhere(ranks):
    ranks[0].points.script[:] = [Fault("error_after", op="put", key="commits/*")]
    assert len({made.id for made in ranks.each(save(1))}) == 1
    assert check_place(ranks.place) == [1]


def test_rank_0_that_wakes_too_late_finds_the_attempt_ended(ranks):
    ranks.each(save(1))
    before = len(ranks[0].calls)
    with crew() as probe:  # the same calls, undisturbed
        for step in (1, 2):
            probe.each(save(step))
        ranks[0].stop_at = next(
            call.n for call in probe[0].calls[before:] if call.op == "put" and call.key.startswith("commits/")
        )
    texts = all_fail_late(ranks, save(2))
    assert "rank 0 did not commit it in" in texts[1]
    assert "fenced" in texts[0]
    (end,) = [end for end in ends(ranks.tier).values() if isinstance(end, CommitEnd)]
    assert (end.kind, Attempt.parse(end.attempt).step) == ("void", 2)
    ranks.each(save(3))
    assert check_place(ranks.place) == [1, 3]


def all_fail_late(ranks: Crew, work: plain.Work) -> dict[int, str]:
    chosen = ranks.try_each(work)
    assert all(isinstance(rank.error, SaveFailedError) for rank in chosen)
    return {rank.rank: str(rank.error) for rank in chosen}


def test_where_creation_is_not_exclusive_only_rank_0_writes_the_commit_key():
    with new_place(exclusive=False) as place, crew(place) as ranks:
        ranks.each(save(1))
        ranks[0].points.script[:] = [Fault("crash", op="put", key="commits/*")]
        chosen = ranks.try_each(save(2))
        assert ranks[0].is_dead
        for rank in chosen[1:]:
            assert isinstance(rank.error, SaveFailedError)
            assert "rank 0 did not commit" in str(rank.error)
            assert not [c for c in rank.calls if c.op == "put" and c.key.startswith("commits/")]
        assert [type(end) for end in ends(ranks.tier).values()] == [CommitRecord]
        with crew(place) as restarted:
            restarted.each(lambda rank: rank.restore())
            restarted.each(save(3))
        assert check_place(place) == [1, 3]


def test_a_later_start_takes_over_on_all_ranks_and_can_be_followed(ranks):
    ranks.each(save(1))
    with crew(ranks.place) as other:
        other.each(lambda rank: rank.restore())
        other.each(save(2))
        for text in all_fail(ranks, save(2), SessionSupersededError).values():
            assert "epoch 2" in text
        assert ranks.each(lambda rank: rank.restore()[0]) == [2] * 4
        ranks.each(save(3))
        all_fail(other, save(3), SessionSupersededError)
    assert check_place(ranks.place) == [1, 2, 3]


def test_no_rank_commits_what_another_has_fenced(ranks):
    """A VOID at the commit key, whoever wrote it, ends the attempt for all."""
    ranks.each(save(1))
    session = ranks[0].run.latest.record.session
    commits.fence(ranks.tier, ranks[0].run.key, f"{session}-2-2", "gc")
    for text in all_fail(ranks, save(2)).values():
        assert "step 2 failed" in text
    ranks.each(save(3))
    assert check_place(ranks.place) == [1, 3]


# --- restoring --------------------------------------------------------------------------------


def test_rank_0_decides_which_checkpoint_all_restore(ranks):
    for step in (1, 2):
        ranks.each(save(step))
    found = ranks.each(lambda rank: rank.restore())
    assert [step for step, _ in found] == [2] * 4
    assert all(holds(state, 2, rank, 4) for rank, (_, state) in enumerate(found))
    for rank in ranks.ranks[1:]:
        listed = [call for call in rank.calls if call.op == "list" and call.key.startswith("commits/")]
        assert not listed, "the others do not look themselves"
    assert not list(ranks.place.list("intents/")), "the read intent is taken back"


def _damage_for(rank: Rank, step: int) -> None:
    """Whatever this rank reads of the objects of that step has a flipped bit."""
    attempt = rank.run[step].id
    fault = Fault("flip", op="read_into", key=f"*{attempt}*", at=0, times=None)
    rank.points.script.append(fault)


def test_what_one_rank_cannot_read_fails_the_restore_on_all_by_name(ranks):
    for step in (1, 2):
        ranks.each(save(step))
    _damage_for(ranks[2], 2)
    chosen = ranks.try_each(lambda rank: rank.restore())
    for rank in chosen:
        assert isinstance(rank.error, ckptstore.CkptstoreError)
        assert "damaged" in str(rank.error)
        if rank.rank != 2:
            assert "rank 2" in str(rank.error)
    assert isinstance(chosen[2].error.__cause__ or chosen[2].error, ChunkDamagedError)


def test_with_fallback_all_take_the_older_one(ranks):
    for step in (1, 2):
        ranks.each(save(step))
    _damage_for(ranks[2], 2)
    found = ranks.each(lambda rank: rank.restore(fallback=True))
    assert [step for step, _ in found] == [1] * 4
    assert all(holds(state, 1, rank, 4) for rank, (_, state) in enumerate(found))
    for rank in ranks:
        (passed,) = rank.run.restored.passed_over
        assert "step 2" in passed
        assert "rank 2" in passed
    ranks.each(save(3))
    assert {c.record.parents for c in ranks.each(lambda rank: rank.run[3])} == {(ranks[0].run[1].id,)}


def test_a_state_that_does_not_fit_on_one_rank_is_told_to_all_and_changes_none(ranks):
    ranks.each(save(1))

    def work(rank: Rank) -> None:
        state = plain.blank_of(rank.rank, 4)
        if rank.rank == 1:
            state["model"]["large"] = np.zeros((3, 2500))
        try:
            rank.run.restore(state)
        finally:
            assert not state["model"]["frozen"].any()
            rank.value = state

    for text in all_fail(ranks, work, StateMismatchError).values():
        assert "model.large" in text


def test_a_rank_that_does_not_come_to_a_restore_is_named(ranks):
    ranks.each(save(1))
    for rank in ranks.try_each(lambda rank: rank.restore(), [0, 1, 3]):
        assert isinstance(rank.error, DeadlineError)
        assert "rank 2 said nothing" in str(rank.error)
        assert rank.seconds <= LONGEST
    with crew(ranks.place) as without_leader:
        for rank in without_leader.try_each(lambda rank: rank.restore(), [1, 2, 3]):
            assert isinstance(rank.error, DeadlineError)
            assert "rank 0 said nothing" in str(rank.error)


def test_other_numbers_of_ranks_restore_what_four_have_saved(ranks):
    ranks.each(save(1))
    for world in (1, 2, 3, 6):
        with crew(ranks.place, world=world) as others:
            for rank, (step, state) in enumerate(others.each(_without_own)):
                assert step == 1
                assert holds(state, 1, rank, world)


def _without_own(rank: Rank) -> tuple[int | None, dict[str, Any]]:
    state = plain.blank_of(rank.rank, rank.world)
    step = rank.run.restore(state, exclude="own.*")
    state["own"] = rank.state(1)["own"]
    return step, state


def test_words_are_tidied(ranks):
    ranks.each(save(1))
    for _ in range(5):
        ranks.each(lambda rank: rank.restore())
    words = [info.key for info in ranks.place.list("parts/") if info.key.startswith("parts/words-")]
    assert len({key.rpartition("/")[2].split(".")[0] for key in words}) <= 2


def test_a_store_that_may_not_be_written_is_said_to_be_one(ranks):
    ranks.each(save(1))
    refused = PermissionDeniedError("read-only (made to)")
    with crew(ranks.place) as readers:
        for rank in readers:
            for op in ("put", "delete"):
                rank.points.script.append(Fault("error", op=op, times=None, error=refused))
        for rank in readers:
            state = plain.blank_of(rank.rank, 4)
            rank.run[1].restore(state, exclude="own.*")
            assert np.array_equal(state["model"]["large"], whole(1)["model"]["large"])
        chosen = readers.try_each(lambda rank: rank.restore())
        assert isinstance(chosen[0].error, PermissionDeniedError)
        assert "read-only" in str(chosen[0].error)
        for rank in chosen:
            assert rank.error is not None
            assert rank.seconds <= LONGEST
        for rank in readers.try_each(save(2)):
            assert rank.error is not None
            assert rank.seconds <= LONGEST
    assert check_place(ranks.place) == [1]
