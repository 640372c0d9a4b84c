"""Which checkpoint goes and which stays, through the real thing: a training saves, and somebody collects.

What needs only the decision (C036 and others) is in tests/model/test_retention.py, too.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import Keep, Policy, config
from ckptstore.errors import UsageError
from ckptstore.store import Store
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from ckptstore_memory import MemoryBackend
from tests.crash._support import CHUNK_BYTES, TRAIN, make_place, make_state, memory_place, same, store_over
from tests.gc.made import garbage
from tests.replicate.made import opened, places

LAST = Keep(last=3)


@pytest.fixture
def place() -> Iterator[MemoryBackend]:
    with memory_place() as made:
        make_place(made)
        yield made


def train(
    store: Store,
    steps: Sequence[int],
    retention: Keep | Policy | None = None,
    metrics: Sequence[float | None] = (),
    *,
    run: str = TRAIN,
    name: str = "m",
    collects: bool = False,
) -> None:
    """One session that saves these steps."""
    values = metrics or [None] * len(steps)
    with store.run(run, retention=retention, auto_gc=collects) as training:
        for step, value in zip(steps, values, strict=True):
            given = {} if value is None else {name: value}
            training.save(step, make_state(abs(int(step))), metrics=given).result()


def left(store: Store, run: str = TRAIN) -> list[int]:
    return [checkpoint.step for checkpoint in store.run(run).checkpoints()]


def trained(place: MemoryBackend, *given: Any, **options: Any) -> list[int]:
    """What is left after a session and a round, by another process."""
    with store_over(place) as store:
        train(store, *given, **options)
    with store_over(place) as store:
        store.gc()
        assert not garbage(place)
        return left(store, options.get("run", TRAIN))


def why(store: Store, run: str = TRAIN, policy: Any = None) -> dict[int, str]:
    """Step -> what would become of it, and why."""
    (report,) = store.try_policy(policy, run=run)
    return {fate.step: f"{fate.outcome}: {'; '.join(fate.reasons)}" for fate in report.fates}


def test_c021_times_of_files_decide_nothing(tmp_path: Path) -> None:
    with ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as store:
        train(store, [200, 400, 600, 800, 1000], LAST)
        times = random.Random(7)
        for path in (tmp_path / "store").rglob("*"):
            if not path.is_dir():
                at = times.randrange(1_500_000_000, 1_900_000_000)
                os.utime(path, (at, at))
        store.gc()
        assert left(store) == [600, 800, 1000]


def test_c022_the_newest_is_among_the_last(place: MemoryBackend) -> None:
    steps = list(range(9000, 10001, 100))
    assert trained(place, steps, Keep(last=10)) == steps[1:]


def test_c024_steps_are_numbers_and_no_text(place: MemoryBackend) -> None:
    with store_over(place) as store:
        train(store, [2048000, 1024000000])
        assert store.run(TRAIN).latest is not None
        assert store.run(TRAIN).find("latest").step == 1024000000
    assert trained(place, [], Keep(last=1)) == [2048000, 1024000000]  # nothing was saved: no session
    assert trained(place, [3000000000], Keep(last=2)) == [1024000000, 3000000000]


@pytest.mark.parametrize(("last", "stays"), [(3, [600, 700, 100]), (1, [100])])
def test_c026_what_was_saved_last_is_last_whatever_its_step(
    place: MemoryBackend, last: int, stays: list[int]
) -> None:
    with store_over(place) as store:
        train(store, [500, 600, 700])
    with store_over(place) as store:  # an old directory, a new training: each of its saves collects
        train(store, [100], Keep(last=last), collects=True)
        assert left(store) == stays


def test_c027_c029_the_best_and_the_newest_stay_exactly(place: MemoryBackend) -> None:
    keep = Keep(last=2) | Keep.best(1, "m", "min")
    assert trained(place, [1, 2, 3, 4, 5], keep, [0.1, 0.5, 0.4, 0.3, 0.2]) == [1, 4, 5]
    keep = Keep(last=2) | Keep.best(1, "acc", "max")
    found = trained(place, [1, 2, 3, 4], keep, [0.9, 0.5, 0.4, 0.3], run="other", name="acc")
    assert found == [1, 3, 4]


def test_c031_latest_and_best_are_two_names(place: MemoryBackend) -> None:
    keep = Keep(last=1) | Keep.best(1, "m", "min")
    assert trained(place, [10, 20, 30], keep, [0.1, 0.5, 0.4]) == [10, 30]
    with store_over(place) as store:
        for _ in range(2):  # asking for one does not change what the other is
            assert store.run(TRAIN).find("min:m").step == 10
            assert store.run(TRAIN).find("latest").step == 30


def test_c032_nan_never_wins_and_spoils_nothing_after_it(place: MemoryBackend) -> None:
    nan = float("nan")
    assert trained(place, [1, 2, 3, 4], Keep.best(1, "m", "min"), [0.5, nan, 0.4, 0.45]) == [3, 4]
    found = trained(place, [1, 2, 3], Keep(last=2) | Keep.best(1, "m", "max"), [0.5, nan, 0.4], run="b")
    assert found == [1, 2, 3]


def test_c034_three_ways_to_say_min_come_to_the_same(place: MemoryBackend, tmp_path: Path) -> None:
    path = tmp_path / "ckptstore.toml"
    text = '[[tiers]]\nurl = "memory://x"\n[retention]\nbest = [{n = 1, metric = "m"%s}]\n'
    path.write_text(text % ', mode = "min"')
    with store_over(place) as store:
        train(store, [1, 2, 3, 4], None, [0.3, 0.1, 0.5, 0.4])
        by_file = Store(config.resolve(path), store.tier).try_policy()
        by_code = store.try_policy(Keep.best(1, "m", "min"))
        assert [fate.outcome for fate in by_file[0].fates] == ["delete", "keep", "delete", "keep"]
        assert by_file[0].fates == by_code[0].fates
    path.write_text(text % "")
    with pytest.raises(UsageError, match="mode is missing"):
        config.resolve(path)
    best: Any = Keep.best
    with pytest.raises(TypeError, match="mode"):
        best(1, "m")
    # The command is called in tests/retention/test_commands.py.


def test_c036_ties_go_to_the_newer(place: MemoryBackend) -> None:
    keep = Keep.best(1, "m", "max")
    assert trained(place, [1, 2, 3, 4], keep, [1.0, 1.0, 1.0, 0.0]) == [3, 4]
    keep = Keep.best(2, "m", "max")
    assert trained(place, [1, 2, 3, 4], keep, [1.0, 1.0, 1.0, 0.0], run="two") == [2, 3, 4]


def test_c037_what_is_best_is_known_without_a_policy(place: MemoryBackend) -> None:
    with store_over(place) as store:
        train(store, [1, 2, 3], None, [0.5, 0.1, 0.3])
        best = store.run(TRAIN).best("m", "min")
        assert best is not None
        assert best.step == 2
        (report,) = store.gc()
        assert (report.runs, report.runs_with_policy, report.collected) == (1, 0, ())
        assert left(store) == [1, 2, 3]


def test_c039_a_save_without_the_metric_is_told_of_and_kept(place: MemoryBackend, caplog: Any) -> None:
    with store_over(place) as store:
        train(store, [1, 2], Keep.best(1, "val_loss", "min"), [0.5, 0.4], name="loss")
        store.gc()
        assert left(store) == [1, 2]
        assert "awaiting val_loss" in why(store)[1]
    said = [text for text in caplog.messages if "no metric 'val_loss'" in text]
    assert len(said) == 1  # once
    assert "step 1 has no metric 'val_loss', by which retention keeps the best: it has loss" in said[0]
    with store_over(place) as store:
        store.run(TRAIN).annotate(1, metrics={"val_loss": 3.0})
        store.run(TRAIN).annotate(2, metrics={"val_loss": 2.0})
        store.gc()
        assert left(store) == [2]


def test_c041_the_newest_stays_under_a_best_rule(place: MemoryBackend) -> None:
    keep = Keep.best(3, "m", "min")
    found = trained(place, [100, 200, 300, 400, 500], keep, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert found == [100, 200, 300, 500]


def test_c042_rules_take_nothing_from_each_other(place: MemoryBackend) -> None:
    keep = Keep.best(1, "a", "max") | Keep.best(1, "b", "min") | Keep(last=1)
    metrics: Sequence[Mapping[str, float]] = (
        {"a": 9, "b": 9},
        {"a": 5, "b": 5},
        {"a": 1, "b": 1},
        {"a": 2, "b": 2},
    )
    with store_over(place) as store, store.run(TRAIN, retention=keep) as run:
        for step, values in enumerate(metrics, 1):
            run.save(step, make_state(step), metrics=values).result()
    with store_over(place) as store:
        assert left(store) == [1, 3, 4]


_RESUME = """
    import sys, numpy as np, ckptstore
    where, step = sys.argv[1], int(sys.argv[2])
    with ckptstore.open(where) as store, store.run("r", retention=ckptstore.Keep(last=1)) as run:
        state = {"model": {"w": np.zeros(100)}}
        found = run.restore(state)
        assert found == (step - 1 or None), found
        run.save(step, {"model": {"w": np.full(100, float(step))}})
