"""Full rounds, one at a time: what a policy does not keep, how much at most, and when nothing goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest

from ckptstore.errors import (
    BackendError,
    BusyError,
    CkptstoreError,
    DocumentError,
    FormatTooNewError,
    GuardError,
    UsageError,
    WrongStoreError,
)
from ckptstore.gc import fates as fates_module
from ckptstore.gc.documents import read_plans
from ckptstore.gc.lock import LOCK, Lock
from ckptstore.gc.rounds import RoundReport, Settings, run_round
from ckptstore.gc.shares import MaxDelete
from ckptstore.gc.survey import Hints
from ckptstore.model.documents import encode_record
from ckptstore.model.ids import Attempt, run_key
from ckptstore.model.policies import Policy
from ckptstore.model.record import CommitRecord
from ckptstore.model.retention import Decision, Keep
from ckptstore.testing.faults import Fault, FaultBackend
from ckptstore.tier import commits, layout, notes
from ckptstore.tier.intents import Pin
from ckptstore.tier.policies import write_policy
from ckptstore_memory import MemoryBackend, _places
from tests.crash._support import TRAIN, check_place, store_over
from tests.gc import test_collect as light
from tests.gc.made import (
    RUN_KEY,
    announce,
    ends_as,
    garbage,
    model_of,
    open_tier,
    save_steps,
    trained,
)

HOUR = 3600.0


def keep(place: MemoryBackend, rules: Keep, run: str | None = None) -> None:
    write_policy([open_tier(place)], None if run is None else run_key(run), Policy(rules))


def full(place: MemoryBackend | FaultBackend, **settings: object) -> RoundReport:
    hints = settings.pop("hints", None)
    return run_round(open_tier(place), Settings(**settings), hints=hints)  # type: ignore[arg-type]


def outcomes(report: RoundReport) -> dict[int, str]:
    return {fate.step: fate.outcome for fate in report.fates}


def age(place: MemoryBackend, keys: Iterable[str], seconds: float) -> None:
    """Makes objects look older by so much, by the tier's clock."""
    objects = _places[place._name]
    for key in list(keys):
        content, modified = objects[key]
        objects[key] = (content, modified - seconds)


def listed(place: MemoryBackend, prefix: str) -> list[str]:
    return [info.key for info in place.list(prefix)]


def stored(place: MemoryBackend) -> set[str]:
    return {*listed(place, "chunks/"), *listed(place, "packs/")}


# --- what goes ----------------------------------------------------------------------------------


def test_what_no_rule_keeps_goes_with_what_only_it_names() -> None:
    with trained(1, 2, 3, 4) as (place, pins):
        keep(place, Keep(last=2))
        report = full(place)
        assert outcomes(report) == {1: "delete", 2: "delete", 3: "keep", 4: "keep"}
        assert report.collected == (pins[1], pins[2])
        assert report.freed_bytes > 0
        assert not garbage(place)
        assert not listed(place, "dooms/")
        assert LOCK not in listed(place, "gc/")
        check_place(place, model_of(pins, 3, 4))


def test_a_round_with_nothing_to_do_writes_its_lock_and_no_more() -> None:
    with trained(1, 2) as (place, _):
        keep(place, Keep(last=2))
        backend = FaultBackend(place)
        report = full(backend)
        assert (report.round, report.collected, report.cleared.objects) == ("", (), 0)
        changed = [(call.op, str(call.key)) for call in backend.log if call.op in ("put", "delete")]
        assert changed == [("put", LOCK), ("delete", LOCK)]
        assert "chunks/" not in {call.key for call in backend.log if call.op == "read_into"}


def test_without_a_policy_every_checkpoint_stays_and_that_is_said() -> None:
    with trained(1, 2, 3) as (place, pins):
        report = full(place)
        assert (report.runs, report.runs_with_policy) == (1, 0)
        assert set(outcomes(report).values()) == {"keep"}
        check_place(place, model_of(pins, 1, 2, 3))


def test_a_dry_run_writes_nothing_and_knows_what_each_holds_alone() -> None:
    with trained(1, 2, 3) as (place, _pins):
        keep(place, Keep(last=1))
        before = dict(_places[place._name])
        report = full(place, dry_run=True)
        assert _places[place._name] == before
        assert outcomes(report) == {1: "delete", 2: "delete", 3: "keep"}
        assert all(fate.reasons for fate in report.fates)
        assert all(0 < (fate.alone_bytes or 0) < (fate.size_bytes or 0) for fate in report.fates)
        assert (
            full(place).freed_bytes
            == report.freed_bytes
            >= sum(fate.alone_bytes or 0 for fate in report.fates if fate.outcome == "delete")
        )


