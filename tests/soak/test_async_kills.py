"""A hundred real ends and restarts of a training whose saves overlap: `make soak`."""

from __future__ import annotations

import os
import random

import pytest

from tests.saving._kills import kill_often

KILLS = int(os.environ.get("CKPTSTORE_SOAK_ASYNC_KILLS", "100"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_training_that_ends_a_hundred_times_while_saves_overlap_loses_nothing_committed(tmp_path):
    seed = int(os.environ.get("CKPTSTORE_SOAK_SEED", random.SystemRandom().randrange(2**32)))
    assert kill_often(tmp_path / "store", kills=KILLS, seed=seed) > KILLS // 2
