"""Pins in stores of several tiers: in all of them, or in none."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.errors import BackendError, ConflictError, PermissionDeniedError
from ckptstore.model.record import IntentDoc
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier import intents, layout
from tests.crash._support import make_state
from tests.replicate.made import RUN, opened, places, replicate

DENIED = PermissionDeniedError("no entry")
AWAY = BackendError("away", transient=True)


@pytest.fixture
def tiers(monkeypatch):
    """A store with a checkpoint in both tiers, and the ways to them."""
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    with places() as made:
        hot, cold = map(FaultBackend, made)
        with contextlib.closing(opened(hot, cold)) as store:
            store.run(RUN).save(1, make_state(1)).result()
            replicate(store)
            yield store, hot, cold


def pins(store) -> dict[str, list[IntentDoc]]:
    return {tier.name: list(intents.list_intents(tier)) for tier in store.tiers}


@pytest.mark.parametrize("how", ["refused", "reply lost"])
def test_a_pin_that_one_tier_does_not_take_is_in_none(tiers, how):
    store, _, cold = tiers
    kind, error = ("error", DENIED) if how == "refused" else ("error_after", DENIED)
    cold.script.append(Fault(kind, op="put", key="intents/*", error=error))
    with pytest.raises(PermissionDeniedError, match="no entry"):
        store.run(RUN).pin(1)
    assert pins(store) == {"hot": [], "cold": []}


def test_a_pin_of_what_is_being_deleted_in_one_tier_is_in_none(tiers):
    store, _, cold = tiers
    run = store.run(RUN)
    checkpoint = run[1]
    (attempt,) = [copy.attempt for copy in checkpoint.copies if copy.tier.name == "cold"]
    cold.put(layout.doom_key(run.key, attempt), [b"x"])
    with pytest.raises(ConflictError, match="already being deleted"):
        run.pin(checkpoint)
    assert pins(store) == {"hot": [], "cold": []}


def test_what_cannot_be_taken_back_is_named_and_so_is_what_cannot_be_unpinned(tiers):
    store, hot, cold = tiers
    run = store.run(RUN)
    stays = Fault("error", op="delete", key="intents/*", times=None, error=DENIED)
    hot.script.append(stays)
    cold.script.append(Fault("error", op="put", key="intents/*", times=None, error=AWAY))
    with pytest.raises(BackendError, match=f"left in tier hot: away .*unpin {run[1].id}"):
        run.pin(1)
    found = pins(store)
    assert (len(found["hot"]), found["cold"]) == (1, [])
    with pytest.raises(BackendError, match="left in tier hot: it could not be removed"):
        run.unpin(1)
    hot.script.remove(stays)
    assert run.unpin(1) == 1
    assert pins(store) == {"hot": [], "cold": []}
