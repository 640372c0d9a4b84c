"""A process that ends with saves under way: it finishes them, or fails loudly (cases.md C089, C019, C046)."""

from __future__ import annotations

import pytest

import ckptstore
from tests.saving._process import run_script, steps_of


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=64 << 10).close()
    return tmp_path / "store"


SLOWLY = """
    go = threading.Event()
    backend.script.append(Fault("hang", op="put", key="commits/*", event=go))
    for step in (1, 2):
        run.save(step, state_of(step))
    threading.Timer(0.3, go.set).start()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("raise ZeroDivisionError('of the training')", 1),
    ],
)
def test_c089_whoever_ends_with_saves_under_way_finishes_them(directory, end, code):
    done = run_script(directory, f"{SLOWLY}\n    {end}")
    assert done.returncode == code, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)
    assert steps_of(directory) == [1, 2]


def test_c089_c019_who_ends_without_a_word_leaves_the_older_ones(directory):
    done = run_script(
        directory,
        """
        run.save(1, state_of(1)).result()
        began, go = threading.Event(), threading.Event()
        backend.script.append(Fault("hang", op="put", key="commits/*", event=go))
        run.save(2, state_of(2))
        assert not run.wait(0.2)
        assert run.latest.step == 1
        os._exit(5)
        """,
    )
    assert done.returncode == 5, done.stderr
    assert steps_of(directory) == [1]
    with ckptstore.open(directory) as store:
        assert store.run("train").restore({"model": {}, "steps": [0]}, strict=False) == 1


def test_c089_a_save_that_does_not_end_is_waited_for_so_long_and_then_lost_loudly(directory):
    done = run_script(
        directory,
        """
        lane.EXIT_SECONDS = 0.3
        run.save(1, state_of(1)).result()
        run.save(2, state_of(2)).result()
        go = threading.Event()
        backend.script.append(Fault("hang", op="put", key="commits/*", event=go, times=None))
        run = store.run("train")  # its lane has the shorter time
        run.save(3, state_of(3))
        print("not flushed yet", end="")
        """,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == "not flushed yet"
    assert "the process ends with 1 saves not done after 0.3" in done.stderr
    assert "they are lost, and older checkpoints are untouched" in done.stderr
    assert steps_of(directory) == [1, 2]


def test_c089_a_save_that_fails_while_the_process_ends_is_told_by_its_exit_code(directory):
    done = run_script(
        directory,
        """
        import atexit
        go = threading.Event()
        backend.script.append(Fault("hang", op="put", key="intents/*", event=go))
        backend.script.append(Fault("error", op="put", key="commits/*", error=FULL))
        run.save(1, state_of(1))
        run.save(2, state_of(2))
        threading.Timer(0.2, go.set).start()
        atexit.unregister(lane._finish_all)
        # What was registered before is called later.
        atexit.register(print, "all others were called, too", end="")
        atexit.register(lane._finish_all)
        """,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == "all others were called, too"
    assert "nobody was told: <PendingSave 'train' step 1: failed>" in done.stderr
    assert steps_of(directory) == [2]


def test_a_failure_before_the_end_that_nobody_was_told_of_counts_and_one_that_was_told_does_not(directory):
    script = """
        backend.script.append(Fault("error", op="put", key="commits/*", error=FULL))
        pending = run.save(1, state_of(1))
        run.wait()
        run = None  # whoever lets go of the run does not let go of its failure
        import gc; gc.collect()
        """
    done = run_script(directory, script)
    assert done.returncode == 1, done.stderr
    assert "nobody was told: <PendingSave 'train' step 1: failed>" in done.stderr
    told = """
        try:
            pending.result()
        except ckptstore.errors.SaveFailedError:
            pass
        """
    done = run_script(directory, script + told)
    assert done.returncode == 0, done.stderr
    warned = """
        run = store.run("train", on_error="warn")
        backend.script.append(Fault("error", op="put", key="commits/*", error=FULL))
        run.save(1, state_of(1))
        """
    done = run_script(directory, warned)
    assert done.returncode == 0, done.stderr
    assert "the disk is full" in done.stderr


def test_a_save_made_while_the_process_ends_is_finished(directory):
    done = run_script(
        directory,
        """
        import atexit
        run.save(1, state_of(1))
        atexit.register(lambda: run.save(2, state_of(2)))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(directory) == [1, 2]


@pytest.mark.parametrize(
    ("fault", "code", "steps"), [("", 0, [1, 2]), ("backend.script.append(full)", 1, [2])]
)
def test_a_child_of_multiprocessing_finishes_its_saves(directory, fault, code, steps):
    done = run_script(
        directory,
        f"""
        import multiprocessing
        full = Fault("error", op="put", key="commits/*", error=FULL)
        go = threading.Event()
        backend.script.append(Fault("hang", op="put", key="intents/*", event=go))
        {fault}
        def train():
            run.save(1, state_of(1))
            run.save(2, state_of(2))
            threading.Timer(0.2, go.set).start()
        child = multiprocessing.get_context("fork").Process(target=train)
        child.start()
        child.join()
        sys.exit(child.exitcode)
        """,
    )
    assert done.returncode == code, done.stderr
    assert steps_of(directory) == steps
