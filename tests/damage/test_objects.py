"""Chunks, packs and tables that are not what was written."""

from __future__ import annotations

import contextlib
import logging

import pytest

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    BackendError,
    ChunkDamagedError,
    DamageError,
    NothingRestorableError,
    PartlyRestoredError,
    SaveFailedError,
    StateMismatchError,
)
from tests.crash._support import TRAIN, blank_like, make_state, same
from tests.damage._support import SPOILERS, STEPS, flip, make_store, open_quiet, own_files


@pytest.fixture
def directory(tmp_path):
    make_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("kind", ["chunk", "pack", "table"])
def test_a_spoiled_object_is_named_and_the_other_checkpoints_load(directory, kind, spoiler, caplog):
    with open_quiet(directory) as store:
        victim = own_files(store, directory, 3)[kind][0]
    SPOILERS[spoiler](victim)
    key = str(victim.relative_to(directory))
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        with pytest.raises(ChunkDamagedError) as caught:
            run[3].load()
        assert caught.value.key == key
        assert TRAIN in str(caught.value)
        assert "step 3" in str(caught.value)
        assert key in str(caught.value) or kind == "table"
        assert caught.value.hint
        for step in (1, 2):
            assert same(run[step].load(), make_state(step))
        state = blank_like(make_state(0))
        with pytest.raises((ChunkDamagedError, PartlyRestoredError)) as caught:
            run.restore(state)
        assert run.restored is None
        with caplog.at_level(logging.WARNING):
            assert run.restore(state, fallback=True) == 2
        assert same(state, make_state(2))
        assert any("step 3" in line for line in run.restored.passed_over)
        assert any("step 3" in record.getMessage() for record in caplog.records), "the fallback was silent"


@pytest.mark.parametrize("kind", ["chunk", "pack", "table"])
def test_verify_marks_what_is_spoiled_and_it_is_never_latest_again(directory, kind):
    with open_quiet(directory) as store:
        victim = own_files(store, directory, 3)[kind][0]
        flip(victim, 0)
        report = store.verify()
        key = str(victim.relative_to(directory))
        assert {(problem.run, problem.step) for problem in report.problems} == {(TRAIN, 3)}
        assert all(problem.key in (key, "") or key in problem.reason for problem in report.problems)
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        assert run[3].state == "damaged"
        assert run.latest == run[2]
        state = blank_like(make_state(0))
        assert run.restore(state) == 2
        assert same(state, make_state(2))
        assert any("step 3" in line for line in run.restored.passed_over)
        flip(victim, 0)  # the disk came back
        assert not store.verify().problems
        assert run.latest == run[3]


def test_an_object_that_all_share_marks_all_of_them(directory):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        shared = set.intersection(*(set(run[step].contents.keys.keys) for step in STEPS))
        flip(directory / min(key for key in shared if key.startswith("chunks/")), 5)
        assert {problem.step for problem in store.verify().problems} == set(STEPS)
        state = blank_like(make_state(0))
        with pytest.raises(NothingRestorableError) as caught:
            run.restore(state)
        assert "damaged" in str(caught.value)
        assert run.latest is None
        assert run.save(4, make_state(4)).result().step == 4
        assert same(run.latest.load(), make_state(4))


@pytest.mark.parametrize("spoiler", ["truncated", "deleted", "a directory", "a FIFO"])
@pytest.mark.parametrize("kind", ["chunk", "pack", "table"])
def test_a_save_does_not_reuse_what_is_gone_but_writes_it_anew_and_marks_its_owner(directory, kind, spoiler):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        state = blank_like(make_state(0))
        run.restore(state)
        victim = own_files(store, directory, 3)[kind][0]
        SPOILERS[spoiler](victim)
        same_state = make_state(3)
        saved = run.save(4, same_state).result()
        assert same(saved.load(), make_state(3))
        assert str(victim.relative_to(directory)) not in saved.contents.object_sizes
        assert not [problem for problem in store.verify(refs=[f"{TRAIN}@4"]).problems if problem.step == 4]
        if kind != "table":
            assert run[3].state == "damaged"


def test_a_fork_of_a_spoiled_checkpoint_is_refused(directory):
    with open_quiet(directory) as store:
        source = store.run(TRAIN)[3]
        own_files(store, directory, 3)["chunk"][0].unlink()
        fork = store.run("fork")
        with pytest.raises((SaveFailedError, DamageError), match="step 3") as caught:
            fork.fork_from(source)
        assert TRAIN in str(caught.value)
        assert fork.latest is None
        assert fork.fork_from(store.run(TRAIN)[2]).step == 2