"""


def test_c044_keep_one_holds_over_restarts(tmp_path: Path) -> None:
    where = tmp_path / "store"
    ckptstore.init(where).close()
    for step in (1, 2, 3):
        command = [sys.executable, "-c", textwrap.dedent(_RESUME), str(where), str(step)]
        subprocess.run(command, check=True, timeout=100)
        with ckptstore.open(where) as store:
            assert left(store, "r") == [step]


@pytest.mark.parametrize("ends", ["crash", "commits"])
def test_c046_the_only_durable_one_stays_while_the_next_is_being_written(
    place: MemoryBackend, ends: str
) -> None:
    event = threading.Event()
    slow = FaultBackend(place)
    with contextlib.closing(store_over(slow)) as trainer:
        run = trainer.run(TRAIN, retention=Keep(last=1), auto_gc=False)
        run.save(500, make_state(500)).result()
        slow.script.append(Fault("hang", op="put", key="chunks/*", event=event))
        pending = run.save(1000, make_state(1000))
        with store_over(place) as store:
            for _ in range(2):
                store.gc()
            assert left(store) == [500]
            if ends == "crash":
                slow.script.append(Fault("crash", times=None))
                event.set()
                with pytest.raises(SimulatedCrash):
                    pending.result()
                store.gc()
                assert left(store) == [500]
                assert same(store.run(TRAIN)[500].load(), make_state(500))
                return
            event.set()
            pending.result()
            store.gc()
            assert left(store) == [1000]
            assert same(store.run(TRAIN)[1000].load(), make_state(1000))


def test_c047_only_what_is_committed_counts(place: MemoryBackend) -> None:
    event = threading.Event()
    slow = FaultBackend(place, [Fault("hang", op="put", key="chunks/*-1500-*", event=event)])
    with contextlib.closing(store_over(slow)) as trainer:
        run = trainer.run(TRAIN, retention=Keep(last=1), auto_gc=False)
        first = run.save(1000, make_state(1000))
        second = run.save(1500, make_state(1500))
        first.result()
        with store_over(place) as store:
            store.gc()
            assert left(store) == [1000]
            slow.script.append(Fault("crash", times=None))
            event.set()
            with pytest.raises(SimulatedCrash):
                second.result()
            store.gc()
            assert left(store) == [1000]
            assert same(store.run(TRAIN)[1000].load(), make_state(1000))


def test_c049_what_was_deleted_by_hand_stops_neither_saves_nor_collecting(tmp_path: Path) -> None:
    with ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as store:
        with store.run(TRAIN, retention=Keep(last=2), auto_gc=False) as run:
            run.save(10, make_state(10)).result()
            run.save(20, make_state(20)).result()
            for kind in ("chunks", "packs"):
                for path in (tmp_path / "store").glob(f"{kind}/*/*-20-*"):
                    path.unlink()
            run.save(40, make_state(40)).result()
        assert [report.failures for report in store.gc()] == [()]
        found = store.verify()
        assert {problem.step for problem in found.problems} == {20}
        assert same(store.run(TRAIN)[40].load(), make_state(40))
        assert [report.failures for report in store.gc()] == [()]
        assert left(store) == [20, 40]
        assert "damaged: neither counted nor deleted" in why(store)[20]


def test_c051_saves_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    where = tmp_path / "store"
    ckptstore.init(where, chunk_bytes=CHUNK_BYTES).close()
    odd = ["chunks/zz/odd", "commits/README.txt", "chunks/00/short", "mine.txt", "parts/x/y"]
    for name in odd:
        (where / name).parent.mkdir(exist_ok=True, parents=True)
        (where / name).write_text("mine")
    stop, rounds = threading.Event(), []

    def collect() -> None:
        with ckptstore.open(where) as other:
            while not stop.is_set():
                rounds.append(other.gc())

    loop = threading.Thread(target=collect)
    loop.start()
    try:
        with ckptstore.open(where) as store:
            train(store, range(1, 9), LAST)
    finally:
        stop.set()
        loop.join()
    with ckptstore.open(where) as store:
        store.gc()
        assert left(store) == [6, 7, 8]
        for step in (6, 7, 8):
            assert same(store.run(TRAIN)[step].load(), make_state(step))
        assert not store.verify().problems
    assert rounds
    assert all((where / name).read_text() == "mine" for name in odd)


def test_c052_collecting_where_there_is_nothing_yet() -> None:
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        assert [report.collected for report in store.gc()] == [(), ()]
        train(store, [1], Keep(last=2), collects=True)
        assert [report.collected for report in store.gc()] == [(), ()]  # cold has nothing of the run
        assert left(store) == [1]


def test_c054_what_is_being_copied_is_there_until_it_is(caplog: Any) -> None:
    with places() as (hot, cold):
        slow = FaultBackend(cold)
        with contextlib.closing(opened(hot, slow, requirement="async")) as store:
            train(store, [1, 2, 3, 4, 5], Keep(last=1), collects=True)
            assert store.replication.drain()
            store.gc()
            for where in (hot, cold):
                with store_over(where) as alone:
                    assert left(alone) == [5]
                    assert same(alone.run(TRAIN)[5].load(), make_state(5))
                    assert not alone.verify().problems
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_c056_rules_count_within_a_run(place: MemoryBackend) -> None:
    with store_over(place) as store:
        store.policies.set(None, Policy(Keep(last=1)))
        for run in "abc":
            train(store, [1, 2], run=run)
        store.gc()
        assert [left(store, run) for run in "abc"] == [[2], [2], [2]]


def test_c057_each_says_which_rule_kept_it(place: MemoryBackend) -> None:
    with store_over(place) as store:
        train(store, [50, 150, 250, 260, 300])
        assert why(store, policy=Keep(every=100)) == {
            50: "keep: every 100 (the lowest of 0 to 99, without a multiple)",
            150: "keep: every 100 (the lowest of 100 to 199, without a multiple)",
            250: "keep: every 100 (the lowest of 200 to 299, without a multiple)",
            260: "delete: no rule keeps it",
            300: "keep: newest restorable; every 100",
        }


def test_c059_a_slow_deletion_holds_no_save_up(place: MemoryBackend) -> None:
    event = threading.Event()
    slow = FaultBackend(place)
    with contextlib.closing(store_over(slow)) as store:
        run = store.run(TRAIN, retention=Keep(last=1))
        run.save(1, make_state(1)).result()
        slow.script.append(Fault("hang", op="delete", key="chunks/*", event=event))
        for step in (2, 3, 4):  # the round after 2 hangs in its first deletion
            run.save(step, make_state(step)).result()
        event.set()
        run.close()
    with store_over(place) as store:
        assert left(store) == [4]
        assert not garbage(place)


def test_g12_a_step_is_a_whole_number_of_64_bits(place: MemoryBackend) -> None:
    with store_over(place) as store:
        given: list[Any] = [-250, -1, np.int32(7), 2**63 - 1]
        train(store, given, Keep(every=100))
        assert why(store) == {
            -250: "keep: every 100 (the lowest of -300 to -201, without a multiple)",
            -1: "keep: every 100 (the lowest of -100 to -1, without a multiple)",
            7: "keep: every 100 (the lowest of 0 to 99, without a multiple)",
            2**63 - 1: "keep: newest restorable; every 100 (the lowest of 9223372036854775800 to "
            "9223372036854775899, without a multiple)",
        }
        wrong: list[Any] = [10.0, True, np.bool_(1), np.float32(3), "7", 2**63, -(2**63) - 1]
        for step in wrong:
            with store.run(TRAIN) as run, pytest.raises(UsageError, match="step"):
                run.save(step, make_state(1))
