"""Writers, readers and collectors on a bucket, killed and stopped at random; minutes of it in `make soak`."""

from __future__ import annotations

import os
import random

import pytest

from tests.gc._swarm import Swarm, play

pytestmark = pytest.mark.s3

SECONDS = float(os.environ.get("CKPTSTORE_SOAK_GC_SECONDS", "180"))
SEED = int(os.environ.get("CKPTSTORE_KILL_SEED", "5"))


@pytest.mark.timeout(300)
def test_nothing_is_lost_on_a_bucket_whoever_is_killed_or_stopped_meanwhile(tmp_path, s3_url):
    few = Swarm(seconds=4.0, seed=SEED, writers=1, readers=1, collectors=2, every=0.4)
    play(tmp_path / "swarm", s3_url, few)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_minutes_of_it_on_a_bucket_lose_nothing_and_leave_no_garbage(tmp_path, s3_url):
    seed = int(os.environ.get("CKPTSTORE_SOAK_SEED", random.SystemRandom().randrange(2**32)))
    play(tmp_path / "swarm", s3_url, Swarm(seconds=SECONDS, seed=seed, least=20))
