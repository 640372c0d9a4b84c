"""Half-written checkpoints, kills in the middle, the order of commits."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import ckptstore
import ckptstore_local._sys as calls
from ckptstore.errors import (
    ChunkDamagedError,
    CkptstoreError,
    NotFoundError,
    SaveFailedError,
    StateMismatchError,
)
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier.intents import list_intents
from ckptstore_local import LocalBackend
from tests.crash._support import (
    CHUNK_BYTES,
    TRAIN,
    blank_like,
    make_place,
    make_state,
    memory_place,
    quiet,
    same,
    store_over,
)
from tests.ranks import _plain_ranks as plain

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES).close()
    return tmp_path / "store"


def killed_while_saving(
    directory: Path, step: int, state, *, key: str = "commits/*", restore: bool = True
) -> None:
    """A process that restores, begins to save, and dies before it puts `key`."""
    backend = FaultBackend(LocalBackend(directory))
    with contextlib.closing(store_over(backend)) as store:
        run = store.run(TRAIN)
        if restore:
            run.restore(blank_like(make_state(0)))
        backend.script.append(Fault("crash", op="put", key=key))
        with pytest.raises(SimulatedCrash):
            run.save(step, state).result()


def test_c001_a_step_that_died_before_its_record_is_never_listed(directory):
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        for step in (10, 20):
            run.save(step, make_state(step)).result()
    killed_while_saving(directory, 30, make_state(30))
    assert any("-30-" in path.name for path in directory.glob("chunks/*/*")), "it had written its chunks"
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        assert run.latest.step == 20
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [10, 20]
        assert 30 not in run
        state = blank_like(make_state(0))
        assert run.restore(state) == 20
        assert same(state, make_state(20))
        assert [doc.attempt.split("-")[1] for doc in list_intents(store.tier)] == ["30"], (
            "gc is told whose it was"
        )


def test_c002_an_unreadable_newest_is_named_and_fallback_says_what_it_passed_over(directory, caplog):
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        for step in (10, 20):
            run.save(step, make_state(step)).result()
        mine = set(run[20].contents.keys.keys) - set(run[10].contents.keys.keys)
        victim = directory / min(key for key in mine if key.startswith("chunks/"))
        victim.unlink()
        with pytest.raises(ChunkDamagedError, match="step 20") as caught:
            run[20].load()
        assert caught.value.key == str(victim.relative_to(directory))
        with pytest.raises(CkptstoreError, match="step 20"):
            run.restore(blank_like(make_state(0)))
        state = blank_like(make_state(0))
        with caplog.at_level(logging.WARNING):
            assert run.restore(state, fallback=True) == 10
        assert same(state, make_state(10))
        assert "step 20" in caplog.text
        assert "step 20" in run.restored.passed_over[0]


def test_c006_the_step_of_an_interrupted_save_is_saved_again_over_its_leftovers(directory):
    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(20, make_state(20)).result()
    for _ in range(2):
        killed_while_saving(directory, 30, make_state(30))
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        assert run.restore(blank_like(make_state(0))) == 20
        assert run.save(30, make_state(30)).result() == run.latest
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [20, 30]
        assert same(run[30].load(), make_state(30))


def test_c006_on_four_ranks_all_hear_of_the_one_that_died_and_the_step_is_saved_again(monkeypatch):
    """Ranks on a clock of their own: see tests/ranks/test_points.py for every point at which one can die."""
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    with plain.crew(world=4) as ranks:
        ranks.each(lambda rank: rank.save(20))
        ranks[2].points.script.append(Fault("crash", op="put", key="parts/*"))
        for rank in ranks.try_each(lambda rank: rank.save(30)):
            assert rank.seconds <= 1.3 * plain.DEADLINE
            if not rank.is_dead:
                assert isinstance(rank.error, SaveFailedError)
                assert "rank 2" in str(rank.error)
        with plain.crew(ranks.place, world=4) as restarted:
            assert restarted.each(lambda rank: rank.restore()[0]) == [20] * 4
            assert len({made.id for made in restarted.each(lambda rank: rank.save(30))}) == 1
        assert plain.check_place(ranks.place) == [20, 30]


def test_c007_a_part_that_is_missing_is_an_error_not_a_warning(directory):
    """A checkpoint is one record over all components: there is no separate part that could be late."""
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        run.save(1, {"model": {"w": np.ones(3)}, "optimizer": {"m": np.ones(3)}}).result()
        whole = {
            "model": {"w": np.zeros(3)},
            "optimizer": {"m": np.zeros(3)},
            "loader": {"seen": np.zeros(1)},
        }
        with pytest.raises(StateMismatchError, match=r"loader\.seen") as caught:
            run.restore(whole)
        assert caught.value.problems == ("missing in the checkpoint: loader.seen",)
        assert not whole["model"]["w"].any(), "half of it was loaded"


@pytest.mark.parametrize("moment", ["put", "get", "sync", "manifest"])
def test_c009_a_signal_handler_that_saves_in_the_middle_of_a_save_does_not_hang(directory, moment):
    """In a process of its own, so that a deadlock is a failed test."""
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        import ckptstore
        from ckptstore.manifest import Manifest
        from tests.crash._support import *
        moment = {moment!r}
        store = ckptstore.open({str(directory)!r})
        run = store.run(TRAIN)
        run.save(1, make_state(1)).result()
        told = []

        def handler(number, frame):
            try:
                told.append(run.save(100 + len(told), make_state(7)).result().step)
            except ckptstore.CkptstoreError as error:
                told.append(error.kind)

        signal.signal(signal.SIGTERM, handler)
        inner = store.tier.backend.inner
        armed = [1, 2, 3]  # the second and third come while the handler saves

        def raising(original):
            def call(*args, **kwargs):
                if armed:
                    armed.pop()
                    signal.raise_signal(signal.SIGTERM)
                return original(*args, **kwargs)
            return call

        if moment == "manifest":
            Manifest.put_record = raising(Manifest.put_record)
        else:
            setattr(inner, moment, raising(getattr(inner, moment)))
        signal.alarm(30)  # a deadlock ends the process
        try:
            made = run.save(2, make_state(2)).result()
            assert same(made.load(), make_state(2))
        except ckptstore.CkptstoreError as error:
            print(error.kind)
        armed.clear()
        assert told, "the signal was not raised"
        final = run.save(3, make_state(3)).result()
        assert same(final.load(), make_state(3))
        for checkpoint in run.checkpoints():
            checkpoint.load()
        assert not store.verify().problems
        store.close()
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr[-3000:]}"


def test_c011_saving_a_step_again_and_dying_half_way_leaves_exactly_the_first(directory):
    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(20, make_state(20)).result()
    for key in ("chunks/*", "packs/*", "commits/*"):
        killed_while_saving(directory, 20, make_state(20, 1), key=key, restore=False)
        with ckptstore.open(directory) as store:
            assert same(store.run(TRAIN)[20].load(), make_state(20))
    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(20, make_state(20, 1)).result()
        assert same(store.run(TRAIN)[20].load(), make_state(20, 1))


def test_c011_on_four_ranks_saving_a_step_again_and_dying_half_way_leaves_exactly_the_first(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    with plain.crew(world=4) as ranks:
        first = ranks.each(lambda rank: rank.save(20))[0]
        ranks[0].points.script.append(Fault("crash", op="put", key="commits/*"))
        ranks.try_each(lambda rank: rank.run.save(20, rank.state(99)).result())
        assert ranks[0].is_dead
        with plain.crew(ranks.place, world=4) as restarted:
            found = restarted.each(lambda rank: rank.restore())
            assert all(step == 20 and plain.holds(state, 20, n, 4) for n, (step, state) in enumerate(found))
            assert [checkpoint.id for checkpoint in restarted[1].run.checkpoints()] == [first.id]


@pytest.mark.parametrize("step", ["copied half", "copied", "before"])
def test_c014_a_rename_that_is_a_copy_and_a_delete_can_be_killed_inside(directory, monkeypatch, step):
    """No directory is ever renamed; a rename that stops half way shows no half object under a used key."""

    class Killed(BaseException):
        pass

    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(1, make_state(1)).result()
    alive = [True]

    def rename(source, target):
        if not os.path.isfile(source):
            raise AssertionError("a directory is renamed")
        if not alive:
            raise Killed
        if step != "before":
            data = Path(source).read_bytes()
            Path(target).write_bytes(data[: len(data) // 2] if step == "copied half" else data)
        alive.clear()
        raise Killed

    def dead(*_args, **_kwargs):
        if not alive:
            raise Killed
        return original_unlink(*_args, **_kwargs)

    original_unlink = calls.unlink
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        run.restore(blank_like(make_state(0)))
        with monkeypatch.context() as patch:
            patch.setattr(calls, "rename", rename)
            patch.setattr(calls, "unlink", dead)
            patch.setattr(
                calls, "link", lambda *a: (_ for _ in ()).throw(Killed()) if not alive else os.link(*a)
            )
            with pytest.raises(Killed):
                run.save(2, make_state(2)).result()
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [1]
        assert run.restore(blank_like(make_state(0))) == 1
        assert same(run.save(2, make_state(2)).result().load(), make_state(2))
        assert not store.verify().problems


def test_c016_a_run_without_a_checkpoint_answers_cleanly(directory):
    killed_while_saving(directory, 1, make_state(1), restore=False)
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        assert run.exists
        assert run.latest is None
        assert run.checkpoints() == []
        assert run.best("loss", "min") is None
        assert run.restore(blank_like(make_state(0))) is None
        assert [row.run for row in store.runs()] == [TRAIN]
        with pytest.raises(NotFoundError, match="no checkpoints yet"):
            run.find("latest")
        with pytest.raises(NotFoundError):
            run[1]


def test_c017_a_chunk_that_was_not_written_is_an_error_never_zeros(directory, monkeypatch):
    with ckptstore.open(directory, environment=quiet()) as store:
        run = store.run(TRAIN)
        run.save(1, make_state(1)).result()
        original = calls.pwrite
        with monkeypatch.context() as patch:

            def pwrite(fd, view, offset):
                if len(view) >= CHUNK_BYTES:
                    raise OSError(27, "File too large")
                return original(fd, view, offset)

            patch.setattr(calls, "pwrite", pwrite)
            with pytest.raises(CkptstoreError, match="step 2"):
                run.save(2, make_state(2)).result()
        assert 2 not in run
        run.save(3, make_state(3)).result()
        mine = set(run[3].contents.keys.keys) - set(run[1].contents.keys.keys)
        victim = directory / min(key for key in mine if key.startswith("chunks/"))
        size = victim.stat().st_size
        for spoil in (lambda: victim.write_bytes(bytes(size)), victim.unlink):
            spoil()
            with pytest.raises(ChunkDamagedError, match="step 3"):
                run[3].load()


@pytest.mark.parametrize("key", ["chunks/*", "packs/*", "commits/*"])
def test_c019_latest_moves_at_the_record_and_not_when_a_save_begins(directory, key):
    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(10, make_state(10)).result()
    killed_while_saving(directory, 20, make_state(20), key=key)
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        assert run.latest.step == 10
        assert same(run.latest.load(), make_state(10))


def test_an_error_that_save_itself_raised_is_not_raised_again_by_the_next(directory, monkeypatch):
    """An interrupt, for instance: its handler has seen it already."""
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        with monkeypatch.context() as patch:
            patch.setattr("ckptstore.save.write.Writer.write", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                run.save(1, make_state(1)).result()
        assert run.save(2, make_state(2)).result().step == 2
        run.close()


def _interrupted(*_args):
    raise KeyboardInterrupt


def test_leftovers_of_many_dead_processes_are_never_in_the_way(directory):
    for step in range(1, 6):
        killed_while_saving(directory, step, make_state(step), restore=False)
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        assert run.restore(blank_like(make_state(0))) is None
        assert run.save(1, make_state(1)).result() == run.latest
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [1]


@pytest.mark.parametrize(
    "dies", [Fault("crash", op="put", key="dooms/*"), Fault("crash_after", op="put", key="commits/*")]
)
def test_c004_killed_before_the_old_one_was_dropped_the_newest_counts_and_the_next_round_drops_it(dies):
    with memory_place() as place:
        make_place(place)
        with contextlib.closing(store_over(place)) as store:
            run = store.run(TRAIN, retention=ckptstore.Keep(last=1), auto_gc=False)
            for step in (10, 20):
                run.save(step, make_state(step)).result()
        dying = store_over(FaultBackend(place, [dies]))
        with contextlib.closing(dying) as store, pytest.raises(SimulatedCrash):
            store.gc()
        place.delete(["gc/lock"])  # this process lives on, so that it would hold
        with contextlib.closing(store_over(place)) as store:
            state = blank_like(make_state(0))
            assert store.run(TRAIN).restore(state) == 20
            assert same(state, make_state(20))
            store.gc()
            assert [checkpoint.step for checkpoint in store.run(TRAIN).checkpoints()] == [20]
            assert not store.verify().problems