def test_lazy_reads_of_a_spoiled_tensor_raise_and_its_neighbours_read(directory):
    with open_quiet(directory) as store:
        checkpoint = store.run(TRAIN)[3]
        flip(own_files(store, directory, 3)["chunk"][0], 100)
        broken = []
        for row in range(3):
            try:
                got = checkpoint.tensors["model.hot"][row : row + 1]
            except ChunkDamagedError as error:
                broken.append((row, "model.hot" in str(error)))
            else:
                assert got.tobytes() == make_state(3)["model"]["hot"][row : row + 1].tobytes()
        assert [named for _, named in broken] == [True]
        assert same(checkpoint.load("optimizer")["optimizer"], make_state(3)["optimizer"])


def test_a_restore_that_fails_half_way_says_that_the_state_is_a_mixture(directory):
    with open_quiet(directory) as store:
        flip(own_files(store, directory, 3)["chunk"][-1], 100)
        state = blank_like(make_state(0))
        with pytest.raises(PartlyRestoredError, match="must not be trained on"):
            store.run(TRAIN)[3].restore(state)


def test_a_fallback_that_does_not_fit_does_not_call_a_mixture_untouched(tmp_path):
    directory = tmp_path / "store"
    make_store(directory)
    with open_quiet(directory) as store:
        run = store.run("grows")
        run.save(1, {"model": {"a": make_state(1)["model"]["hot"]}}).result()
        both = {"model": {"a": make_state(2)["model"]["hot"], "b": make_state(3)["model"]["hot"]}}
        keys = run.save(2, both).result().contents.keys.keys
        first = set(run[1].contents.keys.keys)
        for key in [key for key in keys if key not in first]:
            path = directory / key
            if make_state(3)["model"]["hot"][0].tobytes() == path.read_bytes():
                flip(path, 0)
        state = {"model": {name: array * 0 for name, array in both["model"].items()}}
        try:
            run.restore(state, fallback=True)
        except StateMismatchError:
            assert not any(array.any() for array in state["model"].values()), (
                "changed, and said to be untouched"
            )
        except PartlyRestoredError:
            pass


def test_fallback_takes_the_older_one_when_the_disk_cannot_read_the_newer(directory, monkeypatch):
    import errno
    import os

    import ckptstore_local._sys as calls

    with open_quiet(directory) as store:
        bad = own_files(store, directory, 3)["chunk"][0].stat().st_ino
        original = calls.preadv

        def preadv(fd, buffers, offset):
            if os.fstat(fd).st_ino == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(fd, buffers, offset)

        monkeypatch.setattr(calls, "preadv", preadv)
        state = blank_like(make_state(0))
        with contextlib.suppress(BackendError):
            assert store.run(TRAIN).restore(state, fallback=True) == 2
            return
        pytest.fail("it gave up")


def test_a_fallback_passes_over_several_spoiled_ones_even_after_a_half_filled_one(directory):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        state = make_state(9)
        wanted = state["model"]["hot"][0].copy()
        oldest = run.save(10, state).result()
        for step in (11, 12):
            fresh = make_state(20 + step)
            run.save(step, fresh).result()
            for path in own_files(store, directory, step)["chunk"]:
                flip(path, 0)
        target = blank_like(make_state(0))
        assert store.run(TRAIN).restore(target, fallback=True) == oldest.step
        assert (target["model"]["hot"][0] == wanted).all()


def test_a_fallback_does_not_try_every_old_checkpoint_of_a_storage_that_is_away(directory, monkeypatch):
    import errno
    import os

    import ckptstore_local._sys as calls

    tried = []

    original = calls.preadv

    def preadv(fd, buffers, offset):
        if f"{os.sep}chunks{os.sep}" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset)

    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        for step in range(10, 20):
            run.save(step, make_state(step)).result()
        fill = Checkpoint.fill
        monkeypatch.setattr(
            Checkpoint, "fill", lambda self, *a, **k: tried.append(self.step) or fill(self, *a, **k)
        )
        monkeypatch.setattr(calls, "preadv", preadv)
        with pytest.raises((BackendError, PartlyRestoredError)):
            store.run(TRAIN).restore(blank_like(make_state(0)), fallback=True)
    assert 1 <= len(tried) <= 4
