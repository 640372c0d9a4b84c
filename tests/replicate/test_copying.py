"""The copy of one checkpoint: sources that fail, attempts that are taken over, memory and pace."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from ckptstore.environment import Environment
from ckptstore.errors import BackendError, BusyError, ChunkDamagedError, NotFoundError, SaveFailedError
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.replicate import attempts, copying
from ckptstore.replicate.copying import CopyStopped, copy_checkpoint
from ckptstore.replicate.memory import Memory
from ckptstore.replicate.pace import Pace
from ckptstore.save.work import Progress
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import commits, intents, notes
from ckptstore.tier.contents import Contents
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Limits, Tier
from ckptstore_local import LocalBackend
from tests.crash._support import CHUNK_BYTES, check_objects, make_state, memory_place, quiet
from tests.inline import all_inline
from tests.replicate.made import RUN, holds, opened, places


@contextlib.contextmanager
def saved(*steps):
    """(hot, cold, key of the run) of a store with these steps in its hot tier."""
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            run = store.run(RUN)
            for step in steps or (1,):
                run.save(step, make_state(step), wait=True)
        yield hot, cold, run.key


def copy_in(store, number, step=1):
    """The copy of a step in one of the store's tiers."""
    store.refresh()
    key = store.run(RUN).key
    for entry in store.replicas(key)[store.tiers[number].uuid].values():
        if entry.step == step:
            return Copy(store.tiers[number], key, entry.attempt)
    raise AssertionError


def another(tier, place):
    """One more tier of the same store."""
    return Tier.create(place, quiet(), chunk_bytes=CHUNK_BYTES, store_uuid=tier.marker.store_uuid)


def flip(place, key, at=7):
    data = bytearray(place.get(key, max_bytes=1 << 30))
    data[at] ^= 1
    place.put(key, [data])


def chunk_of(copy, tensor):
    """Key of the object that holds a tensor's first chunk."""
    contents = copy.contents
    row = int(contents.layout.chunks.first[contents.layout.by_name[tensor]])
    return contents.keys.key(int(contents.locations.object[row]))


# --- sources -----------------------------------------------------------------------------------------


def test_a_bad_chunk_comes_from_another_copy_and_is_reported():
    with saved() as (hot, cold, key), memory_place() as place, contextlib.closing(opened(hot, cold)) as store:
        first = copy_in(store, 0)
        copy_checkpoint([first], store.tiers[1])
        second = copy_in(store, 1)
        flip(hot, chunk_of(first, "model.hot"))
        third = another(store.tier, place)
        copied = copy_checkpoint([copy_in(store, 0), second], third)
        assert copied.sent_bytes == copied.new_bytes > 0
        check_objects(place)
        assert notes.is_damaged(store.tiers[0], key, first.record)
        assert not notes.is_damaged(store.tiers[1], key, second.record)
        for tier in store.tiers:
            assert not list(intents.list_intents(tier)), "read intents end with the copy"


def test_bad_tables_of_one_copy_do_not_stop_the_other():
    with saved() as (hot, cold, key), memory_place() as place, contextlib.closing(opened(hot, cold)) as store:
        first = copy_in(store, 0)
        copy_checkpoint([first], store.tiers[1])
        flip(hot, first.record.tables["tree"].pieces[0].key)
        copied = copy_checkpoint([copy_in(store, 0), copy_in(store, 1)], another(store.tier, place))
        assert copied.new_bytes > 0
        assert notes.is_damaged(store.tiers[0], key, first.record)


def test_a_copy_of_other_chunks_is_not_accused():
    with saved(1, 2) as (hot, cold, key), contextlib.closing(opened(hot, cold)) as store:
        first, other = copy_in(store, 0, 1), copy_in(store, 0, 2)
        flip(hot, chunk_of(first, "model.hot"))
        with pytest.raises(ChunkDamagedError, match=r"model\.hot.*is not that of attempt"):
            copy_checkpoint([first, other], store.tiers[1])
        assert notes.is_damaged(store.tier, key, first.record)
        assert not notes.is_damaged(store.tier, key, other.record)
        holds(cold)


