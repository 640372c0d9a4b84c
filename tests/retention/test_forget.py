"""Removing on purpose and taking it back: notes in every tier, and who is asked first."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator

import pytest

from ckptstore.environment import Environment
from ckptstore.errors import BackendError, ConflictError, GuardError, NotFoundError
from ckptstore.model.documents import encode_end, seal
from ckptstore.model.record import CommitEnd
from ckptstore.store import Store
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier import layout, notes
from ckptstore_memory import MemoryBackend
from tests.crash._support import TRAIN, make_state, quiet, same, store_over
from tests.gc.made import RUN_KEY, age, announce, ends_as, gc, trained
from tests.replicate.made import alone, opened, places, replicate


@contextlib.contextmanager
def at(place: MemoryBackend, environment: Environment | None = None) -> Iterator[Store]:
    with store_over(place, environment) as store:
        yield store


def states(store: Store) -> dict[int, str]:
    return {checkpoint.step: checkpoint.state for checkpoint in store.run(TRAIN).checkpoints()}


def test_what_is_forgotten_is_not_restored_and_the_next_round_deletes_it() -> None:
    with trained(1, 2, 3) as (place, pins), at(place) as store:
        run = store.run(TRAIN)
        assert [found.id for found in run.forget(3)] == [pins[3][1]]
        assert states(store) == {1: "ok", 2: "ok", 3: "doomed"}
        assert run.latest is not None
        assert run.latest.step == 2
        assert gc(place, pins[3], pins[1]).collected == (pins[1], pins[3])
        assert states(store) == {2: "ok"}


def test_a_whole_run_may_go() -> None:
    with trained(1, 2) as (place, pins), at(place) as store:
        assert [found.step for found in store.forget_run(TRAIN)] == [1, 2]
        assert store.run(TRAIN).latest is None
        assert len(gc(place, *pins.values()).collected) == 2
        with pytest.raises(NotFoundError, match="no checkpoints"):
            store.forget_run(TRAIN)
        with pytest.raises(NotFoundError, match="no run"):
            store.forget_run("other")


def test_undelete_takes_it_back_exactly_until_it_is_doomed() -> None:
    with trained(1, 2) as (place, pins), at(place) as store:
        run = store.run(TRAIN)
        for _ in range(2):  # and again: the later word counts
            run.forget(1)
            assert states(store)[1] == "doomed"
            assert run.undelete(1).state == "ok"
        assert same(run[1].load(), make_state(1))
        assert not gc(place, pins[2]).collected  # nothing is forgotten any more
        run.forget(1)
        store.tier.put_new(layout.doom_key(*pins[1]), seal("doom", {"reason": "", "at": 0.0, "author": ""}))
        with pytest.raises(ConflictError, match="too late"):
            run.undelete(1)
        assert gc(place).collected == (pins[1],)
        for which in (pins[1][1], pins[1][1].lower()):
            with pytest.raises(ConflictError, match="was deleted: it is too late"):
                run.undelete(which)
        with pytest.raises(NotFoundError):
            run.undelete(1)


def test_a_doom_that_comes_with_the_undelete_is_told() -> None:
    """The round had read the notes before ours was there."""
    with trained(1, 2) as (place, pins):
        racing = FaultBackend(place)
        with store_over(racing) as store:
            store.run(TRAIN).forget(1)
            doom = layout.doom_key(*pins[1])
            real_put = racing.put

            def put(key: str, *args: object, **options: object) -> None:
                real_put(key, *args, **options)  # type: ignore[arg-type]
                if key.startswith("notes/"):
                    real_put(doom, [seal("doom", {"reason": "", "at": 0.0, "author": ""})])

            racing.put = put  # type: ignore[method-assign]
            with pytest.raises(ConflictError, match="too late"):
                store.run(TRAIN).undelete(1)


def test_what_expires_is_undeleted_and_what_is_not_to_go_is_refused() -> None:
    with trained(1, 2) as (place, pins), at(place) as store:
        run = store.run(TRAIN)
        with pytest.raises(ConflictError, match="is ok: nothing is to be undeleted"):
            run.undelete(1)
        notes.add_note(store.tier, TRAIN, RUN_KEY, pins[1][1], "expiring", {"expiring": True})
        assert states(store)[1] == "expiring"
        assert run.undelete(1).state == "ok"


# --- who is asked ---------------------------------------------------------------------------------


def refused(store: Store, step: int, who: str) -> None:
    with pytest.raises(GuardError, match=who):
        store.run(TRAIN).forget(step)
    with pytest.raises(GuardError, match=who):
        store.forget_run(TRAIN)
    assert "doomed" not in states(store).values()


def test_what_is_pinned_stays_until_it_is_unpinned() -> None:
    with trained(1, 2) as (place, _), at(place) as store:
        store.run(TRAIN).pin(1, "figures of the paper")
        refused(store, 1, r"held by pin of .*figures of the paper")
        store.run(TRAIN).forget(2)
        store.run(TRAIN).unpin(1)
        store.run(TRAIN).forget(1)


def test_what_is_being_read_or_built_on_stays_while_its_process_is_heard_of() -> None:
    with trained(1, 2) as (place, pins), at(place) as store:
        reader = announce(place, "read", pins[1])
        refused(store, 1, "being read: read of .*tier main")
        age(place, reader, 16 * 60)
        age(place, announce(place, "save", pins[1]), 16 * 60)
        saver = announce(place, "save", pins[1])
        refused(store, 1, "pinned by save")
        place.put(
            layout.commit_key(RUN_KEY, saver.document.attempt),
            [encode_end(CommitEnd(saver.document.attempt, "void", "given up"))],
        )
        store.run(TRAIN).forget(1)


def test_a_forks_base_stays_as_long_as_the_fork() -> None:
    with trained(1, 2) as (place, _), at(place) as store:
        with store.run("fork") as fork:
            fork.fork_from(store.run(TRAIN)[1])
        refused(store, 1, "run 'fork' was forked from it")
        store.run(TRAIN).forget(2)
        store.forget_run("fork")
        store.run(TRAIN).forget(1)


def somewhere(**differs: object) -> Environment:
    """A process elsewhere."""
    names = tuple(differs)
    made = dataclasses.make_dataclass("Elsewhere", [], bases=(Environment,), frozen=True)
    for name in names:
        setattr(made, name, property(functools.partial(_differing, differs[name])))
    return made(sleep=lambda _: None)


def _differing(value: object, _environment: Environment) -> object:
    return value


DEAD = 2**22 + 5
"""No process has such a number."""


@pytest.mark.parametrize("pid", [os.getpid(), DEAD], ids=["alive", "dead"])
def test_what_a_live_session_saved_or_began_with_stays(pid: int) -> None:
    with trained(1, 2) as (place, _):
        with at(place, somewhere(pid=pid)) as trainer:
            run = trainer.run(TRAIN)
            run.restore({"model": run[2].load()["model"]}, strict=False)
            run.save(3, make_state(3)).result()  # session 2 begins with step 2
            run.forget(3)  # that very process knows what it does
            run.undelete(3)
        with at(place, somewhere(pid=1)) as store:
            if pid == DEAD:
                store.forget_run(TRAIN)
                return
            refused(store, 3, f"the training of process {pid} on .*, session 2")
            refused(store, 2, "session 2")
            store.run(TRAIN).forget(1)


def test_a_training_on_another_host_counts_for_as_long_as_it_may_be_heard_of() -> None:
    with trained(1) as (place, _):
        for minutes, is_live in ((14, True), (16, False)):
            now = quiet().now() + minutes * 60
            elsewhere = somewhere(host="login", boot_id="b")
            environment = dataclasses.replace(elsewhere, now=functools.partial(float, now))
            with store_over(place, environment) as store:
                if is_live:
                    refused(store, 1, "session 1")
                else:
                    store.run(TRAIN).forget(1)


# --- tiers ----------------------------------------------------------------------------------------


def both(hot: MemoryBackend, cold: MemoryBackend) -> None:
    with contextlib.closing(opened(hot, cold)) as store:
        with store.run(TRAIN) as run:
            for step in (1, 2):
                run.save(step, make_state(step)).result()
        replicate(store)


def test_every_tier_that_has_it_is_told() -> None:
    with places() as (hot, cold):
        both(hot, cold)
        with contextlib.closing(opened(hot, cold)) as store:
            # Each tier's own rounds write notes there: its numbers may be ahead.
            for tier in store.tiers[1:] * 3:
                found = store.run(TRAIN)[1]
                notes.add_note(tier, TRAIN, RUN_KEY, found.id, "forgotten", {"forgotten": False})
            store.run(TRAIN).forget(1)
        for place in (hot, cold):
            with contextlib.closing(alone(place)) as one:
                assert states(one) == {1: "doomed", 2: "ok"}
        with contextlib.closing(opened(hot, cold)) as store:
            store.run(TRAIN).undelete(1)
        for place in (hot, cold):
            with contextlib.closing(alone(place)) as one:
                assert states(one) == {1: "ok", 2: "ok"}


def test_a_tier_that_cannot_be_told_fails_the_call() -> None:
    with places() as (hot, cold):
        both(hot, cold)
        away = FaultBackend(cold, [])
        with contextlib.closing(opened(hot, away)) as store:
            _ = store.run(TRAIN).checkpoints()
            away.script.append(Fault("error", op="put", times=None))
            with pytest.raises(BackendError):
                store.run(TRAIN).forget(1)


def test_what_is_doomed_in_one_tier_is_undeleted_in_the_other(caplog: pytest.LogCaptureFixture) -> None:
    with places() as (hot, cold):
        both(hot, cold)
        with contextlib.closing(opened(hot, cold)) as store:
            store.run(TRAIN).forget(1)
            attempt = next(copy for copy in store.run(TRAIN)[1].copies if copy.tier.name == "hot").attempt
            assert gc(hot, (RUN_KEY, attempt)).collected
            assert ends_as(hot, (RUN_KEY, attempt)) == "gone"
            assert store.run(TRAIN).undelete(1).state == "ok"
            assert store.run(TRAIN)[1].tier.name == "cold"
            doomed = store.run(TRAIN)[2]
            store.run(TRAIN).forget(2)
            pin = next((copy.run_key, copy.attempt) for copy in doomed.copies if copy.tier.name == "cold")
            doom = seal("doom", {"reason": "", "at": 0.0, "author": ""})
            store.tiers[1].put_new(layout.doom_key(*pin), doom)
            assert store.run(TRAIN).undelete(2).state == "ok"
            assert "step 2 is being deleted in tier cold already" in caplog.text
