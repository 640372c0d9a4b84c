"""A round on given records, one process at a time. Rows of shared/cases.md are named at their tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ckptstore.backend import ObjectInfo
from ckptstore.errors import (
    BackendError,
    CkptstoreError,
    DocumentError,
    FormatTooNewError,
    GuardError,
    WrongStoreError,
)
from ckptstore.gc.documents import read_plans
from ckptstore.model.documents import encode_end
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.testing.faults import Fault, FaultBackend
from ckptstore.tier import commits, layout, notes
from ckptstore_memory import MemoryBackend
from tests.crash._support import TRAIN, check_place, make_state, store_over
from tests.gc.made import (
    RUN_KEY,
    age,
    announce,
    ends_as,
    garbage,
    gc,
    model_of,
    open_tier,
    save_steps,
    trained,
)

HOUR = 3600.0


def listed(place: MemoryBackend, prefix: str) -> list[str]:
    return [info.key for info in place.list(prefix)]


def test_what_only_the_target_names_goes_and_the_rest_stays_c071() -> None:
    with trained(1, 2, 3) as (place, pins):
        before = {info.key: info.size_bytes for k in ("chunks/", "packs/") for info in place.list(k)}
        report = gc(place, pins[1])
        after = {info.key for kind in ("chunks/", "packs/") for info in place.list(kind)}
        gone = before.keys() - after
        assert report.collected == (pins[1],)
        assert report.deleted_objects == len(gone) > 0
        assert report.freed_bytes == sum(before[key] for key in gone)
        assert report.shared_objects > 0
        assert ends_as(place, pins[1]) == "gone"
        assert not garbage(place)
        assert not listed(place, "dooms/")
        check_place(place, model_of(pins, 2, 3))


def test_nothing_to_do_writes_nothing_c072() -> None:
    with trained(1) as (place, _):
        counting = FaultBackend(place)
        report = gc(counting)
        assert report.round == ""
        assert {call.op for call in counting.log} == {"get", "list"}
        assert len(counting.log) <= 4


def test_the_newest_restorable_never_goes() -> None:
    with trained(1, 2) as (place, pins):
        report = gc(place, pins[1], pins[2])
        assert report.collected == (pins[1],)
        (stays,) = report.stays
        assert (stays.attempt, stays.doomed) == (pins[2][1], False)
        assert "newest restorable" in stays.reason
        notes.add_note(open_tier(place), TRAIN, RUN_KEY, pins[2][1], "forgotten", {})
        assert gc(place, pins[2]).collected == (pins[2],)
        assert not garbage(place)


def test_the_newest_is_the_one_gone_back_to() -> None:
    with trained(1, 2, 3) as (place, pins):
        with store_over(place) as store, store.run(TRAIN) as run:
            run.rewind(1)
        report = gc(place, *pins.values())
        assert report.collected == (pins[2], pins[3])
        assert ends_as(place, pins[1]) == "commit"


def test_a_damaged_newest_does_not_let_the_last_good_one_go() -> None:
    with trained(1, 2) as (place, pins):
        data = {"reason": "bad", "keys": []}
        notes.add_note(open_tier(place), TRAIN, RUN_KEY, pins[2][1], "damaged", data, attempt=pins[2][1])
        assert not gc(place, pins[1]).collected
        assert gc(place, pins[2]).collected == (pins[2],)  # it is not what would be restored
        check_place(place, model_of(pins, 1))


def test_a_guard_is_asked_again_right_before_gone() -> None:
    with trained(1, 2, 3) as (place, pins):
        tier = open_tier(place)

        class Late:
            asked = 0

            def before_doom(self, view: object, target: object) -> None:
                return None

            def before_gone(self, view: object, target: object) -> str | None:
                self.asked += 1
                return "changed my mind" if self.asked == 4 else None  # two before the plan, two after

        report = gc(place, pins[1], pins[2], guards=(Late(),))
        assert report.collected == (pins[1],)
        assert [(s.attempt, s.doomed, s.reason) for s in report.stays] == [
            (pins[2][1], True, "changed my mind")
        ]
        assert isinstance(commits.read_commit(tier, *pins[2]), CommitRecord)
        assert listed(place, "dooms/") == [layout.doom_key(*pins[2])]
        with store_over(place) as store:
            assert not store.verify().problems  # what it names was taken out of the plan
        assert gc(place).collected == (pins[2],)  # a doom is never taken back
        assert not garbage(place)


@pytest.mark.parametrize("kind", ["save", "read", "replicate", "repair", "trim", "pin"])
def test_what_is_pinned_is_left_alone(kind: str) -> None:
    with trained(1, 2) as (place, pins):
        intent = announce(place, kind, pins[1])  # type: ignore[arg-type]
        report = gc(place, pins[1])
        assert not report.collected
        assert not report.stays[0].doomed
        assert not listed(place, "dooms/")
        intent.remove()
        assert gc(place, pins[1]).collected == (pins[1],)


def test_one_pinned_after_it_was_doomed_waits() -> None:
    """A saver that read the doom before it was there; the collector re-reads intents after dooming."""
    with trained(1, 2) as (place, pins):
        open_tier(place).put_new(layout.doom_key(*pins[1]), b"doom")
        intent = announce(place, "save", pins[1])
        report = gc(place)
        assert not report.collected
        assert report.stays[0].doomed
        intent.remove()
        assert gc(place).collected == (pins[1],)


def test_a_silent_saver_is_fenced_before_its_pins_end_c061_c062() -> None:
    with trained(1, 2) as (place, pins):
        intent = announce(place, "save", pins[1])
        slow = announce(place, "save", pins[2])  # holds nothing that is to go
        age(place, intent, HOUR)
        age(place, slow, HOUR)
        report = gc(place, pins[1])
        assert report.fenced == (intent.document.attempt,)
        assert report.collected == (pins[1],)
        assert ends_as(place, (RUN_KEY, intent.document.attempt)) == "void"
        assert ends_as(place, (RUN_KEY, slow.document.attempt)) == "nothing"


def test_a_beat_keeps_a_saver_alive_c061() -> None:
    with trained(1, 2) as (place, pins):
        intent = announce(place, "save", pins[1])
        age(place, intent, HOUR)
        place.put(layout.beat_key(intent.document.attempt), [b"60"])
        report = gc(place, pins[1])
        assert not report.fenced
        assert "pinned by save" in report.stays[0].reason


def test_silence_ends_a_reader_but_never_a_pin() -> None:
    with trained(1, 2, 3) as (place, pins):
        for kind, step in (("read", 1), ("pin", 2)):
            age(place, announce(place, kind, pins[step]), 1000 * HOUR)  # type: ignore[arg-type]
        assert gc(place, pins[1], pins[2]).collected == (pins[1],)


def test_without_exclusive_creation_nobody_is_fenced() -> None:
    with trained(1, 2) as (place, pins):

        class Plain(FaultBackend):
            @property
            def capabilities(self):
                return dataclasses.replace(super().capabilities, create_if_absent=False)

        intent = announce(place, "save", pins[1])
        age(place, intent, HOUR)
        report = gc(Plain(place), pins[1])
        assert not report.fenced
        assert not report.collected
        assert "not to be fenced here" in report.stays[0].reason
        assert ends_as(place, (RUN_KEY, intent.document.attempt)) == "nothing"


def test_a_saver_whose_record_is_there_pins_no_more() -> None:
    with trained(1, 2) as (place, pins):
        tier = open_tier(place)
        intent = announce(place, "save", pins[1])
        end = encode_end(CommitEnd(intent.document.attempt, "void", "failed"))
        tier.put_new(layout.commit_key(RUN_KEY, intent.document.attempt), end)
        assert gc(place, pins[1]).collected == (pins[1],)


def test_a_fork_in_another_run_keeps_the_objects() -> None:
    with trained(1, 2) as (place, pins):
        with store_over(place) as store, store.run("fork") as run:
            run.fork_from(store.run(TRAIN)[1])
        assert gc(place, pins[1]).collected == (pins[1],)
        with store_over(place) as store:
            assert not store.verify().problems
            assert store.run("fork").latest is not None


def test_the_same_content_can_be_saved_again_at_once_c074() -> None:
    with trained(1, 2) as (place, pins):
        gc(place, pins[1])
        with store_over(place) as store, store.run(TRAIN) as run:
            run.save(3, make_state(1)).result()
            run.save(4, make_state(4)).result()
        with store_over(place) as store:
            assert not store.verify().problems


def test_objects_that_are_not_there_any_more_do_not_stop_a_round_c049() -> None:
    with trained(1, 2) as (place, pins):
        tier = open_tier(place)
        record = commits.read_commit(tier, *pins[1])
        assert isinstance(record, CommitRecord)
        own = [info.key for k in ("chunks/", "packs/") for info in place.list(k) if pins[1][1] in info.key]
        only_in_one = [key for key in own if key in garbage_if_gone(place, pins)]
        place.delete(only_in_one)
        assert gc(place, pins[1]).collected == (pins[1],)
        check_place(place, model_of(pins, 2))


def garbage_if_gone(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> set[str]:
    """Objects that only step 1 names."""
    from ckptstore.tier.contents import Contents

    tier = open_tier(place)
    named = {}
    for step, pin in pins.items():
        record = commits.read_commit(tier, *pin)
        assert isinstance(record, CommitRecord)
        named[step] = set(Contents(tier, record).object_sizes)
    return named[1] - named[2]


def test_names_that_are_nobodys_are_left_alone_c051() -> None:
    with trained(1, 2) as (place, pins):
        for key in ("commits/notes.txt", f"commits/{RUN_KEY}/draft.mp", "dooms/x/y.mp", "intents/README"):
            place.put(key, [b"?" * 200])
        assert gc(place, pins[1]).collected == (pins[1],)
        assert "commits/notes.txt" in listed(place, "commits/")


def test_keys_that_cannot_be_deleted_are_told_and_tried_again() -> None:
    with trained(1, 2) as (place, pins):

        class Stubborn(FaultBackend):
            def delete(self, keys):
                results = super().delete([key for key in keys if not key.startswith("chunks/")])
                by_key = {result.key: result for result in results}
                refused = BackendError("denied")
                return [
                    by_key.get(key) or dataclasses.replace(results[0], key=key, error=refused) for key in keys
                ]

        report = gc(Stubborn(place), pins[1])
        assert report.collected == (pins[1],)
        assert {error for _, error in report.failures} == {"denied"}
        assert all(key.startswith("chunks/") for key, _ in report.failures)
        assert garbage(place)
        again = gc(place)
        assert again.deleted_objects >= len(report.failures)
        assert not garbage(place)
        assert gc(place).round == ""


def test_the_log_of_finished_rounds_is_kept_short() -> None:
    with trained(*range(26)) as (place, pins):
        for step in range(25):
            gc(place, pins[step])
        plans = list(read_plans(open_tier(place)))
        assert {plan.state for plan in plans} == {"done"}
        assert len(plans) == 21


# --- fails closed -------------------------------------------------------------------------------


def cut_record(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    key = layout.commit_key(*pins[2])
    place.put(key, [place.get(key, max_bytes=1 << 26)[:-1]])


def emptied_record(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    place.put(layout.commit_key(*pins[2]), [b""])


def cut_intent(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    place.put("intents/01ARZ3NDEKTSV4RRFFQ69G5FAV-1-1.mp", [b"x"])


def cut_plan(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    place.put("gc/01ARZ3NDEKTSV4RRFFQ69G5FAV.mp", [b"x"])


def lost_table(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    record = commits.read_commit(open_tier(place), *pins[3])
    assert isinstance(record, CommitRecord)
    ref = dataclasses.replace(record.tables["keys"], inline=b"no key list")
    from ckptstore.model.documents import encode_record

    ref = dataclasses.replace(ref, size_bytes=len(b"no key list"))
    broken = dataclasses.replace(record, tables={**record.tables, "keys": ref})
    place.put(layout.commit_key(*pins[3]), [encode_record(broken)])


def cut_note(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    place.put(layout.note_key(RUN_KEY, pins[3][1], 1, "01ARZ3NDEKTSV4RRFFQ69G5FAV"), [b"x"])


def new_feature(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    marker = place.get(layout.MARKER, max_bytes=1 << 16)
    place.put(layout.MARKER, [marker.replace(b'"features": []', b'"features": ["later"]')])


def other_store(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    marker = place.get(layout.MARKER, max_bytes=1 << 16)
    uuid = open_tier(place).marker.store_uuid.encode()
    place.put(layout.MARKER, [marker.replace(uuid, uuid[::-1])[:0] or marker.replace(uuid[:4], b"0f0f")])


def no_marker(place: MemoryBackend, pins: dict[int, tuple[str, str]]) -> None:
    place.delete([layout.MARKER])


@pytest.mark.parametrize(
    ("harm", "error", "named"),
    [
        (cut_record, DocumentError, "commits/"),
        (emptied_record, DocumentError, "commits/"),
        (cut_intent, DocumentError, "intents/"),
        (cut_plan, DocumentError, "gc/"),
        (lost_table, DocumentError, "keys|key list"),
        (cut_note, DocumentError, "notes/"),
        (new_feature, FormatTooNewError, "later"),
        (other_store, WrongStoreError, "another store"),
        (no_marker, WrongStoreError, "marker is gone"),
    ],
)
def test_what_cannot_be_read_stops_the_round_c064(
    harm: Callable[[MemoryBackend, dict[int, tuple[str, str]]], None],
    error: type[CkptstoreError],
    named: str,
) -> None:
    with trained(1, 2, 3) as (place, pins):
        tier = open_tier(place)
        harm(place, pins)
        before = set(listed(place, "chunks/") + listed(place, "packs/"))
        from ckptstore.gc.collect import collect

        with pytest.raises(error, match=named):
            collect(tier, [pins[1]], reason="test")
        assert before == set(listed(place, "chunks/") + listed(place, "packs/"))
        data = place.get(layout.commit_key(*pins[1]), max_bytes=1 << 26)
        assert len(data) > 128  # not GONE


@pytest.mark.parametrize("prefix", ["gc/", "dooms/", "intents/", "commits/", "notes/*", "runs/*"])
def test_a_listing_that_fails_stops_the_round(prefix: str) -> None:
    with trained(1, 2, 3) as (place, pins):
        before = set(listed(place, "chunks/") + listed(place, "packs/"))
        failing = FaultBackend(place, [Fault("error", op="list", key=prefix, times=None)])
        with pytest.raises(BackendError):
            gc(failing, pins[1])
        assert before == set(listed(place, "chunks/") + listed(place, "packs/"))
        assert gc(place, pins[1]).collected == (pins[1],)


def test_a_short_listing_is_noticed_c067() -> None:
    with trained(1, 2, 3) as (place, pins):

        class Short(FaultBackend):
            lists = 0

            def list(self, prefix):
                found: list[ObjectInfo] = [*super().list(prefix)]
                if prefix == "commits/":
                    self.lists += 1
                    return iter(found[:-1] if self.lists == 2 else found)
                return iter(found)

        with pytest.raises(GuardError, match="missing from a listing"):
            gc(Short(place), pins[1])
        assert ends_as(place, pins[1]) == "commit"
        assert gc(place).collected == (pins[1],)
        check_place(place, model_of(pins, 2, 3))


def test_a_record_that_only_looks_like_an_end_does_not_free_its_pins() -> None:
    with trained(1, 2) as (place, pins):
        intent = announce(place, "save", pins[1])
        place.put(layout.commit_key(RUN_KEY, intent.document.attempt), [b"x" * 110])
        with pytest.raises(DocumentError):
            gc(place, pins[1])


def test_two_rounds_after_each_other_leave_nothing(  # garbage goes to zero
) -> None:
    with trained(*range(6)) as (place, pins):
        gc(place, *[pins[step] for step in range(5)])
        gc(place)
        assert not garbage(place)
        assert save_steps(place, [6])
