"""What `status` says: of each tier, and of each checkpoint in each tier."""

from __future__ import annotations

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import NotFoundError
from ckptstore.inspect.status import status

TOML = """\
[[tiers]]
name = "nvme"
url = "hot"
[[tiers]]
name = "shared"
url = "cold"
[[tiers]]
name = "archive"
url = "archive"
replicate = "manual"
"""


def state(step):
    return {"model": {"weight": np.full((50, 20), step, np.float32)}}


@pytest.fixture
def toml(tmp_path):
    """Run "gpt": steps 10 and 20 in two tiers, 30 in the first only; run "new": step 1 in the first only."""
    path = tmp_path / "ckptstore.toml"
    path.write_text(TOML)
    ckptstore.init(path).close()
    first = tmp_path / "first.toml"  # saves to the first tier alone, so that nothing is copied unasked
    first.write_text('[[tiers]]\nname = "nvme"\nurl = "hot"\n')
    with ckptstore.open(first) as store:
        run = store.run("gpt")
        for step in (10, 20):
            run.save(step, state(step)).result()
    with ckptstore.open(path) as store:
        store.replication.run()
    with ckptstore.open(first) as store:
        run = store.run("gpt")
        run.restore(state(0))
        run.save(30, state(30)).result()
        store.run("new").save(1, state(1)).result()
    return path


@pytest.fixture
def store(toml):
    with ckptstore.open(toml) as opened:
        yield opened


def tiers(found):
    return {tier.name: tier for tier in found.tiers}


def presences(found):
    return {(item.run, item.step): [place.presence for place in item.tiers] for item in found.checkpoints}


def test_what_is_where(store):
    assert presences(status(store)) == {
        ("gpt", 10): ["ok", "ok", "absent"],
        ("gpt", 20): ["ok", "ok", "absent"],
        ("gpt", 30): ["ok", "owed", "absent"],
        ("new", 1): ["ok", "owed", "absent"],
    }


def test_a_tier_is_owed_what_hotter_ones_have_and_it_must_have(store):
    found = tiers(status(store))
    assert {name: tier.checkpoints for name, tier in found.items()} == {"nvme": 4, "shared": 2, "archive": 0}
    assert found["nvme"].debt is None
    assert found["archive"].debt is None  # only when somebody asks
    debt = found["shared"].debt
    saved = [item.saved_at for item in status(store).checkpoints if item.tiers[1].presence == "owed"]
    assert (debt.checkpoints, debt.bytes, debt.oldest_at) == (2, 2 * 4000, min(saved))


def test_of_one_run_only_that_is_counted(store):
    found = status(store, "new")
    assert found.run == "new"
    assert list(presences(found)) == [("new", 1)]
    shared = tiers(found)["shared"]
    assert (shared.checkpoints, shared.debt.checkpoints) == (0, 1)
    assert tiers(found)["nvme"].checkpoints == 1


def test_nothing_is_owed_after_copying(store):
    store.replication.run()
    debt = tiers(status(store))["shared"].debt
    assert (debt.checkpoints, debt.bytes, debt.oldest_at) == (0, 0, None)


def test_verification_and_damage_are_of_one_tier(store, toml):
    store.verify(refs=["gpt@10"], tier="shared")
    key = next(iter(store.run("gpt")[20].copies[1].contents.object_sizes))
    path = toml.parent / "cold" / key
    path.write_bytes(path.read_bytes()[:-1])
    store.verify(refs=["gpt@20"], tier="shared")
    found = status(store, "gpt")
    shared = tiers(found)["shared"]
    assert (shared.verified, shared.damaged) == (1, 1)
    assert (tiers(found)["nvme"].verified, tiers(found)["nvme"].damaged) == (0, 0)
    ten, twenty = found.checkpoints[:2]
    assert ten.tiers[1].verified_at == shared.verified_at is not None
    assert ten.tiers[0].verified_at is None
    assert [place.presence for place in twenty.tiers] == ["ok", "damaged", "absent"]
    assert twenty.tiers[1].reason


def test_what_is_damaged_in_front_is_passed_over_and_says_why(store, toml):
    key = next(iter(store.run("gpt")[30].contents.object_sizes))
    path = toml.parent / "hot" / key
    path.write_bytes(path.read_bytes()[:-1])
    store.verify(refs=["gpt@30"])
    found = status(store, "gpt")
    place = found.checkpoints[-1].tiers[1]
    assert place.presence == "passed over"
    assert "damaged" in place.reason
    debt = tiers(found)["shared"].debt
    assert (debt.checkpoints, debt.passed_over) == (0, 1)


def test_a_tier_that_does_not_answer_is_there_with_its_reason(toml):
    (toml.parent / "cold").rename(toml.parent / "elsewhere")
    with ckptstore.open(toml) as store:
        found = status(store)
    gone = tiers(found)["shared"]
    assert (gone.reachable, gone.requirement, gone.checkpoints, gone.debt) == (False, "async", None, None)
    assert "there is no store" in gone.reason
    assert [place.tier for place in found.checkpoints[0].tiers] == ["nvme", "archive"]


def test_a_store_of_one_tier_is_owed_nothing(tmp_path):
    with ckptstore.init(tmp_path / "ckpts") as store:
        assert status(store).checkpoints == ()
        store.run("gpt").save(1, state(1)).result()
        found = status(store)
    assert [(tier.name, tier.checkpoints, tier.debt) for tier in found.tiers] == [("main", 1, None)]


def test_a_run_that_is_not_there_is_an_error(store):
    with pytest.raises(NotFoundError, match="no run 'gtp'"):
        status(store, "gtp")
