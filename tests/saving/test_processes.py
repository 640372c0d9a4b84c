"""What a training with many saves holds: memory, threads, descriptors; forks and forgotten runs."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

import ckptstore
from ckptstore.save.lane import Lane
from tests.saving._process import run_script, steps_of
from tests.saving.made import PATIENCE, training


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=64 << 10).close()
    return tmp_path / "store"


def test_two_hundred_saves_take_no_more_memory_threads_or_descriptors_than_twenty(directory):
    done = run_script(
        directory,
        """
        import gc
        def resident():
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        def held():
            return (
                resident(), run._arena.allocated_bytes, threading.active_count(),
                len(os.listdir("/proc/self/fd")), len(list(store.tier.backend.list("intents/"))),
            )
        state = {"model": {f"w{i}": np.zeros(40_000, np.float32) for i in range(50)}}  # 8 MB
        for step in range(1, 201):
            for i in range(0, 50, 7):  # a seventh changes
                state["model"][f"w{i}"] += 1
            run.save(step, state)
            if step in (20, 200):
                run.wait()
                print(*held())
        """,
    )
    assert done.returncode == 0, done.stderr
    early, late = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert late[0] <= early[0] + (6 << 20), "the process grows"
    assert late[1:] == early[1:]


def test_a_run_that_is_let_go_finishes_its_saves_and_is_gone():
    with training() as train:
        go = train.hold("commits/*")
        run = train.store.run("forgotten")
        pending = run.save(1, {"model": {"w": [1]}})
        gone = weakref.ref(run)
        del run
        gc.collect()
        go.set()
        assert pending.result().step == 1
        lane = next(thread for thread in threading.enumerate() if thread.name == "ckptstore forgotten")
        del pending
        # The thread is about to let go of the run, or waits for work without it.
        for _ in range(1000):
            gc.collect()
            if gone() is None:
                break
            lane.join(0.01)
        assert gone() is None


def test_a_thread_that_has_nothing_to_do_ends_and_the_next_save_has_another(monkeypatch):
    monkeypatch.setattr("ckptstore.save.lane._IDLE_SECONDS", 0.01)
    with training() as train:
        for step in (1, 2):
            train.save(step).result()
            for thread in threading.enumerate():
                if thread.name == "ckptstore train":
                    thread.join(PATIENCE)
                    assert not thread.is_alive()
        assert train.check() == [1, 2]


def test_a_lane_goes_on_after_a_job_that_raises(caplog):
    lane = Lane("a lane")
    done = threading.Event()
    lane.submit(lambda: 1 / 0)
    lane.submit(done.set)
    assert done.wait(PATIENCE)
    assert lane.wait_below(1, PATIENCE)
    assert "a lane: a job failed" in caplog.text


@pytest.mark.parametrize("key", ["intents/*", "chunks/*", "commits/*"])
def test_a_child_forked_during_a_save_saves_by_itself(directory, key):
    done = run_script(
        directory,
        f"""
        go, there = threading.Event(), threading.Event()
        backend.script.append(Fault("hang", op="put", key="{key}", event=go))
        run.save(1, state_of(1))
        run.save(2, state_of(2))
        while not any(call.op == "put" and call.key.startswith("{key[:-1]}") for call in backend.log):
            time.sleep(0.001)
        child = os.fork()
        if not child:
            import faulthandler
            faulthandler.dump_traceback_later(20, exit=True)
            try:
                backend.script.clear()
                backend._lock = threading.Lock()  # the tests' own backend knows nothing of forks
                own = store.run("child")
                assert own.save(1, state_of(1)).result().step == 1
                assert run.wait(0)
                assert own.restore(state_of(0)) == 1
                own.close()
                run.close()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        go.set()
        run.close()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(directory) == [1, 2]
    with ckptstore.open(directory) as store:
        assert [checkpoint.step for checkpoint in store.run("child").checkpoints()] == [1]


def test_a_child_that_saves_to_the_run_takes_it_over(directory):
    done = run_script(
        directory,
        """
        run.save(1, state_of(1)).result()
        child = os.fork()
        if not child:
            try:
                made = run.save(2, state_of(2)).result()
                assert made.record.epoch == 2, made.record
                assert made.record.parents == (run[1].id,)
                run.close()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        try:
            run.save(3, state_of(3)).result()
        except ckptstore.errors.SessionSupersededError:
            print("superseded")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "superseded\n"
    assert steps_of(directory) == [1, 2]
