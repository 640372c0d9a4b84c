"""Four ranks save to the hot tier while rank 0 copies to the cold one, and the copier dies."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.replicate import attempts
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from tests.crash._support import check_objects, copy_of
from tests.inline import all_inline
from tests.ranks._plain_ranks import check_place, crew
from tests.replicate.made import opened, owed, places, replicate

EVERY = 7
"""Of the numbered calls, so many apart the copier dies; test_points.py has one rank and all."""


@pytest.fixture(autouse=True)
def _same_calls_each_time(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    monkeypatch.setattr(attempts, "seems_alive", lambda document: False)  # this process "died"
    all_inline(monkeypatch)


@contextlib.contextmanager
def saved():
    """Steps 1 and 2 of four ranks in the hot tier, the first in the cold one, too."""
    with places() as (hot, cold), crew(hot) as ranks:
        ranks.each(lambda rank: rank.save(1))
        with contextlib.closing(opened(hot, cold)) as store:
            replicate(store)
        ranks.each(lambda rank: rank.save(2))
        yield hot, cold


def test_rank_0_copies_while_all_ranks_save():
    with places() as (hot, cold), crew(hot, seed=3) as ranks, contextlib.closing(opened(hot, cold)) as store:
        ranks.each(lambda rank: rank.save(1))

        def save_and_copy(rank):
            pending = rank.run.save(2, rank.state(2))
            sent = [] if rank.rank else [one.step for one in replicate(store).sent]
            pending.result()
            return sent

        assert ranks.each(save_and_copy)[0] in ([1], [2, 1])
        assert check_place(cold) in ([1], [1, 2])
        replicate(store)
        assert owed(store) == 0
        assert check_place(hot) == check_place(cold) == [1, 2]


@pytest.mark.parametrize("which", ["hot", "cold"])
def test_a_crash_of_the_copier_loses_nothing_of_four_ranks(which):
    """C012: of a checkpoint of four ranks, too, nothing partial shows."""
    with saved() as (hot, cold):
        number, reached = 0, True
        while reached:
            with copy_of(hot) as own_hot, copy_of(cold) as own_cold:
                watched = FaultBackend(own_hot if which == "hot" else own_cold)
                pair = (watched, own_cold) if which == "hot" else (own_hot, watched)
                with contextlib.closing(opened(*pair)) as store:
                    last = len(watched.log) + 1 + number
                    watched.script.append(Fault("crash", n=last))
                    with contextlib.suppress(SimulatedCrash):
                        replicate(store)
                    reached = len(watched.log) >= last
                assert check_place(own_hot) == [1, 2]
                there = check_place(own_cold)
                assert there in ([1], [1, 2])
                with contextlib.closing(opened(own_hot, own_cold)) as store:
                    assert owed(store) == 2 - len(there)
                    replicate(store)
                    assert owed(store) == 0
                    with crew(own_hot) as ranks:  # and the ranks go on
                        ranks.each(lambda rank: rank.restore())
                        ranks.each(lambda rank: rank.save(3))
                    replicate(store)
                assert check_place(own_hot) == check_place(own_cold) == [1, 2, 3]
                check_objects(own_cold)
            number += EVERY
        assert number > 3 * EVERY
