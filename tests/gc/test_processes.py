"""Writers, readers and collectors at once, killed and stopped at random. Minutes of it: tests/soak."""

from __future__ import annotations

import os

import pytest

from tests.gc._swarm import Swarm, play

SEED = int(os.environ.get("CKPTSTORE_KILL_SEED", "5"))


@pytest.mark.timeout(300)
def test_nothing_committed_and_kept_is_lost_whoever_is_killed_or_stopped_meanwhile(tmp_path):
    play(tmp_path / "swarm", str(tmp_path / "store"), Swarm(seconds=6.0, seed=SEED))
