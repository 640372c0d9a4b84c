"""A save while two are under way: it waits, is left out, or is refused; by one rank's word on all ranks."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.environment import Environment
from ckptstore.errors import BusyError
from ckptstore.model.ids import Attempt
from ckptstore.save.options import OnBusy
from ckptstore.testing import FaultBackend
from ckptstore.tier import layout
from ckptstore_local import LocalBackend
from tests.crash._support import store_over
from tests.saving.made import PATIENCE, is_state_of, state_of, training


def numbers(checkpoints: Any) -> list[int]:
    return [Attempt.parse(checkpoint.record.attempt).number for checkpoint in checkpoints]


def test_c087_a_third_save_waits_until_the_first_has_ended():
    with training() as train:
        go, second = train.hold(), train.hold()
        pendings = [train.save(1), train.save(2)]
        threading.Timer(0.05, go.set).start()
        pendings.append(train.save(3))
        assert [pending.level for pending in pendings] == ["committed", "captured", "captured"]
        second.set()
        train.run.close()
        assert train.check() == [1, 2, 3]


def test_c087_a_third_save_is_left_out_and_counts_as_a_call(caplog):
    with training(on_busy="skip") as train, caplog.at_level(logging.INFO):
        go = train.hold()
        pendings = [train.save(1), train.save(2)]
        skipped = train.save(3)
        assert (skipped.level, skipped.done) == ("skipped", True)
        with pytest.raises(BusyError, match="step 3: 2 saves are under way"):
            skipped.result()
        with pytest.raises(BusyError):
            skipped.wait("captured")
        go.set()
        assert [pending.result().step for pending in pendings] == [1, 2]
        assert train.run.wait(PATIENCE)
        fourth = train.save(4)
        train.run.close()  # that one was left out is nobody's failure
        assert numbers(pending.result() for pending in (*pendings, fourth)) == [1, 2, 4]
        assert train.check() == [1, 2, 4]
        assert "step 3" in caplog.text


def test_c087_a_third_save_is_refused_and_counts_as_a_call():
    with training(on_busy="error") as train:
        go = train.hold()
        pendings = [train.save(1), train.save(2)]
        with pytest.raises(BusyError, match="step 3: 2 saves are under way") as caught:
            train.save(3)
        assert 'on_busy="wait"' in caught.value.hint
        go.set()
        train.run.close()
        fourth = train.save(4)
        assert numbers(pending.result() for pending in (*pendings, fourth)) == [1, 2, 4]
        assert train.check() == [1, 2, 4]


def test_a_synchronous_save_is_never_left_out():
    with training(on_busy="skip") as train:
        go = train.hold()
        train.save(1)
        train.save(2)
        threading.Timer(0.05, go.set).start()
        assert train.save(3, wait=True).level == "committed"
        assert train.check() == [1, 2, 3]


def test_memory_for_one_state_is_busy_with_one_save():
    with training(on_busy="skip", capture_bytes=1 << 20) as train:
        nbytes = {"count": 6}  # of 8 blocks of 128 KiB
        go = train.hold()
        first = train.run.save(1, state_of(1, **nbytes))
        assert train.run.save(2, state_of(2, **nbytes)).level == "skipped"
        go.set()
        assert is_state_of(first.result().load(), 1, **nbytes)


def test_who_waits_for_memory_waits_for_the_save_that_holds_it():
    with training(capture_bytes=1 << 20) as train:
        go = train.hold()
        first = train.run.save(1, state_of(1, count=6))
        threading.Timer(0.05, go.set).start()
        second = train.run.save(2, state_of(2, count=6))
        assert is_state_of(first.result().load(), 1, count=6)
        assert is_state_of(second.result().load(), 2, count=6)


# --- several ranks: torch.distributed with gloo -----------------------------------------------


def _gated(place: str, rank: int, on_busy: OnBusy) -> ckptstore.Run:
    """A run of one rank, whose lane looks at a gate of its own before it begins or ends its part."""

    class Gated(FaultBackend):
        def put(self, key: str, buffers: Any, *, if_absent: bool = False) -> None:
            if key.startswith("parts/") and (layout.stem(key) == "start" or layout.stem(key).isdigit()):
                wait_for(Path(place) / f"go-{rank}")
            super().put(key, buffers, if_absent=if_absent)

    store = store_over(Gated(LocalBackend(Path(place) / "store")), Environment())
    return store.run("train", on_busy=on_busy, deadline_seconds=PATIENCE)


def wait_for(path: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end, f"nobody made {path}"
        time.sleep(0.002)


def _busy_together(rank: int, world: int, place: str, on_busy: OnBusy, slow: int) -> list[Any]:
    """Each rank's levels: rank `slow` is held in its lane from the third save on."""
    import torch.distributed as dist

    run = _gated(place, rank, on_busy)
    folder = Path(place)
    for one in range(world):
        (folder / f"go-{one}").touch()
    for step in (1, 2):  # who writes what is agreed at the first ones, while training waits
        run.save(step, state_of(step)).result()
    dist.barrier()
    (folder / f"go-{slow}").unlink(missing_ok=True)
    dist.barrier()
    pendings = [run.save(step, state_of(step)) for step in (3, 4)]
    if on_busy == "wait" and rank == slow:
        threading.Timer(0.1, (folder / f"go-{slow}").touch).start()
    third: Any
    try:
        third = run.save(5, state_of(5))
    except BusyError as error:
        third = error
    dist.barrier()
    (folder / f"go-{slow}").touch()
    made = [pending.result() for pending in pendings]
    level = third.level if isinstance(third, ckptstore.PendingSave) else type(third).__name__
    run.wait()
    made.append(run.save(6, state_of(6)).result())
    run.close()
    return [level, numbers(made), [checkpoint.id for checkpoint in made]]


@pytest.mark.torch
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize(("on_busy", "level"), [("wait", None), ("skip", "skipped"), ("error", "BusyError")])
def test_c087_all_ranks_leave_out_the_same_although_one_is_slower(tmp_path, rank_pool, on_busy, level, slow):
    ckptstore.init(tmp_path / "store", chunk_bytes=64 << 10).close()
    answers = rank_pool.run(_busy_together, str(tmp_path), on_busy, slow, world=2)
    first, second = answers
    assert first[1:] == second[1:]
    assert first[1] == [3, 4, 6]
    # With "wait" a rank may have seen the end of the fifth already.
    assert {answer[0] for answer in answers} <= ({level} if level else {"captured", "committed"})
    with ckptstore.open(tmp_path / "store") as store:
        steps = [checkpoint.step for checkpoint in store.run("train").checkpoints()]
        assert steps == ([1, 2, 3, 4, 5, 6] if level is None else [1, 2, 3, 4, 6])
        for step in steps:
            assert is_state_of(store.run("train")[step].load(), step)
