"""Real ends of a training and of the `replicate --watch` beside it. Hundreds: tests/soak."""

from __future__ import annotations

import os

import pytest

from tests.replicate._kills import kill_often

SEED = int(os.environ.get("CKPTSTORE_KILL_SEED", "5"))


@pytest.mark.timeout(300)
def test_a_training_and_its_sidecar_that_end_in_any_way_leave_both_tiers_whole(tmp_path):
    """C012: nothing partial shows in the second tier, wherever the copy is ended."""
    assert kill_often(tmp_path, kills=4, seed=SEED) > 4
