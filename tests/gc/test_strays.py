"""What crashed and ended attempts left, and what a person gives up."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest

from ckptstore.backend import DeleteResult, ObjectInfo
from ckptstore.errors import (
    BackendError,
    BusyError,
    CkptstoreError,
    ConflictError,
    DocumentError,
    NotFoundError,
    UsageError,
)
from ckptstore.gc.documents import read_plans
from ckptstore.gc.lock import LOCK
from ckptstore.model.documents import encode_end
from ckptstore.model.ids import Attempt, chunk_key, digest_of
from ckptstore.model.record import CommitEnd
from ckptstore.model.retention import Keep
from ckptstore.testing.faults import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import layout
from ckptstore_memory import MemoryBackend
from tests.crash._support import TRAIN, check_place, make_state, store_over
from tests.gc.made import RUN_KEY, announce, ends_as, garbage, model_of, open_tier, trained
from tests.gc.test_collect import cut_record
from tests.gc.test_rounds import HOUR, age, full, keep, listed, stored

LONG = 3 * HOUR
UNKNOWN = "01ARZ3NDEKTSV4RRFFQ69G5FAV-12000-1"


def crashed_save(place: MemoryBackend, *, after: str = "commits/*") -> str:
    """A save of a process that ends right before it puts at `after`; its attempt."""
    backend = FaultBackend(place, [Fault("crash", op="put", key=after)])
    with contextlib.suppress(SimulatedCrash, CkptstoreError), store_over(backend) as store:
        store.run(TRAIN).save(9, make_state(9)).result()
    (attempt,) = {layout.stem(key) for key in listed(place, "intents/") if key.endswith(".mp")}
    return attempt


def put_object(place: MemoryBackend, attempt: str, data: bytes = b"stray") -> str:
    key = chunk_key(digest_of(data), attempt, 0)
    place.put(key, [data])
    return key


def test_a_crashed_save_is_left_alone_until_it_has_been_silent_and_then_cleared() -> None:
    with trained(1, 2) as (place, pins):
        before = stored(place)
        attempt = crashed_save(place)
        assert stored(place) > before
        report = full(place)
        assert (report.cleared.objects, report.fenced) == (0, ())
        age(place, listed(place, "intents/"), LONG)
        planned = full(place, dry_run=True)
        assert planned.cleared.objects == len(stored(place) - before)
        assert ends_as(place, (RUN_KEY, attempt)) == "nothing"
        report = full(place)
        assert report.fenced == (attempt,)
        assert report.cleared.objects == planned.cleared.objects
        assert report.cleared.object_bytes > 0
        assert report.cleared.intents == 1
        assert stored(place) == before
        assert ends_as(place, (RUN_KEY, attempt)) == "void"
        assert not listed(place, "intents/")
        assert not list(read_plans(open_tier(place)))
        check_place(place, model_of(pins, 1, 2))


def test_a_failed_save_is_cleared_at_once() -> None:
    """VOID is at its commit key: nobody waits for it."""
    with trained(1) as (place, pins):
        before = stored(place)
        faults = [Fault("error", op="put", key="packs/*", times=None)]
        with store_over(FaultBackend(place, faults)) as store:
            run = store.run(TRAIN)
            with pytest.raises(CkptstoreError):
                run.save(2, make_state(2), wait=True)
            run.close()
        left = stored(place) - before
        assert left
        assert full(place).cleared.objects == len(left)
        assert stored(place) == before
        check_place(place, model_of(pins, 1))


def test_of_a_collected_attempt_only_what_live_records_name_stays() -> None:
    with trained(1, 2) as (place, pins):
        keep(place, Keep(last=1))
        full(place)
        shared = {key for key in stored(place) if pins[1][1] in key}
        assert shared
        late = put_object(place, pins[1][1])  # a PUT that the network has held back
        report = full(place)
        assert (report.cleared.objects, report.cleared.object_bytes) == (1, 5)
        assert late not in stored(place)
        assert shared <= stored(place)
        check_place(place, model_of(pins, 2))


def test_what_a_live_record_does_not_name_of_its_own_attempt_stays_until_that_is_collected() -> None:
    with trained(1, 2) as (place, pins):
        spare = put_object(place, pins[1][1])
        age(place, [spare], LONG)
        assert full(place).cleared.objects == 0
        assert spare in stored(place)
        keep(place, Keep(last=1))
        full(place)
        assert spare not in stored(place)


def test_an_attempt_without_intent_or_outcome_is_ended_when_its_session_is_known() -> None:
    """Its VOID could not be written and its intent was removed: two rounds clear what it left."""
    with trained(1) as (place, pins):
        session = pins[1][1].partition("-")[0]
        attempt = f"{session}-8-8"
        key = put_object(place, attempt)
        report = full(place)
        (left,) = report.cleared.left
        assert (left.attempt, left.objects, left.size_bytes) == (attempt, 1, 5)
        assert "not long ago" in left.why
        age(place, [key], LONG)
        assert full(place, dry_run=True).cleared.fenced == (attempt,)
        assert ends_as(place, (RUN_KEY, attempt)) == "nothing"
        assert full(place).fenced == (attempt,)
        assert full(place).cleared.objects == 1
        assert key not in stored(place)
        assert not full(place).cleared.left


def test_an_attempt_of_which_nothing_is_known_is_left_alone_and_told() -> None:
    with trained(1) as (place, _):
        key = put_object(place, UNKNOWN)
        age(place, [key], 1000 * LONG)
        report = full(place)
        assert [(left.attempt, left.why) for left in report.cleared.left] == [
            (UNKNOWN, "its run is not known")
        ]
        assert key in stored(place)
        assert full(place, give_up=(UNKNOWN,)).cleared.objects == 1
        assert key not in stored(place)


def test_where_creating_is_not_exclusive_nobody_is_ended_unasked() -> None:
    class Plain(FaultBackend):
        @property
        def capabilities(self) -> Any:
            return dataclasses.replace(super().capabilities, create_if_absent=False)

    with trained(1) as (place, _):
        attempt = crashed_save(place)
        age(place, [*listed(place, "intents/"), *stored(place)], LONG)
        before = stored(place)
        report = full(Plain(place))
        assert not report.fenced
        assert [left.attempt for left in report.cleared.left] == [attempt]
        assert stored(place) == before
        assert ends_as(place, (RUN_KEY, attempt)) == "nothing"
        full(Plain(place), give_up=(attempt,))
        assert ends_as(place, (RUN_KEY, attempt)) == "void"
        assert not {key for key in stored(place) if attempt in key}


def test_documents_of_ended_attempts_go_and_those_of_others_stay() -> None:
    with trained(1, 2) as (place, pins):
        decided, open_one = pins[1][1], announce(place, "save", pins[2]).document.attempt
        silent, reading = announce(place, "read", pins[1]), announce(place, "read", pins[2])
        pinned = announce(place, "pin", pins[2])
        age(place, [layout.intent_key(i.document.attempt) for i in (silent, pinned)], LONG)
        old = [
            layout.start_key(decided),
            layout.part_key(decided, 1),
            layout.part_key(open_one, 1),
            layout.word_key(layout.room("0" * 32), "session", 0),
            layout.beat_key(UNKNOWN),
            layout.holding_key(UNKNOWN, 1),  # rank 0 never announced that save
        ]
        new = [layout.word_key(layout.room("1" * 32), "session", 0), layout.part_key(pins[2][1], 1)]
        for key in (*old, *new):
            place.put(key, [b"x"])
        age(place, old, 30 * HOUR)
        report = full(place)
        assert (report.cleared.parts, report.cleared.intents) == (4, 1)
        assert set(listed(place, "parts/")) == {layout.part_key(open_one, 1), *new}
        kept = {open_one, reading.document.attempt, pinned.document.attempt}
        assert {layout.stem(key) for key in listed(place, "intents/")} == kept


def test_temporary_files_go_when_they_are_old_and_nobody_may_finish_them() -> None:
    with trained(1, 2) as (place, pins):
        live = announce(place, "save", pins[2]).document.attempt
        digest = "ab" * 32
        names = {
            f"chunks/ab/.{digest}.{UNKNOWN}.0.upload-x": LONG,
            f"chunks/ab/.{digest}.{live}.0.upload-x": LONG,
            f"chunks/ab/.{digest}.{UNKNOWN}.1.upload-x": 0.0,
        }
        now = place.head(layout.MARKER).modified
        deleted: list[str] = []

        class Leftovers(FaultBackend):
            def list_temporaries(self, prefix: str) -> Any:
                return (ObjectInfo(key, 0, now - old) for key, old in names.items() if key not in deleted)

            def delete(self, keys: Any) -> Any:
                deleted.extend(keys)
                return super().delete([key if ".upload-" not in key else "gc/none" for key in keys])

        assert full(Leftovers(place), dry_run=True).cleared.temporaries == 1
        assert full(Leftovers(place)).cleared.temporaries == 1
        assert [key for key in deleted if ".upload-" in key] == [next(iter(names))]


def test_only_the_runs_that_were_asked_for_are_cleared() -> None:
    with trained(1) as (place, _):
        crashed_save(place)
        age(place, listed(place, "intents/"), LONG)
        before = stored(place)
        assert full(place, runs=("other",)).cleared.objects == 0
        assert stored(place) == before
        assert full(place, runs=("train*",)).cleared.objects > 0


# --- giving up --------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_read_may_be_given_up() -> None:
    with trained(1, 2, 3) as (place, pins):
        cut_record(place, pins)
        with pytest.raises(DocumentError, match=pins[2][1]) as caught:
            full(place)
        assert "--give-up" in (caught.value.hint or "")
        report = full(place, give_up=(pins[2][1],))
        assert report.cleared.objects > 0
        assert ends_as(place, pins[2]) == "gone"
        assert not garbage(place)
        check_place(place, model_of(pins, 1, 3))


def test_a_checkpoint_a_live_saver_and_what_is_nothing_are_not_given_up() -> None:
    with trained(1, 2) as (place, pins):
        live = announce(place, "save", pins[1]).document.attempt
        before = stored(place)
        for attempt, error in (
            (pins[1][1], ConflictError),
            (live, BusyError),
            (UNKNOWN, NotFoundError),
            ("12000", UsageError),
        ):
            with pytest.raises(error):
                full(place, give_up=(attempt,))
        assert LOCK not in listed(place, "gc/")
        assert stored(place) == before
        age(place, listed(place, "intents/"), LONG)
        full(place, give_up=(live,))
        assert ends_as(place, (RUN_KEY, live)) == "void"


def test_an_intent_that_cannot_be_read_may_be_given_up() -> None:
    with trained(1) as (place, _):
        place.put(layout.intent_key(UNKNOWN), [b"x"])
        with pytest.raises(DocumentError):
            full(place)
        with pytest.raises(BusyError):
            full(place, give_up=(UNKNOWN,))
        age(place, listed(place, "intents/"), LONG)
        full(place, give_up=(UNKNOWN,))
        assert not listed(place, "intents/")


def test_what_cannot_be_deleted_is_told_once_and_tried_again() -> None:
    class Stubborn(FaultBackend):
        def delete(self, keys: Any) -> Any:
            results = super().delete([key for key in keys if not key.startswith("packs/")])
            by_key = {result.key: result for result in results}
            return [by_key.get(key) or DeleteResult(key, BackendError("denied")) for key in keys]

    with trained(1, 2) as (place, _):
        keep(place, Keep(last=1))
        report = full(Stubborn(place))
        told = [key for key, _ in (*report.failures, *report.cleared.failures)]
        assert told
        assert len(told) == len(set(told))
        assert garbage(place) == set(told)
        full(place)
        assert not garbage(place)


def test_the_attempt_in_a_key_is_read_as_a_backend_lists_it() -> None:
    """Names of nobody's in the folders of objects are left alone."""
    with trained(1) as (place, _):
        void = announce(place, "save").document.attempt
        end = encode_end(CommitEnd(void, "void", "failed"))
        open_tier(place).put_new(layout.commit_key(RUN_KEY, void), end)
        odd = ["chunks/ab/readme", "chunks/ab/a.b.c", f"packs/ab/{'ab' * 32}.{Attempt('x', 1, 1)}.0"]
        odd += [f"chunks/ab/notes.{void}.0", f"packs/cd/{'ab' * 32}.{void}.0"]
        for key in odd:
            place.put(key, [b"x"])
        age(place, odd, LONG)
        report = full(place)
        assert (report.cleared.objects, report.cleared.left) == (0, ())
        assert set(odd) <= set(listed(place, "chunks/") + listed(place, "packs/"))