def test_a_chunk_is_found_in_a_generation_with_other_tables():
    """A trimmed one has other rows: there a chunk is looked up by its digest."""
    with saved(1, 2) as (hot, cold, key), contextlib.closing(opened(hot, cold)) as store:
        copy_checkpoint([copy_in(store, 0, 2)], store.tiers[1])
        first, later = copy_in(store, 0, 1), copy_in(store, 1, 2)
        flip(hot, chunk_of(first, "model.frozen"))
        record = dataclasses.replace(later.record, checkpoint=first.record.checkpoint, generation=1)
        other = Copy.of(later.tier, Contents(later.tier, record))
        with memory_place() as place:
            copy_checkpoint([first, other], another(store.tiers[1], place))
            holds(place, (1, make_state(1)))
        assert notes.is_damaged(store.tier, key, first.record)
        assert not notes.is_damaged(store.tiers[1], key, later.record)


def test_a_tier_that_is_away_is_not_taken_for_damage():
    with saved() as (hot, cold, key), memory_place() as place:
        with contextlib.closing(opened(hot, cold)) as store:
            copy_checkpoint([copy_in(store, 0)], store.tiers[1])
        away = FaultBackend(hot, [Fault("error", op="read_into", key="*", times=None)])
        with contextlib.closing(opened(away, cold)) as store:
            second = copy_in(store, 1)
            flip(cold, chunk_of(second, "model.hot"))
            with pytest.raises(BackendError, match="made to"):
                copy_checkpoint([copy_in(store, 0), copy_in(store, 1)], another(store.tiers[1], place))
            assert not notes.is_damaged(store.tier, key, copy_in(store, 0).record)


def test_a_record_that_is_being_deleted_is_not_read():
    with saved() as (hot, cold, key), contextlib.closing(opened(hot, cold)) as store:
        copy = copy_in(store, 0)
        store.tier.put_new(f"dooms/{key}/{copy.attempt}.mp", b"doomed")
        with pytest.raises(NotFoundError, match="being deleted"):
            copy_checkpoint([copy], store.tiers[1])
        holds(cold)


def test_a_base_that_is_gone_is_only_not_reused():
    with saved(1, 2) as (hot, cold, key), contextlib.closing(opened(hot, cold)) as store:
        gone = Copy(store.tiers[1], key, copy_in(store, 0, 1).attempt)  # never was there
        copied = copy_checkpoint([copy_in(store, 0, 2)], store.tiers[1], bases=[gone])
        assert copied.reused_bytes == 0
        holds(cold, (2, make_state(2)))


# --- attempts ----------------------------------------------------------------------------------------


def killed_at(hot, cold, fault):
    """Copies step 1 in a process that dies there."""
    watched = FaultBackend(cold, [fault])
    with contextlib.closing(opened(hot, watched)) as store, pytest.raises(SimulatedCrash):
        copy_checkpoint([copy_in(store, 0)], store.tiers[1])


def dead(_document):
    return False


def test_what_a_dead_process_put_is_not_sent_again():
    with saved() as (hot, cold, _):
        killed_at(hot, cold, Fault("crash", op="put", key="packs/*"))
        with contextlib.closing(opened(hot, cold)) as store:
            (document,) = intents.list_intents(store.tiers[1])
            there = sum(info.size_bytes for kind in ("chunks/", "packs/") for info in cold.list(kind))
            copied = copy_checkpoint([copy_in(store, 0)], store.tiers[1], is_alive=dead)
            assert copied.contents.record.attempt == document.attempt
            assert copied.sent_bytes <= copied.new_bytes - there
            assert not list(intents.list_intents(store.tiers[1]))
        holds(cold, (1, make_state(1)))


