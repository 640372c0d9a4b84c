"""Minutes of writers, readers and collectors that are killed and stopped: `make soak`. On S3: tests/s3."""

from __future__ import annotations

import os
import random

import pytest

from tests.gc._swarm import Swarm, play

SECONDS = float(os.environ.get("CKPTSTORE_SOAK_GC_SECONDS", "180"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_minutes_of_it_on_a_local_tier_lose_nothing_and_leave_no_garbage(tmp_path):
    seed = int(os.environ.get("CKPTSTORE_SOAK_SEED", random.SystemRandom().randrange(2**32)))
    play(tmp_path / "swarm", str(tmp_path / "store"), Swarm(seconds=SECONDS, seed=seed, least=20))