def test_only_runs_that_were_asked_for_lose_anything() -> None:
    with trained(1, 2) as (place, pins):
        other = save_steps(place, [1, 2], run="other")
        keep(place, Keep(last=1))
        assert full(place, runs=("oth*",)).collected == (other[1],)
        assert ends_as(place, pins[1]) == "commit"
        assert full(place).collected == (pins[1],)


def test_a_record_that_a_later_generation_stands_in_for_goes() -> None:
    with trained(1, 2) as (place, pins):
        later = next_generation(place, pins[1])
        report = full(place)
        assert report.collected == (pins[1],)
        assert ends_as(place, later) == "commit"
        assert not garbage(place)
        with store_over(place) as store:
            assert not store.verify().problems


def test_but_not_while_that_one_is_damaged() -> None:
    with trained(1, 2) as (place, pins):
        later = next_generation(place, pins[1])
        said = {"reason": "bad", "keys": []}
        notes.add_note(open_tier(place), TRAIN, RUN_KEY, pins[1][1], "damaged", said, attempt=later[1])
        assert not full(place).collected


def next_generation(place: MemoryBackend, pin: Pin) -> Pin:
    """The same checkpoint once more, as a repair would commit it, naming the same objects."""
    tier = open_tier(place)
    record = commits.read_commit(tier, *pin)
    assert isinstance(record, CommitRecord)
    attempt = str(Attempt(tier.environment.new_ulid(), record.step, 1))
    again = dataclasses.replace(record, attempt=attempt, generation=1, origin="repair")
    place.put(layout.commit_key(pin[0], attempt), [encode_record(again)])
    return pin[0], attempt


# --- who keeps it all the same --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"), [("pin", "held by"), ("read", "being read"), ("save", "pinned by")]
)
def test_what_somebody_needs_stays_and_says_who(kind: str, reason: str) -> None:
    with trained(1, 2) as (place, pins):
        keep(place, Keep(last=1))
        intent = announce(place, kind, pins[1])  # type: ignore[arg-type]
        report = full(place)
        assert not report.collected
        (fate,) = [fate for fate in report.fates if fate.step == 1]
        assert fate.outcome == "keep"
        assert any(reason in text for text in fate.reasons)
        intent.remove()
        assert full(place).collected == (pins[1],)


def test_what_another_tier_has_not_got_stays() -> None:
    with trained(1, 2, 3) as (place, pins):
        keep(place, Keep(last=1))

        def owed(key: str, entries: object) -> dict[str, str]:
            assert key == RUN_KEY
            assert [entry.checkpoint for entry in entries] == [pins[1][1], pins[2][1]]  # type: ignore[attr-defined]
            return {pins[1][1]: "owed to tier s3"}

        report = run_round(open_tier(place), Settings(), owed=owed)
        assert report.collected == (pins[2],)
        assert report.fates[0].reasons == ("owed to tier s3",)


# --- a grace period -------------------------------------------------------------------------------


def test_with_a_grace_period_it_is_marked_first_and_goes_when_that_is_over() -> None:
    with trained(1, 2) as (place, pins):
        keep(place, Keep(last=1))
        report = full(place, grace_seconds=2 * HOUR)
        assert outcomes(report) == {1: "expire", 2: "keep"}
        assert not report.collected
        with store_over(place) as store:
            assert store.run(TRAIN)[1].state == "expiring"
            assert store.run(TRAIN)[1].restorable
        assert not full(place, grace_seconds=2 * HOUR).collected
        assert len(listed(place, "notes/")) == 1  # said once
        age(place, listed(place, "notes/"), 2 * HOUR)
        assert full(place, grace_seconds=2 * HOUR).collected == (pins[1],)


