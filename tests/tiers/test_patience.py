"""A tier that asks for patience, or is slow to fail, is waited for long only where no other can be asked."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from ckptstore.environment import Environment
from ckptstore.errors import BackendError
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier.retry import HURRY_SECONDS, PATIENCE_SECONDS, RetryingBackend, hurried
from tests.crash._support import make_state, memory_place
from tests.replicate.made import RUN, opened, places, replicate

FROZEN = make_state(1)["model"]["frozen"]
BUSY = BackendError("503 SlowDown (made to)", transient=True, throttled=True)


@pytest.fixture
def slept():
    return []


@pytest.fixture
def busy(slept):
    """A store of two tiers whose first one, once told to, only asks for patience when chunks are read."""
    with places() as (hot, cold):
        faulty = FaultBackend(hot)
        with contextlib.closing(opened(faulty, cold, environment=Environment(sleep=slept.append))) as store:
            store.run(RUN).save(1, make_state(1), wait=True)
            yield store, faulty


def test_another_copy_is_asked_soon(busy, slept):
    store, hot = busy
    replicate(store)
    checkpoint = store.run(RUN).latest
    hot.script.append(Fault("error", op="read_into", times=None, error=BUSY))
    slept.clear()
    assert np.array_equal(checkpoint.load(only="model.frozen")["model"]["frozen"], FROZEN)
    assert 0 < sum(slept) <= 2 * HURRY_SECONDS  # for the first thing read, and to take the intent back


def test_the_only_copy_is_worth_all_patience(busy, slept):
    store, hot = busy
    checkpoint = store.run(RUN).latest
    _ = checkpoint.contents.layout
    hot.script.append(Fault("error", op="read_into", times=None, error=BUSY))
    slept.clear()
    with pytest.raises(BackendError, match="SlowDown"):
        checkpoint.load(only="model.frozen")
    assert sum(slept) >= PATIENCE_SECONDS / 2


@pytest.mark.parametrize(("is_so", "tries"), [(True, 1), (False, 4)])
def test_time_outs_are_not_tried_again_in_a_hurry(is_so, tries):
    clock = [0.0]
    with memory_place() as place:
        faulty = FaultBackend(place, [Fault("error", times=None)])

        def monotonic():
            clock[0] += 60.0  # each try ends by its time-out
            return clock[0]

        retrying = RetryingBackend(faulty, sleep=lambda _: None, monotonic=monotonic)
        with hurried(is_so), pytest.raises(BackendError):
            retrying.head("a")
        assert len(faulty.log) == tries
        with pytest.raises(BackendError):
            retrying.head("a")
        assert len(faulty.log) == tries + 4