def test_on_a_disk_it_is_put_again_but_does_not_travel_again(tmp_path):
    """Only who puts a file makes its name durable."""
    with places() as (hot, _):
        with contextlib.closing(opened(hot, hot)) as store:
            store.run(RUN).save(1, make_state(1), wait=True)
        cold = LocalBackend.from_url(str(tmp_path / "cold"))
        tier = another(Tier.open(hot, quiet()), cold)
        source = Tier.open(hot, quiet())
        entry = next(iter(hot.list("commits/")))
        _, key, name = entry.key.split("/")
        copy = Copy(source, key, name.removesuffix(".mp"))
        crashing = FaultBackend(cold, [Fault("crash", op="put", key="commits/*")])
        with pytest.raises(SimulatedCrash):
            copy_checkpoint([copy], Tier.open(crashing, quiet()))
        victim = next(info.key for info in cold.list("chunks/"))
        flip(cold, victim)  # and half of a file is found out
        watched = FaultBackend(cold)
        copied = copy_checkpoint([copy], Tier.open(watched, quiet()), is_alive=dead)
        put = {call.key for call in watched.log if call.op == "put"}
        assert copied.sent_bytes < copied.new_bytes
        assert set(copied.contents.object_sizes) <= put
        check_objects(cold)
        assert tier.uuid != source.uuid


def test_after_a_failed_sync_nothing_that_was_put_is_relied_on():
    with saved() as (hot, cold, key):
        watched = FaultBackend(cold, [Fault("error", op="sync")])
        with contextlib.closing(opened(hot, watched)) as store:
            with pytest.raises(SaveFailedError, match="may not be durable"):
                copy_checkpoint([copy_in(store, 0)], store.tiers[1])
            (info,) = cold.list("commits/")
            attempt = info.key.rpartition("/")[2].removesuffix(".mp")
            assert isinstance(commits.read_commit(store.tiers[1], key, attempt), CommitEnd)
            copied = copy_checkpoint([copy_in(store, 0)], store.tiers[1])
            assert copied.contents.record.attempt != attempt
            assert copied.sent_bytes == copied.new_bytes
        holds(cold, (1, make_state(1)))


def test_where_creation_is_not_exclusive_nothing_is_taken_over(monkeypatch):
    with saved() as (hot, cold, _):
        killed_at(hot, cold, Fault("crash", op="put", key="commits/*"))
        with contextlib.closing(opened(hot, cold)) as store:
            (document,) = intents.list_intents(store.tiers[1])
            plain = type(cold.capabilities)(False, True, True, 1 << 20, 4)
            monkeypatch.setattr(type(cold), "capabilities", plain)
            copied = copy_checkpoint([copy_in(store, 0)], store.tiers[1], is_alive=dead)
            assert copied.contents.record.attempt != document.attempt
            assert copied.sent_bytes == copied.new_bytes


def test_a_silent_process_of_another_host_is_taken_over_after_a_while():
    with saved() as (hot, cold, _):
        killed_at(hot, cold, Fault("crash", op="put", key="commits/*"))
        now = Environment().now()
        for later, expected in ((60.0, BusyError), (intents.SILENT_SECONDS + 60.0, None)):
            environment = Environment(now=lambda later=later: now + later, sleep=lambda _: None)
            with contextlib.closing(opened(hot, cold, environment=environment)) as store:
                source = copy_in(store, 0)
                with pytest.raises(expected) if expected else contextlib.nullcontext():
                    copy_checkpoint([source], store.tiers[1], is_alive=lambda _: True)
        holds(cold, (1, make_state(1)))


def test_what_was_committed_before_the_process_died_is_only_tidied():
    with saved() as (hot, cold, _):
        killed_at(hot, cold, Fault("crash_after", op="put", key="commits/*"))
        with contextlib.closing(opened(hot, cold)) as store:
            copied = copy_checkpoint([copy_in(store, 0)], store.tiers[1], is_alive=dead)
            assert copied.sent_bytes == 0
            assert not list(intents.list_intents(store.tiers[1]))
        holds(cold, (1, make_state(1)))


def test_two_that_take_over_at_once_leave_one_whole_checkpoint(monkeypatch):
    """The one that was only slow commits first; the other gives what stands there."""
    with saved() as (hot, cold, key), contextlib.closing(opened(hot, cold)) as store:
        source = copy_in(store, 0)
        crashing = FaultBackend(cold, [Fault("crash", op="put", key="packs/*")])
        with contextlib.closing(opened(hot, crashing)) as other, pytest.raises(SimulatedCrash):
            copy_checkpoint([copy_in(other, 0)], other.tiers[1])
        create, made = copying.create_record, []

        def late(tier, run_key, record, data):
            if not made:  # the first owner wakes up and finishes before this one commits
                made.append(record)
                attempts._release(record.attempt)
                copy_checkpoint([source], store.tiers[1], is_alive=dead)
            create(tier, run_key, record, data)

        monkeypatch.setattr(copying, "create_record", late)
        copied = copy_checkpoint([source], store.tiers[1], is_alive=dead)
        found = commits.read_commit(store.tiers[1], key, made[0].attempt)
        assert isinstance(found, CommitRecord)
        assert copied.contents.record.tables == found.tables
        holds(cold, (1, make_state(1)))


