"""Which policy holds: given in code, in a ckptstore.toml, by a command; and that every tier learns it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptstore import Keep, Policy, config
from ckptstore.errors import ConflictError, DocumentError, UsageError
from ckptstore.model.ids import run_key
from ckptstore.store import Store
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier import layout, policies
from ckptstore_memory import MemoryBackend
from tests.crash._support import make_place, memory_place, store_over
from tests.replicate.made import alone, opened, places, replicate

RUN = "train/exp 1"
KEY = run_key(RUN)
LAST, BEST = Keep(last=3), Keep.best(2, "val_loss", "min")


def by_file(tmp_path: Path, text: str) -> config.StoreConfig:
    path = tmp_path / "ckptstore.toml"
    path.write_text('[[tiers]]\nurl = "memory://x"\n' + text)
    return config.resolve(path)


@contextlib.contextmanager
def at(place: MemoryBackend, found: config.StoreConfig | None = None) -> Iterator[Store]:
    with contextlib.closing(store_over(place)) as store:
        if found is not None:
            store = Store(found, store.tier)
        yield store


def train(store: Store, run: str = RUN, retention: Any = None) -> None:
    store.run(run, retention=retention).start()


@pytest.fixture
def place() -> Iterator[MemoryBackend]:
    with memory_place() as made:
        make_place(made)
        yield made


def test_a_session_records_what_code_says_once(place: MemoryBackend, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    with at(place) as store:
        assert store.run(RUN).policy is None
        assert store.run(RUN, retention=LAST).policy == Policy(LAST)
        assert policies.newest_policy(store.tier, KEY) is None  # looking touches nothing
        train(store, retention=LAST | BEST)
        train(store, retention=LAST | BEST)
        train(store)  # says nothing
        found = policies.newest_policy(store.tier, KEY)
        assert found is not None
        assert (found.number, found.origin, found.policy) == (1, "code", Policy(LAST | BEST))
        train(store, retention=Policy(LAST, components={"optimizer": Keep(last=1)}))
        assert policies.numbers(store.tier, KEY) == [1, 2]
        assert store.run(RUN).policy == Policy(LAST, components={"optimizer": Keep(last=1)})
        assert store.run("other").policy is None
    assert "retention of run 'train/exp 1' is now: last 3, any tag; optimizer: last 1" in caplog.text


def test_no_policy_costs_no_request(place: MemoryBackend) -> None:
    counting = FaultBackend(place)
    with contextlib.closing(store_over(counting)) as store:
        store.run(RUN, auto_gc=False).start()
    assert not [call for call in counting.log if "policies" in str(call)]


def test_what_cannot_be_a_policy_is_refused_at_once(place: MemoryBackend) -> None:
    with at(place) as store:
        wrong: Any = 3
        with pytest.raises(UsageError, match="retention must be a Keep or a Policy"):
            store.run(RUN, retention=wrong)


FILE = """
[retention]
last = 3
best = [{n = 2, metric = "val_loss", mode = "min"}]
[retention.components.optimizer]
last = 1
[runs."train/*".retention]
every = 1000
[runs."*".retention]
weekly = 4
"""


def test_code_file_and_command_say_the_same(place: MemoryBackend, tmp_path: Path) -> None:
    wanted = Policy(LAST | BEST, components={"optimizer": Keep(last=1)})
    found = by_file(tmp_path, FILE.partition("[runs")[0])
    assert found.policies is not None
    assert found.policies.default == wanted
    with at(place, found) as store:
        train(store)
        stored = policies.newest_policy(store.tier, None)
        assert stored is not None
        assert (stored.policy, stored.origin) == (wanted, "file")
        assert store.run(RUN).policy == store.run("any").policy == wanted
    with at(place) as store:
        train(store, "b", retention=wanted)
        store.policies.set("c", wanted)
        assert policies.read_policy(store.tier, run_key("b")) == wanted
        assert policies.read_policy(store.tier, run_key("c")) == wanted


def test_the_closer_name_counts(place: MemoryBackend, tmp_path: Path) -> None:
    found = by_file(tmp_path, FILE)
    with at(place, found) as store:
        assert store.run(RUN).policy == Policy(Keep(every=1000))  # the first pattern that fits
        assert store.run("other").policy == Policy(Keep(weekly=4))
        train(store, RUN, retention=LAST)
        store.policies.set("other", Policy(BEST))
        for _ in range(2):
            assert store.run(RUN).policy == Policy(LAST)
            assert store.run("other").policy == Policy(BEST)
            store.policies.settle([RUN, "other"])
        store.policies.set("other", None)
        assert store.run("other").policy == Policy(Keep(weekly=4))


def test_what_a_file_says_no_more_is_taken_back(place: MemoryBackend, tmp_path: Path) -> None:
    with at(place, by_file(tmp_path, FILE)) as store:
        train(store)
        assert policies.read_policy(store.tier, KEY) == Policy(Keep(every=1000))
    with at(place) as store:  # no file, nothing said
        train(store)
        assert policies.read_policy(store.tier, KEY) == Policy(Keep(every=1000))
    with at(place, by_file(tmp_path, "")) as store:
        assert store.run(RUN).policy is None
        train(store)
        assert policies.read_policy(store.tier, KEY) is None
        store.policies.set(None, Policy(LAST))  # a command's stays
        train(store)
        assert policies.read_policy(store.tier, KEY) == Policy(LAST)


def test_a_default_in_the_file_is_not_set_elsewhere(place: MemoryBackend, tmp_path: Path) -> None:
    with (
        at(place, by_file(tmp_path, FILE)) as store,
        pytest.raises(ConflictError, match="the default retention of this store is in"),
    ):
        store.policies.set(None, Policy(BEST))


def test_code_replaces_what_a_command_set_and_says_so(place: MemoryBackend, caplog: Any) -> None:
    with at(place) as store:
        store.policies.set(RUN, Policy(BEST))
        train(store, retention=LAST)
        assert store.run(RUN).policy == Policy(LAST)
    assert "by `ckptstore policy` is replaced" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[retention]\nlast = 0", r"\[retention\]: retention: last must be"),
        ("[retention]\nfirst = 3", "unknown option 'first'"),
        ("[retention]\nbest = [{n = 1, metric = 'm'}]", "mode is missing"),
        ("[retention.components]\noptimizer = 3", "expected a table"),
        ("retention = 3", "must be a table"),
        ("[runs.a]\nlast = 3", "unknown key 'last'"),
        ("[runs]\na = 3", "must hold tables"),
    ],
)
def test_a_wrong_file_is_refused_when_it_is_read(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ckptstore.toml"
    path.write_text(text + '\n[[tiers]]\nurl = "memory://x"\n')
    if text.startswith("retention = 3"):
        path.write_text('retention = 3\n[[tiers]]\nurl = "memory://x"\n')
    with pytest.raises(UsageError, match=said):
        config.resolve(path)


def test_a_tiers_own_rules_are_part_of_the_default(tmp_path: Path) -> None:
    own = "[tiers.retention]\nlast = 2\n"
    found = by_file(tmp_path, own + "[retention]\nlast = 3").policies
    assert found is not None
    assert found.default == Policy(LAST, tiers={"main": Keep(last=2)})
    both = own + "[retention]\nlast = 3\n[retention.tiers.main]\nlast = {}"
    assert by_file(tmp_path, both.format(2)).policies == found
    with pytest.raises(UsageError, match="differ"):
        by_file(tmp_path, both.format(4))


# --- tiers ----------------------------------------------------------------------------------------


def test_every_tier_is_told_and_a_runs_policy_leaves_a_tiers_own() -> None:
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            store.policies.set(None, Policy(BEST, tiers={"cold": Keep(every=100)}))
            train(store, retention=LAST)
        for place in (hot, cold):
            with contextlib.closing(alone(place)) as store:
                policy = policies.read_policy(store.tier, KEY)
                assert policy is not None
                assert policy == Policy(LAST, tiers={"cold": Keep(every=100)})
                assert policy.for_tier("hot") == LAST
                assert policy.for_tier("cold") == Keep(every=100)


def test_a_tier_that_was_away_learns_it_by_replication() -> None:
    with places() as (hot, cold):
        away = FaultBackend(cold, [])
        with contextlib.closing(opened(hot, away)) as store:
            away.script.append(Fault("error", times=None))
            store.policies.set(RUN, Policy(LAST))
            store.policies.set(None, Policy(BEST))
        with contextlib.closing(opened(hot, cold)) as store:
            store.run(RUN).start()
            assert policies.newest_policy(store.tiers[1], KEY) is None
            replicate(store)
            for key in (KEY, None):
                newest = [policies.newest_policy(tier, key) for tier in store.tiers]
                assert newest[0] == newest[1] is not None


def test_two_that_took_the_same_number_come_to_agree() -> None:
    """Each was written while the other tier was away; the later one is meant."""
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        policies.write_policy([store.tiers[0]], KEY, Policy(LAST))
        policies.write_policy([store.tiers[1]], KEY, Policy(BEST))
        assert policies.level(store.tiers, KEY)
        for tier in store.tiers:
            assert policies.numbers(tier, KEY) == [1, 2]
            assert policies.read_policy(tier, KEY) == Policy(BEST)
        assert not policies.level(store.tiers, KEY)


def test_the_hotter_tier_catches_up_too() -> None:
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        policies.write_policy(store.tiers, None, Policy(LAST))
        policies.write_policy([store.tiers[1]], None, Policy(BEST))
        store.policies.settle([])
        assert policies.newest_policy(store.tiers[0], None) == policies.newest_policy(store.tiers[1], None)
        assert store.run(RUN).policy == Policy(BEST)


def test_of_two_writers_at_once_both_are_kept_and_the_later_counts(
    place: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with at(place) as store:
        store.policies.set(RUN, Policy(LAST))
        monkeypatch.setattr(policies, "numbers", lambda tier, run_key: [])  # listed before the other wrote
        assert store.policies.set(RUN, Policy(BEST)).number == 2
        monkeypatch.undo()
        assert store.run(RUN).policy == Policy(BEST)


# --- what cannot be read ---------------------------------------------------------------------------


def test_a_damaged_policy_is_an_error_and_not_an_older_one(place: MemoryBackend, caplog: Any) -> None:
    with at(place) as store:
        store.policies.set(RUN, Policy(LAST))
        store.policies.set(RUN, Policy(BEST))
        place.put(layout.policy_key(KEY, 2), [b"\x00" * 40])
        with pytest.raises(DocumentError):
            policies.read_policy(store.tier, KEY)
        with pytest.raises(DocumentError):
            store.policies.settle([RUN])
        train(store)
        assert not caplog.text  # it is nothing to a training that says nothing
        train(store, retention=LAST)
        assert "cannot be read, and is replaced" in caplog.text
        assert policies.read_policy(store.tier, KEY) == Policy(LAST)


def test_a_place_that_takes_no_policy_stops_no_training(place: MemoryBackend, caplog: Any) -> None:
    full = FaultBackend(place, [Fault("error", op="put", key="runs/*/policies/*", times=None)])
    with contextlib.closing(store_over(full)) as store:
        train(store, retention=LAST)
    assert "could not be recorded" in caplog.text
