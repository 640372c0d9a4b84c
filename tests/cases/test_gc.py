"""Collecting beside everything else; the rows that want a bucket are in tests/s3/test_gc.py."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ckptstore
from ckptstore.environment import Environment
from ckptstore.errors import (
    BusyError,
    ConflictError,
    DocumentError,
    GuardError,
    SaveFailedError,
)
from ckptstore.gc import deleting, lock
from ckptstore.gc.rounds import RoundReport, Settings, run_round
from ckptstore.gc.survey import Hints
from ckptstore.model.documents import seal
from ckptstore.model.ids import Attempt, run_key
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import layout
from ckptstore.tier.policies import write_policy
from ckptstore_memory import MemoryBackend, _places
from tests.crash._support import (
    CHUNK_BYTES,
    TRAIN,
    blank_like,
    check_place,
    make_place,
    make_state,
    memory_place,
    quiet,
    same,
    store_over,
)
from tests.gc.made import RUN_KEY, ends_as, garbage, model_of, open_tier, save_steps, trained
from tests.gc.test_frozen_times import Frozen
from tests.replicate import made as replicated

HOUR = 3600.0


def keep(place, *, run: str | None = None, **rules: Any) -> None:
    """Stores a policy in the place."""
    key = None if run is None else run_key(run)
    write_policy([open_tier(place)], key, Policy.of(Keep(**rules)))


def full(place, **options) -> RoundReport:
    """A full round, as cron runs it."""
    hints = options.pop("hints", None)
    return run_round(open_tier(place), Settings(**options), hints=hints)


def objects(place) -> set[str]:
    return {info.key for kind in ("chunks/", "packs/") for info in place.list(kind)}


class Before(FaultBackend):
    """Something else happens right before the first put of a key that begins like this."""

    def __init__(self, inner, prefix: str, happens: Callable[[], object]) -> None:
        super().__init__(inner)
        self._prefix = prefix
        self._happens: Callable[[], object] | None = happens

    def put(self, key, buffers, *, if_absent=False):
        if self._happens is not None and key.startswith(self._prefix):
            happens, self._happens = self._happens, None
            happens()
        super().put(key, buffers, if_absent=if_absent)


def test_c001_what_a_save_that_died_before_its_record_left_is_reclaimed():
    with trained(1) as (place, pins):
        before = objects(place)
        with pytest.raises(SimulatedCrash):
            dying = store_over(FaultBackend(place, [Fault("crash", op="put", key="commits/*")]))
            dying.run(TRAIN).save(2, make_state(2)).result()
        assert objects(place) > before
        assert not full(place).cleared.objects  # it may still be at it
        assert objects(place) > before
        age_all(place, HOUR)
        full(place)
        assert objects(place) == before
        assert not list(place.list("intents/"))
        check_place(place, model_of(pins, 1))


def age_all(place: MemoryBackend, seconds: float) -> None:
    """All that is there was written so much earlier."""
    held = _places[place._name]
    for key, (content, modified) in held.items():
        held[key] = (content, modified - seconds)


@pytest.mark.parametrize("heard_of", [True, False], ids=["beating", "silent"])
def test_c062_an_open_save_keeps_what_it_reuses_or_is_told_that_it_was_ended(heard_of):
    with trained(1, 2) as (place, pins):
        keep(place, last=1)
        reports: list[RoundReport] = []

        def meanwhile() -> None:
            """The save takes longer than anybody waits, and another process trains on."""
            with contextlib.closing(store_over(place)) as other, other.run(TRAIN, auto_gc=False) as run:
                pins[4] = (RUN_KEY, run.save(4, make_state(4)).result().id)
            age_all(place, HOUR)
            for info in list(place.list("intents/")):
                if heard_of and info.key.endswith(layout.DOCUMENT):
                    place.put(layout.beat_key(layout.stem(info.key)), [b"1"])
            reports.append(full(place))

        with contextlib.closing(store_over(Before(place, "commits/", meanwhile))) as store:
            run = store.run(TRAIN, auto_gc=False)
            assert run.restore(blank_like(make_state(0))) == 2  # so it reuses what step 2 has
            saving = run.save(3, make_state(3))
            if heard_of:  # it had looked for a later session before; so it sorts below that one's
                assert same(saving.result().load(), make_state(3))
            else:
                with pytest.raises(SaveFailedError, match="silent"):
                    saving.result()
        (report,) = reports
        if heard_of:
            assert not report.fenced
            assert report.collected == (pins[1],)
            (base,) = [fate for fate in report.fates if fate.checkpoint == pins[2][1]]
            assert "pinned by save" in base.reasons[0]
        else:
            assert len(report.fenced) == 1
            assert set(report.collected) == {pins[1], pins[2]}
        age_all(place, HOUR)
        full(place)
        assert [ends_as(place, pins[step]) for step in (1, 2, 4)] == ["gone", "gone", "commit"]
        assert not garbage(place)
        check_place(place, model_of(pins, 4))


@pytest.mark.parametrize("seed", range(3))
def test_c064_whatever_is_saved_retained_forked_and_pushed_every_listed_step_is_exact(seed):
    draw = random.Random(seed)
    with replicated.places() as (hot, cold):
        write_policy([open_tier(hot)], None, Policy.of(Keep(last=2, every=5)))
        write_policy([open_tier(cold)], None, Policy.of(Keep(last=3)))
        with contextlib.ExitStack() as opened:
            made = [contextlib.closing(replicated.opened(hot, cold)) for _ in range(3)]
            stores = [opened.enter_context(one) for one in made]
            names = ["one", "two", "three"]
            last: dict[str, int] = dict.fromkeys(names, 0)

            def save(number: int) -> None:
                name = names[number]
                last[name] += 1
                stores[number].run(name).save(last[name], make_state(last[name], number), wait=True)

            for number in range(3):
                save(number)
            forks = 0
            for _ in range(40):
                number = draw.randrange(3)
                store = stores[number]
                what = draw.choice(["save", "save", "collect", "collect", "push", "fork", "look"])
                if what == "save":
                    save(number)
                elif what == "collect":
                    full(draw.choice([hot, cold]))
                elif what == "push":
                    replicated.replicate(store)
                elif what == "fork" and forks < 3:
                    source = draw.choice(store.run(names[draw.randrange(3)]).checkpoints())
                    forks += 1
                    with contextlib.suppress(ConflictError):  # it is not in the hot tier any more
                        store.run(f"fork {forks}").fork_from(source)
                else:
                    _listed_are_exact(store, names)
            for place in (hot, cold):
                with contextlib.closing(replicated.alone(place)) as alone:
                    _listed_are_exact(alone, names)
                    assert not alone.verify().problems
                assert not garbage(place)


def _listed_are_exact(store: ckptstore.Store, names: list[str]) -> None:
    for row in store.runs():
        for checkpoint in store.run(row.run).checkpoints():
            salts = [names.index(row.run)] if row.run in names else range(3)
            loaded = checkpoint.load()
            assert any(same(loaded, make_state(checkpoint.step, salt)) for salt in salts), checkpoint


def test_c066_a_full_round_needs_no_file_time():
    with trained(1, 2, 3) as (place, pins):
        keep(place, last=1)
        report = full(Frozen(place))
        assert set(report.collected) == {pins[1], pins[2]}
        assert not garbage(place)
        check_place(place, model_of(pins, 3))


def test_c069_a_round_that_was_killed_is_finished_and_what_is_broken_is_named():
    with trained(1, 2, 3, 4) as (place, pins):
        keep(place, last=2)
        total = FaultBackend(place)
        with pytest.raises(SimulatedCrash):
            run_round(open_tier(FaultBackend(place, [Fault("crash", op="delete")])), Settings())
        assert ends_as(place, pins[1]) == "gone"
        assert garbage(place), "it was to be killed between the records and their objects"
        (victim,) = [key for key in objects(place) if pins[4][1] in key and key.startswith("packs/")][:1]
        place.delete([victim])
        with contextlib.closing(store_over(place)) as store:
            assert {problem.step for problem in store.verify().problems} == {4}
        for _ in range(2):
            age_all(place, HOUR)  # the lock of the one that was killed lapses
            report = run_round(open_tier(total), Settings())
            broken = [fate for fate in report.fates if "damaged" in " ".join(fate.reasons)]
            assert [(fate.step, fate.outcome) for fate in broken] == [(4, "keep")]
            assert not report.failures
        assert (report.collected, report.deleted_objects, report.cleared.objects) == ((), 0, 0)
        assert not garbage(place)
        with contextlib.closing(store_over(place)) as store:
            assert same(store.run(TRAIN).latest.load(), make_state(3))


def test_c069_a_round_that_was_killed_a_repair_and_two_more_rounds_leave_all_whole():
    with replicated.places() as (hot, cold), contextlib.closing(replicated.opened(hot, cold)) as store:
        for step in (1, 2, 3):
            store.run(replicated.RUN).save(step, make_state(step), wait=True)
        replicated.replicate(store)
        keep(hot, last=2)
        with pytest.raises(SimulatedCrash):
            run_round(open_tier(FaultBackend(hot, [Fault("crash_after", op="delete")])), Settings())
        newest = store.run(replicated.RUN).latest
        hot.delete([next(key for key in newest.contents.keys.keys if key.startswith("packs/"))])
        assert store.verify(tier="hot").problems
        assert [one.step for one in store.replication.repair(store.tiers[0]).repaired] == [3]
        age_all(hot, HOUR)
        full(hot)
        again = full(hot)
        assert (again.collected, again.deleted_objects, again.failures) == ((), 0, ())
        assert not garbage(hot)
        replicated.holds(hot, (2, make_state(2)), (3, make_state(3)))


def test_c071_what_is_shared_is_told_before_and_after():
    with trained(1, 2) as (place, pins):
        keep(place, last=1)
        before = {info.key: info.size_bytes for k in ("chunks/", "packs/") for info in place.list(k)}
        plan = full(place, dry_run=True)
        assert objects(place) == before.keys()
        (goes,) = [fate for fate in plan.fates if fate.outcome == "delete"]
        report = full(place)
        freed = sum(before[key] for key in before.keys() - objects(place))
        assert goes.alone_bytes == plan.freed_bytes == report.freed_bytes == freed
        assert goes.size_bytes > goes.alone_bytes
        assert (report.collected, report.shared_objects > 0) == ((pins[1],), True)


def test_c072_a_round_with_nothing_to_delete_reads_records_and_lists_and_nothing_else():
    with trained(*range(8)) as (place, pins):
        keep(place, last=100)
        counting = FaultBackend(place)
        full(counting)
        idle = [call for call in counting.log if call.op in ("get", "read_into")]
        assert not [call for call in idle if call.key.startswith(("chunks/", "packs/", "parts/", "intents/"))]
        assert sum(call.key.startswith("commits/") for call in idle) == len(pins)
        for call in counting.log:
            assert call.op not in ("put", "delete") or call.key.startswith("gc/") or not call.key
        keep(place, last=7)
        busy = FaultBackend(place)
        assert len(full(busy).collected) == 1
        assert len(busy.log) < len(counting.log) + 60


def test_c074_an_open_session_stores_again_what_was_collected_under_it():
    with trained() as (place, _):
        keep(place, last=1)
        with contextlib.closing(store_over(place)) as store:
            run = store.run(TRAIN, auto_gc=False)
            for step in (1, 2):
                run.save(step, make_state(step), wait=True)
            assert len(full(place).collected) == 1
            again = make_state(1)  # its chunks have just been deleted
            made = run.save(3, again).result()
            assert same(made.load(), again)
            full(place)
            assert same(run.latest.load(), again)
            assert not store.verify().problems


class Held:
    """`gc/lock` as another process left it."""

    def __init__(self, place: MemoryBackend, **who: object) -> None:
        environment = Environment()
        holder = {
            "round": environment.new_ulid(),
            "host": "elsewhere",
            "boot_id": "another",
            "pid": 1,
            "author": "eva@elsewhere:1",
        }
        place.put(lock.LOCK, [seal("lock", holder | who)])


@contextlib.contextmanager
def two_steps() -> Iterator[MemoryBackend]:
    with trained(1, 2) as (place, _):
        keep(place, last=1)
        yield place


def test_c079_a_lock_of_another_host_stops_a_round_by_name_and_nobody_else():
    with two_steps() as place:
        Held(place)
        with pytest.raises(BusyError, match="eva@elsewhere:1") as raised:
            full(place)
        assert raised.value.exit_code == 11
        with contextlib.closing(store_over(place)) as store:
            run = store.run(TRAIN)
            assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2]
            assert run.save(3, make_state(3)).result() == run.latest
        age_all(place, HOUR)
        full(place)
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [3]
        assert lock.LOCK not in [info.key for info in place.list("gc/")]


def test_c079_a_lock_of_a_process_that_is_gone_is_taken_over_at_once():
    with two_steps() as place:
        here = Environment()
        Held(place, host=here.host, boot_id=here.boot_id, pid=2**22 + 1)
        assert len(full(place).collected) == 1


def test_c079_a_lock_that_cannot_be_read_lapses_like_any_other():
    with two_steps() as place:
        place.put(lock.LOCK, [b"not a document"])
        age_all(place, HOUR)
        assert len(full(place).collected) == 1


def test_c059_deletions_can_be_cut_short_between_batches_and_go_on_later(monkeypatch):
    monkeypatch.setattr(deleting, "BATCH", 2)
    with trained(*range(1, 9)) as (place, pins):
        keep(place, last=1)
        now = [0.0]
        watched = FaultBackend(place)
        tier = open_tier(watched)
        tier.environment = dataclasses.replace(quiet(), monotonic=lambda: now[0])
        delete = watched.delete

        def slow(keys):
            now[0] += 1.0
            return delete(keys)

        monkeypatch.setattr(watched, "delete", slow)
        report = run_round(tier, Settings(time_budget_seconds=2.5))
        assert report.is_cut_short
        assert 0 < report.deleted_objects <= 6
        assert garbage(place)
        check_place(place, model_of(pins, 8), next_step=None)
        assert not full(place).is_cut_short
        assert not garbage(place)


def test_g05_a_listing_that_lacks_what_a_manifest_knows_deletes_nothing():
    """A fresh record that LIST does not show yet may name what an old one does."""
    with trained(1, 2) as (place, pins):
        keep(place, last=1)

        class Lagging(FaultBackend):
            def list(self, prefix):
                return (info for info in super().list(prefix) if pins[2][1] not in info.key)

        before = objects(place)
        known = Hints(commits=[layout.commit_key(*pin) for pin in pins.values()])
        with pytest.raises(GuardError, match="listing"):
            run_round(open_tier(Lagging(place)), Settings(), hints=known)
        assert objects(place) == before
        check_place(place, model_of(pins, 1, 2))


@pytest.mark.parametrize("seen", [True, False], ids=["its run is known", "its run is not known"])
def test_g05_what_lies_under_a_commit_key_that_a_listing_lacks_is_nobodys_garbage(seen):
    with trained(1) as (place, pins), memory_place() as other:
        make_place(other)

        class Lagging(FaultBackend):
            def list(self, prefix):
                hidden = pins[1][1] if seen else RUN_KEY
                kinds = ("commits/",) if seen else ("commits/", "runs/")
                return (i for i in super().list(prefix) if not (i.key.startswith(kinds) and hidden in i.key))

        save_steps(place, [1], run="another")
        keep(place, last=1)
        age_all(place, HOUR)
        before = objects(place)
        report = run_round(open_tier(Lagging(place)), Settings())
        assert (report.collected, report.cleared.objects) == ((), 0)
        assert objects(place) == before
        check_place(place, model_of(pins, 1))


def test_an_announcement_without_a_byte_stops_rounds_until_its_attempt_is_given_up():
    """As some servers keep of a client that is killed while it puts one."""
    with trained(1, 2) as (place, pins):
        keep(place, last=1)
        attempt = str(Attempt(Environment().new_ulid(), 1, 1))
        place.put(layout.intent_key(attempt), [b""])
        with pytest.raises(DocumentError, match=attempt):
            full(place)
        age_all(place, HOUR)
        assert full(place, give_up=(attempt,)).collected == (pins[1],)
        assert full(place).collected == ()
        check_place(place, model_of(pins, 2))


def test_c209_names_with_slashes_leave_nothing_behind(tmp_path):
    run_name = "team/exp 1"
    with ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as store:
        with store.run(run_name) as run:
            for step in (1, 2):
                run.save(step, make_state(step), metrics={"val/loss": 1.0 / step}, wait=True)
            run.tag(1, "a/b")
            run.untag(1, "a/b")
        write_policy(store.tiers, None, Policy.of(Keep(last=1)))
        report = run_round(store.tier, Settings())
        assert len(report.collected) == 1
    places = {path.relative_to(tmp_path / "store").parts for path in (tmp_path / "store").rglob("*")}
    assert not [parts for parts in places if {"team", "val", "a", "exp 1", "loss", "b"} & set(parts)]
    assert {parts[0] for parts in places if len(parts) == 1} <= {
        *layout.TOP,
        *("chunks", "packs", "policies", layout.MARKER, "manifest.db"),
    }
    waiting = [parts for parts in places if parts[0] in ("dooms", "intents", "parts")]
    assert not [parts for parts in waiting if parts[-1].endswith(layout.DOCUMENT)]