def test_what_is_kept_by_then_expires_no_more_and_later_anew() -> None:
    with trained(1, 2) as (place, pins):
        keep(place, Keep(last=1))
        full(place, grace_seconds=HOUR)
        with store_over(place) as store:
            store.run(TRAIN).tag(1, "paper")
        age(place, listed(place, "notes/"), 2 * HOUR)
        report = full(place, grace_seconds=HOUR)
        assert "tagged paper" in report.fates[0].reasons
        with store_over(place) as store:
            assert store.run(TRAIN)[1].state == "ok"
            store.run(TRAIN).untag(1, "paper")
        assert not full(place, grace_seconds=HOUR).collected  # its time begins anew
        assert ends_as(place, pins[1]) == "commit"


def test_what_a_person_forgot_goes_at_once() -> None:
    with trained(1, 2, 3) as (place, pins):
        notes.add_note(open_tier(place), TRAIN, RUN_KEY, pins[2][1], "forgotten", {})
        assert full(place, grace_seconds=HOUR).collected == (pins[2],)
        check_place(place, model_of(pins, 1, 3))


# --- how much, and how long -------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "goes"), [("1%", False), ("99%", True), (100, False), ("1GB", True)])
def test_more_than_is_allowed_deletes_nothing(limit: str | int, goes: bool) -> None:
    with trained(1, 2, 3) as (place, pins):
        keep(place, Keep(last=1))
        settings = {"max_delete": MaxDelete.parse(limit)}
        if goes:
            assert full(place, **settings).collected == (pins[1], pins[2])
            return
        before = dict(_places[place._name])
        for dry_run in (True, False):
            with pytest.raises(GuardError, match="would go") as caught:
                full(place, dry_run=dry_run, **settings)
            assert caught.value.exit_code == 17
        assert _places[place._name] == before


def test_what_others_have_doomed_counts_towards_the_limit() -> None:
    with trained(1, 2) as (place, pins):
        open_tier(place).put_new(layout.doom_key(*pins[1]), b"doom")
        with pytest.raises(GuardError):
            full(place, max_delete=MaxDelete(size_bytes=10))
        assert ends_as(place, pins[1]) == "commit"


@pytest.mark.parametrize("text", ["101%", "-1%", "x", "%", "3 %%"])
def test_a_limit_that_is_none(text: str) -> None:
    with pytest.raises(UsageError):
        MaxDelete.parse(text)


def test_when_time_is_up_the_next_round_goes_on() -> None:
    with trained(1, 2, 3) as (place, pins):
        keep(place, Keep(last=1))
        report = full(place, time_budget_seconds=0.0)
        assert report.is_cut_short
        assert report.collected == (pins[1], pins[2])
        assert report.deleted_objects == 0
        assert garbage(place)
        assert [plan.state for plan in read_plans(open_tier(place))] == ["planned"]
        check_place(place, model_of(pins, 3), next_step=None)
        assert full(place).deleted_objects > 0
        assert not garbage(place)


# --- one at a time ------------------------------------------------------------------------------------


def test_a_second_round_is_refused_at_once_and_a_silent_one_is_taken_over() -> None:
    with trained(1, 2) as (place, pins):
        keep(place, Keep(last=1))
        held = Lock(open_tier(place))
        held.__enter__()
        with pytest.raises(BusyError, match="being collected") as caught:
            full(place)
        assert caught.value.exit_code == 11
        assert ends_as(place, pins[1]) == "commit"
        age(place, [LOCK], HOUR)
        assert full(place).collected == (pins[1],)
        assert LOCK not in listed(place, "gc/")
        held.__exit__(None, None, None)  # it does not take away what is another's by now


def test_a_lock_that_was_taken_over_is_not_given_back_by_who_lost_it() -> None:
    with trained(1) as (place, _):
        first, second = Lock(open_tier(place)), Lock(open_tier(place))
        with first:
            age(place, [LOCK], HOUR)
            with second:
                first.__exit__(None, None, None)
                assert LOCK in listed(place, "gc/")
            assert LOCK not in listed(place, "gc/")


# --- fails closed ---------------------------------------------------------------------------------------


def cut_policy(place: MemoryBackend, pins: dict[int, Pin]) -> None:
    place.put(layout.policy_key(RUN_KEY, 7), [b"x"])


def empty_policy(place: MemoryBackend, pins: dict[int, Pin]) -> None:
    from ckptstore.model.documents import seal

    body = {"number": 7, "at": 1.0, "author": "a", "origin": "code", "policy": {}}
    place.put(layout.policy_key(RUN_KEY, 7), [seal("policy", body)])


