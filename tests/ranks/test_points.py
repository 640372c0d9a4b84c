"""Each of four ranks dies, or is stopped and goes on too late, at every call that it makes in a save."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptstore.errors import BackendError, CkptstoreError, DeadlineError, SaveFailedError
from ckptstore.testing import Call, Fault
from ckptstore_memory import MemoryBackend
from tests.crash._support import records
from tests.inline import all_inline
from tests.ranks._plain_ranks import DEADLINE, Crew, check_place, copied, crew, holds, new_place

WORLD = 4
STRUCK = 2
"""The step whose save is struck; step 1 is there before."""

LONGEST = 1.3 * DEADLINE

Place = MemoryBackend


@pytest.fixture(autouse=True)
def _same_calls_each_time(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    all_inline(monkeypatch)


@pytest.fixture(scope="module")
def past() -> Iterator[Place]:
    """A place where an earlier start has saved step 1."""
    with pytest.MonkeyPatch.context() as patch, new_place() as place:
        patch.setenv("CKPTSTORE_MANIFEST", ":memory:")
        with crew(place) as ranks:
            ranks.each(lambda rank: rank.save(1))
        yield place


@contextlib.contextmanager
def _first_save(past: Place) -> Iterator[Crew]:
    """A new start has restored, and saves for the first time: session, agreement, tables of the base."""
    with copied(past) as place, crew(place) as ranks:
        ranks.each(lambda rank: rank.restore())
        yield ranks


@contextlib.contextmanager
def _next_save(_past: Place) -> Iterator[Crew]:
    """The second save of a session."""
    with crew() as ranks:
        ranks.each(lambda rank: rank.save(1))
        yield ranks


SCENARIOS: dict[str, Callable[[Place], Any]] = {"first save": _first_save, "next save": _next_save}


@dataclasses.dataclass(frozen=True)
class Point:
    """A call of one rank in the struck save; `n` counts all its calls."""

    rank: int
    n: int
    call: Call


def _points(past: Place, name: str) -> list[Point]:
    """All points of a save that nothing disturbs."""
    with SCENARIOS[name](past) as ranks:
        before = [len(rank.calls) for rank in ranks]
        ranks.each(lambda rank: rank.save(STRUCK))
        assert check_place(ranks.place) == [1, STRUCK]
        return [Point(rank.rank, call.n, call) for rank in ranks for call in rank.calls[before[rank.rank] :]]


def _same_call(point: Point, other: Point | None) -> bool:
    return other is not None and (point.call.op, point.call.key) == (other.call.op, other.call.key)


def _changes(point: Point) -> bool:
    return point.call.op in ("put", "delete", "sync")


def _is_heard(point: Point) -> bool:
    """Others learn something by it."""
    return point.call.op == "put" and point.call.key.startswith(("parts/", "commits/", "runs/"))


def _one_outcome(ranks: Crew, struck: int) -> bool:
    """All living ranks know what the place says, in time, and who was to blame; whether it committed."""
    committed = STRUCK in {record.step for record in records(ranks.tier)}
    for rank in ranks.living:
        if rank.was_stopped:
            assert rank.seconds <= 2 * LONGEST
        else:
            assert rank.seconds <= LONGEST, f"rank {rank.rank} waited for {rank.seconds} s"
        assert (rank.error is None) == committed, f"committed: {committed}, rank {rank.rank}: {rank.error!r}"
        if rank.error is None:
            assert rank.value.step == STRUCK
            continue
        assert isinstance(rank.error, (SaveFailedError, DeadlineError)), repr(rank.error)
        assert rank.error.hint
        if not rank.was_stopped:
            assert f"rank {struck}" in str(rank.error), f"rank {rank.rank} does not blame it: {rank.error}"
    return committed


def _next_start(place: Place, committed: bool) -> None:
    """New ranks take the newest whole checkpoint, and their saves work."""
    with crew(place) as ranks:
        found = ranks.each(lambda rank: rank.restore())
        newest = STRUCK if committed else 1
        assert [step for step, _ in found] == [newest] * WORLD
        assert all(holds(state, newest, rank, WORLD) for rank, (_, state) in enumerate(found))
        ranks.each(lambda rank: rank.save(9))
    assert check_place(place) == ([1, STRUCK, 9] if committed else [1, 9])


def _dies_before(ranks: Crew, point: Point) -> None:
    ranks[point.rank].points.script[:] = [Fault("crash", n=point.n)]
    ranks.try_each(lambda rank: rank.save(STRUCK))
    assert ranks[point.rank].is_dead
    _next_start(ranks.place, _one_outcome(ranks, point.rank))


def _dies_after(ranks: Crew, point: Point) -> None:
    ranks[point.rank].points.script[:] = [Fault("crash_after", n=point.n)]
    ranks.try_each(lambda rank: rank.save(STRUCK))
    assert ranks[point.rank].is_dead
    _next_start(ranks.place, _one_outcome(ranks, point.rank))


def _last_write_lands_late(ranks: Crew, point: Point) -> None:
    """It is stopped before it writes; when the others have given up, the write lands, and it dies."""
    struck = ranks[point.rank]
    struck.stop_at = point.n
    struck.points.script[:] = [Fault("crash_after", n=point.n)]
    ranks.try_each(lambda rank: rank.save(STRUCK))
    # A record that meets the VOID of the others is refused: that write never lands, and its rank lives.
    assert struck.is_dead or point.call.key.startswith("commits/")
    _next_start(ranks.place, _one_outcome(ranks, point.rank))


def _is_stopped(ranks: Crew, point: Point) -> None:
    """It goes on when the others have given up; all train on and save together."""
    ranks[point.rank].stop_at = point.n
    ranks.try_each(lambda rank: rank.save(STRUCK))
    assert ranks[point.rank].was_stopped
    committed = _one_outcome(ranks, point.rank)
    ranks.each(lambda rank: rank.save(3))
    assert check_place(ranks.place) == ([1, STRUCK, 3] if committed else [1, 3])


def _reply_is_lost(ranks: Crew, point: Point) -> None:
    """What it writes is there, but it does not hear so: nobody notices."""
    if point.call.op == "sync":
        return  # never repeated: a later success says nothing about the puts before
    ranks[point.rank].points.script[:] = [Fault("error_after", n=point.n)]
    ranks.each(lambda rank: rank.save(STRUCK))
    assert check_place(ranks.place) == [1, STRUCK]


BROKEN = BackendError("the disk is gone (made to)")


def _storage_fails(ranks: Crew, point: Point) -> None:
    """Its storage fails once, for good: either that did not matter, or all are told why; then all go on."""
    ranks[point.rank].points.script[:] = [Fault("error", n=point.n, error=BROKEN)]
    ranks.try_each(lambda rank: rank.save(STRUCK))
    committed = STRUCK in {record.step for record in records(ranks.tier)}
    for rank in ranks:
        assert rank.seconds <= LONGEST
        if rank.error is None:
            assert committed
            continue
        assert isinstance(rank.error, CkptstoreError), repr(rank.error)
        # Whoever asks for an outcome and gets no answer cannot know it.
        assert not committed or (rank.rank == point.rank and point.call.key.startswith("commits/"))
        assert BROKEN.message in str(rank.error) or f"rank {point.rank}" in str(rank.error)
    ranks.try_each(lambda rank: rank.save(3))  # some may have to find each other again
    ranks.each(lambda rank: rank.save(4))
    assert check_place(ranks.place)[-1] == 4


KINDS: dict[str, tuple[Callable[[Crew, Point], None], Callable[[Point], bool]]] = {
    # What it only reads nobody sees: to die before that is to die before what it writes next.
    "dies before the call": (_dies_before, _changes),
    "dies after it was heard": (_dies_after, _is_heard),
    "dies, and its last write lands late": (_last_write_lands_late, _changes),
    "is stopped before the call": (_is_stopped, lambda _point: True),
    "does not hear that the call was done": (_reply_is_lost, _changes),
    "cannot make the call": (_storage_fails, lambda _point: True),
}


QUICK = ("dies before the call", "dies after it was heard")
LOSSES = [
    # Rank 0 leads; the others are alike, and what takes long is tried on one of them.
    pytest.param(kind, rank, marks=() if kind in QUICK or rank in (0, WORLD - 1) else pytest.mark.soak)
    for kind in KINDS
    for rank in range(WORLD)
]


@pytest.mark.parametrize(("kind", "rank"), LOSSES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_rank_is_lost_at_every_point_and_nothing_else_is(past, name, kind, rank):
    strike, wanted = KINDS[kind]
    points = [point for point in _points(past, name) if point.rank == rank and wanted(point)]
    # A poll repeated is the same point again.
    points = [point for point, after in itertools.pairwise([*points, None]) if not _same_call(point, after)]
    assert points
    for point in points:
        with SCENARIOS[name](past) as ranks:
            try:
                strike(ranks, point)
            except BaseException as error:
                error.add_note(f"rank {rank} struck at its call {point.call.op} {point.call.key!r}")
                raise


def test_a_save_has_the_points_that_are_tried(past):
    """Guards the test above: should a save stop making calls, it would try nothing."""
    for name in SCENARIOS:
        points = _points(past, name)
        for rank in range(WORLD):
            ops = [
                (point.call.op, point.call.key.partition("/")[0]) for point in points if point.rank == rank
            ]
            assert ("put", "parts") in ops
            assert ("sync", "") in ops
            assert {kind for op, kind in ops if op == "put"} & {"chunks", "packs"}
            assert len(ops) >= 7, (name, rank, ops)


def lost_as_drawn(past: Place, seed: int) -> None:
    """One rank is struck at a drawn point, while ranks overtake each other at every call as drawn."""
    draw = random.Random(seed)
    with copied(past) as place, crew(place, seed=seed) as ranks:
        ranks.each(lambda rank: rank.restore())
        struck = ranks[draw.randrange(WORLD)]
        point = Point(struck.rank, len(struck.calls) + draw.randrange(1, 36), Call(0, "", "commits/"))
        strike = draw.choice([_dies_before, _is_stopped, _last_write_lands_late])
        struck.points.script[:] = [] if strike is _is_stopped else [Fault("crash", n=point.n)]
        struck.stop_at = point.n if strike in (_is_stopped, _last_write_lands_late) else None
        ranks.try_each(lambda rank: rank.save(STRUCK))
        _next_start(ranks.place, _one_outcome(ranks, struck.rank))


@pytest.mark.parametrize("seed", range(12))
def test_in_whatever_order_they_go(past, seed):
    lost_as_drawn(past, seed)