def test_a_copy_that_is_stopped_goes_on_later():
    with saved() as (hot, cold, _), contextlib.closing(opened(hot, cold)) as store:
        progress = Progress()
        with pytest.raises(CopyStopped):
            copy_checkpoint(
                [copy_in(store, 0)],
                store.tiers[1],
                progress=progress,
                is_stopped=lambda: progress.done_bytes > 0,
            )
        holds(cold)
        copied = copy_checkpoint([copy_in(store, 0)], store.tiers[1])
        assert 0 < copied.sent_bytes < copied.new_bytes
        holds(cold, (1, make_state(1)))


# --- objects, memory and pace -----------------------------------------------------------------------


def test_small_chunks_of_many_packs_arrive_in_one():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = store.run(RUN)
        state = {"model": {str(n): make_state(n)["optimizer"]["moment"] for n in range(8)}}
        for step in range(1, 8):
            state["model"][str(step)] = make_state(step + 50)["optimizer"]["moment"]
            run.save(step, state, wait=True)
        source = copy_in(store, 0, 7)
        assert source.contents.keys.is_pack.sum() > 1
        copied = copy_checkpoint([source], store.tiers[1])
        assert copied.contents.keys.is_pack.tolist() == [True]
        holds(cold, (7, state))


def test_memory_is_lent_within_its_limit_and_used_again():
    memory = Memory(4 << 20)
    order: list[str] = []
    with memory.take(3 << 20) as first:
        assert len(first) == 3 << 20

        def second() -> None:
            with memory.take(2 << 20):
                order.append("second")

        thread = threading.Thread(target=second)
        thread.start()
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]
    with memory.take(10 << 20) as whole:  # more than the limit has all to itself
        assert len(whole) == 10 << 20
    with memory.take(1 << 20) as again, memory.take(0) as nothing:
        again[:] = bytes(1 << 20)
        assert len(nothing) == 0
    with memory.take(1 << 20):
        assert memory._made == 5
    for _ in range(3):  # of what was kept, some makes room
        with memory.take(3 << 20), memory.take(1 << 20):
            assert memory._mapped_bytes == 4 << 20


def test_under_a_cap_no_object_is_longer_than_a_chunk():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        random = np.random.default_rng(1)
        state = {"model": {str(n): random.integers(0, 255, CHUNK_BYTES // 8, np.uint8) for n in range(20)}}
        store.run(RUN).save(1, state, wait=True)
        tier = store.tiers[1]
        whole = copy_in(store, 0).contents.keys
        assert whole.sizes.max() > 2 * CHUNK_BYTES
        tier.limits = Limits(max_bytes_per_second=1 << 30)
        capped = copy_checkpoint([copy_in(store, 0)], tier).contents.keys
        assert capped.is_pack.all()
        assert capped.sizes.max() <= CHUNK_BYTES
        assert capped.sizes.sum() == whole.sizes.sum()
        holds(cold, (1, state))


def test_a_cap_is_kept(monkeypatch):
    all_inline(monkeypatch)
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds

    pace = Pace(1000, lambda: clock[0], sleep)
    for _ in range(10):
        pace.pass_bytes(500)
    assert clock[0] == pytest.approx(4.5)  # when the last of them begins
    clock[0] += 100.0
    pace.pass_bytes(100)
    assert clock[0] == pytest.approx(104.5)  # after a pause a little passes at once
    with saved() as (hot, cold, _), contextlib.closing(opened(hot, cold)) as store:
        clock[0] = 0.0
        limited = Pace(10_000, lambda: clock[0], sleep)
        copied = copy_checkpoint([copy_in(store, 0)], store.tiers[1], pace=limited)
        limited.pass_bytes(0)
        assert clock[0] == pytest.approx(copied.sent_bytes / 10_000)
