"""Real ends at random moments while saves overlap: kills, stops, os._exit. Hundreds: tests/soak."""

from __future__ import annotations

import os

import pytest

from tests.saving._kills import kill_often

SEED = int(os.environ.get("CKPTSTORE_KILL_SEED", "5"))


@pytest.mark.timeout(300)
def test_a_training_that_ends_in_any_way_while_saves_overlap_loses_nothing_committed(tmp_path):
    assert kill_often(tmp_path / "store", kills=10, seed=SEED) > 10
