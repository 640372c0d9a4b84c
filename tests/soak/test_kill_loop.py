"""Hundreds of real kills: `make soak`."""

from __future__ import annotations

import os
import random

import pytest

from tests.crash._kills import kill_often

KILLS = int(os.environ.get("CKPTSTORE_SOAK_KILLS", "200"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_training_killed_hundreds_of_times_loses_nothing_that_was_committed(tmp_path):
    seed = int(os.environ.get("CKPTSTORE_SOAK_SEED", random.SystemRandom().randrange(2**32)))
    assert kill_often(tmp_path / "store", kills=KILLS, seed=seed) > KILLS // 10