def cut_epoch(place: MemoryBackend, pins: dict[int, Pin]) -> None:
    place.put(layout.epoch_key(RUN_KEY, 1), [b"x"])


@pytest.mark.parametrize(
    ("harm", "error", "named"),
    [
        (light.cut_record, DocumentError, "commits/"),
        (light.emptied_record, DocumentError, "commits/"),
        (light.cut_intent, DocumentError, "intents/"),
        (light.cut_plan, DocumentError, "gc/"),
        (light.lost_table, DocumentError, "keys|key list"),
        (light.cut_note, DocumentError, "notes/"),
        (cut_policy, DocumentError, "policies/"),
        (empty_policy, DocumentError, "policies/"),
        (cut_epoch, DocumentError, "epochs/"),
        (light.new_feature, FormatTooNewError, "later"),
        (light.other_store, WrongStoreError, "another store"),
        (light.no_marker, WrongStoreError, "marker is gone"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_cannot_be_read_deletes_nothing(
    harm: Callable[[MemoryBackend, dict[int, Pin]], None],
    error: type[CkptstoreError],
    named: str,
    dry_run: bool,
) -> None:
    with trained(1, 2, 3) as (place, pins):
        keep(place, Keep(last=1))
        tier = open_tier(place)
        harm(place, pins)
        before = stored(place)
        if dry_run and harm is light.cut_plan:
            return  # it looks at no plan
        with pytest.raises(error, match=named) as caught:
            run_round(tier, Settings(dry_run=dry_run))
        assert stored(place) == before
        assert len(place.get(layout.commit_key(*pins[1]), max_bytes=1 << 26)) > 128  # not GONE
        if error is DocumentError:
            assert caught.value.message.count("nothing is collected") == 1


@pytest.mark.parametrize("prefix", ["dooms/", "intents/", "commits/", "notes/*", "runs/*", "policies/"])
def test_a_listing_that_fails_deletes_nothing(prefix: str) -> None:
    with trained(1, 2) as (place, pins):
        keep(place, Keep(last=1))
        before = stored(place)
        with pytest.raises(BackendError):
            full(FaultBackend(place, [Fault("error", op="list", key=prefix, times=None)]))
        assert stored(place) == before
        assert full(place).collected == (pins[1],)


class Short(FaultBackend):
    """Leaves one key out of every listing from the n-th of a prefix on."""

    def __init__(self, inner: MemoryBackend, key: str, since: int = 1) -> None:
        super().__init__(inner)
        self._key, self._since, self._seen = key, since, 0

    def list(self, prefix):
        self._seen += self._key.startswith(prefix)
        is_short = self._seen >= self._since
        return (info for info in super().list(prefix) if info.key != self._key or not is_short)


def test_a_listing_that_lacks_what_a_manifest_knows_deletes_nothing() -> None:
    with trained(1, 2, 3) as (place, pins):
        keep(place, Keep(last=1))
        with store_over(place) as store:
            store.run(TRAIN).tag(1, "paper")
            store.refresh()
            hints = store.hints(store.tier)
        (note,) = listed(place, "notes/")
        before = stored(place)
        for key in (note, layout.commit_key(*pins[3])):
            with pytest.raises(GuardError, match=key.replace("+", ".")):
                full(Short(place, key), hints=hints)
            assert stored(place) == before
        old = Hints([*hints.commits, layout.commit_key(RUN_KEY, "x")], [*hints.notes, note + "x"])
        assert full(place, hints=old).collected == (pins[2],)  # a stale manifest does no harm


def test_an_intent_that_a_second_listing_lacks_is_noticed() -> None:
    with trained(1, 2) as (place, pins):
        intent = announce(place, "save", pins[2])
        key = layout.intent_key(intent.document.attempt)
        with pytest.raises(GuardError, match="missing from a listing"):
            full(Short(place, key, since=2))


def test_nothing_restorable_would_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy asks for that; should a mistake in the rules do so, nothing goes."""
    with trained(1, 2) as (place, _):
        keep(place, Keep(last=1))

        def none(policy: object, candidates: Iterable[object], now: float) -> list[Decision]:
            return [Decision(c.entry.checkpoint, False, ("x",)) for c in candidates]  # type: ignore[attr-defined]

        monkeypatch.setattr(fates_module, "decide", none)
        with pytest.raises(GuardError, match="no restorable checkpoint"):
            full(place)
        assert not listed(place, "dooms/")
