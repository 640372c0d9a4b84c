"""Pins of checkpoints of which a tier has two records for a while: after a repair or a trim."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.errors import NotFoundError
from ckptstore.gc.trim import trim
from tests.crash._support import make_state
from tests.gc.made import gc
from tests.replicate.made import RUN, opened, places


def test_a_checkpoint_with_two_records_in_a_tier_is_pinned_once_and_both_stay() -> None:
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = store.run(RUN)
        first = run.save(1, make_state(1)).result()
        run.save(2, make_state(2)).result()
        made = trim(store.tiers[0], run.key, first.id, ["optimizer"], reason="test")
        assert made is not None
        run.pin(1)
        assert len(list(hot.list("intents/"))) == 1
        both = {(run.key, first.id), (run.key, made.made)}
        assert {(stay.run_key, stay.attempt) for stay in gc(hot, *both).stays} == both
        assert run.unpin(1) == 1
        with pytest.raises(NotFoundError, match="not pinned"):
            run.unpin(1)
        assert set(gc(hot, *both).collected) == both
