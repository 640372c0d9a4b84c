"""Holding off Python's collector, and where that keeps it from looking at everything in vain."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

import ckptstore
from ckptstore import cycles


@pytest.fixture(autouse=True)
def collecting():
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_inside_and_back_after_an_error():
    with pytest.raises(ValueError, match="made to"), cycles.held_off():
        assert not gc.isenabled()
        raise ValueError("made to")
    assert gc.isenabled()


def test_one_inside_another_changes_nothing():
    with cycles.held_off():
        with cycles.held_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_program_that_has_it_off_keeps_it_off():
    gc.disable()
    with cycles.held_off():
        pass
    assert not gc.isenabled()


def test_of_two_threads_the_last_one_brings_it_back():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with cycles.held_off():
            inside.set()
            assert leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(20)
        with cycles.held_off():
            pass
        assert not gc.isenabled()
    finally:
        leave.set()
        thread.join()
    assert gc.isenabled()


def test_a_child_of_a_fork_has_it_on():
    """The thread that held it off is not there to bring it back."""
    with cycles.held_off():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(status) == 0
    assert gc.isenabled()


@pytest.fixture
def collections():
    """The generations that Python collects by itself, as they happen."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_many_tensors_are_saved_and_restored_with_few_collections(tmp_path, collections):
    """Without holding it off there were some 200 in a first save, and 300 in a restore."""
    state = {"m": {f"t{n:05}": np.full(16, n, np.float32) for n in range(10_000)}}
    with ckptstore.init(tmp_path / "store") as store, store.run("r") as run:
        gc.collect()
        collections.clear()
        pending = run.save(1, state)
        in_save = len(collections)
        checkpoint = pending.result()
        collections.clear()
        checkpoint.restore({"m": {name: np.zeros_like(array) for name, array in state["m"].items()}})
        in_restore = len(collections)
    assert in_save < 60
    assert in_restore < 60
