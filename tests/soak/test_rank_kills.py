"""Real ranks lost at every call of a save, and torch-free ones in thousands of orders: `make soak`."""

from __future__ import annotations

import os
import random

import pytest

from ckptstore_memory import MemoryBackend
from tests.inline import all_inline
from tests.ranks._kills import WORLD, Strike, count_calls, strike_once
from tests.ranks._plain_ranks import crew, new_place
from tests.ranks.pool import shared_pool
from tests.ranks.test_points import lost_as_drawn

ORDERS = int(os.environ.get("CKPTSTORE_SOAK_ORDERS", "2000"))


@pytest.mark.soak
@pytest.mark.torch
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_real_rank_is_lost_at_every_point(tmp_path, rank, how):
    pool = shared_pool()
    calls = count_calls(pool, tmp_path / "count")[rank]
    assert calls >= 8
    for n in range(1, calls + 1):
        strike = Strike(rank, n, how)
        try:
            strike_once(pool, tmp_path / str(n), strike)
        except BaseException as error:
            error.add_note(str(strike))
            raise


@pytest.fixture
def past(monkeypatch):
    """A place where step 1 was saved; ranks make their calls one by one."""
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    all_inline(monkeypatch)
    with new_place() as place, crew(place) as ranks:
        ranks.each(lambda rank: rank.save(1))
        yield place


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ranks_are_lost_in_thousands_of_orders(past: MemoryBackend) -> None:
    first = random.SystemRandom().randrange(2**32)
    for seed in range(first, first + ORDERS):
        try:
            lost_as_drawn(past, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
