"""Hundreds of real ends of a training and of the `replicate --watch` beside it: `make soak`."""

from __future__ import annotations

import os
import random

import pytest

from tests.replicate._kills import kill_often

KILLS = int(os.environ.get("CKPTSTORE_SOAK_REPLICATE_KILLS", "200"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_training_and_its_sidecar_that_end_hundreds_of_times_leave_both_tiers_whole(tmp_path):
    seed = int(os.environ.get("CKPTSTORE_SOAK_SEED", random.SystemRandom().randrange(2**32)))
    assert kill_often(tmp_path, kills=KILLS, seed=seed) > KILLS // 2
