"""A drawn sample of kills and stops of real ranks; `make soak` tries all points."""

from __future__ import annotations

import random

import pytest

from tests.ranks._kills import WORLD, Strike, count_calls, strike_once

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_real_ranks_that_are_killed_or_stopped_at_drawn_points(rank_pool, tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    calls = count_calls(rank_pool, tmp_path / "count")
    drawn = draw.sample(range(1, WORLD), 3)
    struck = [(0, "kill"), (0, "stop"), (drawn[0], "kill"), (drawn[1], "stop"), (drawn[2], "kill")]
    for number, (rank, how) in enumerate(struck):
        strike = Strike(rank, draw.randrange(1, calls[rank] + 1), how)
        try:
            strike_once(rank_pool, tmp_path / str(number), strike)
        except BaseException as error:
            error.add_note(f"{strike}, seed {seed}")
            raise
