"""Real processes, really killed."""

from __future__ import annotations

import contextlib
import random

import ckptstore
from tests.crash._kills import check, kill_often, start
from tests.crash._support import TRAIN, make_state, same


def test_trainings_killed_at_drawn_points_lose_nothing_that_was_committed(tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    told = kill_often(tmp_path / "store", kills=10, seed=seed)
    child = start(tmp_path / "store", told + 2)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert out.split() == [str(told + 1), str(told + 2), "done"]
    assert check(tmp_path / "store", told + 2) == told + 2


def test_what_kills_left_behind_is_only_what_nothing_names(tmp_path):
    """Temporaries, intents and orphans of a killed save are no part of any answer."""
    directory = tmp_path / "store"
    ckptstore.init(directory, chunk_bytes=64 << 10).close()
    first = start(directory, 1)
    assert first.communicate(timeout=60)[0].split() == ["1", "done"]
    killed = start(directory, 2, kill_at=110)
    killed.communicate(timeout=60)
    with contextlib.closing(ckptstore.open(directory)) as store:
        run = store.run(TRAIN)
        assert same(run[1].load(), make_state(1))
        assert [c.step for c in run.checkpoints()] in ([1], [1, 2])
        assert not store.verify().problems
