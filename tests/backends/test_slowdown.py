from __future__ import annotations

import itertools
import logging
import os
import pickle
import threading

import pytest

from ckptstore.backend import DeleteResult
from ckptstore.errors import BackendError
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier.retry import PATIENCE_SECONDS, RetryingBackend
from ckptstore.tier.slowdown import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, SlowDown

_names = itertools.count()
SLOW = BackendError("503 SlowDown", throttled=True)


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 1000.0
        self.sleeps = []

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds

    def monotonic(self):
        return self.now


@pytest.fixture
def clock():
    return FakeTime()


@pytest.fixture
def pace(clock):
    return SlowDown(sleep=clock.sleep, random=lambda: 0.5, monotonic=clock.monotonic)


@pytest.fixture
def retrying(faulty, clock):
    return RetryingBackend(
        faulty, sleep=clock.sleep, random=lambda: 0.5, monotonic=clock.monotonic, patience_seconds=100.0
    )


def refuse(faulty, times, op="put"):
    faulty.script.append(Fault("error", op=op, error=SLOW, times=times))


# --- the pace ---------------------------------------------------------------------------------


def test_nobody_waits_before_the_first_refusal(pace, clock):
    assert pace.wait(9.0) == (0, 0.0)
    pace.answered(0)
    assert (pace.pause_seconds, clock.sleeps) == (0.0, [])


def test_the_pause_doubles_up_to_a_bound_and_halves_to_nothing(pace):
    pauses = []
    for _ in range(10):
        mark, _ = pace.wait(1e9)
        pace.refused(mark)
        pauses.append(pace.pause_seconds)
    assert pauses[:4] == [FIRST_PAUSE_SECONDS * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == MAX_PAUSE_SECONDS
    for _ in range(8):
        mark, _ = pace.wait(1e9)
        pace.answered(mark)
    assert pace.pause_seconds == 0.0


def test_refusals_of_requests_that_were_under_way_count_once(pace):
    marks = [pace.wait(9.0)[0] for _ in range(16)]
    assert [pace.refused(mark) for mark in marks] == [True] + 15 * [False]
    assert pace.pause_seconds == FIRST_PAUSE_SECONDS
    pace.answered(marks[0])
    assert pace.pause_seconds == FIRST_PAUSE_SECONDS, "an older success says nothing either"


def test_threads_set_out_within_a_quarter_of_the_pause(clock):
    numbers = iter([0.5, 0.0, 0.999])
    pace = SlowDown(sleep=clock.sleep, random=lambda: next(numbers), monotonic=lambda: 0.0)
    pace.refused(0)
    pace.wait(9.0)
    pace.wait(9.0)
    assert clock.sleeps[0] == pytest.approx(FIRST_PAUSE_SECONDS)
    assert clock.sleeps[1] == pytest.approx(1.25 * FIRST_PAUSE_SECONDS, rel=0.01)


def test_no_wait_is_longer_than_asked(pace, clock):
    pace.refused(0)
    assert pace.wait(0.01) == (1, 0.01)


def test_who_has_refused_once_is_asked_with_a_look_at_the_clock_from_then_on(pace, clock):
    assert not pace.has_refused
    pace.refused(0)
    assert pace.has_refused
    pace.answered(1)
    pace.answered(1)
    assert pace.has_refused
    assert pace.wait(0.01) == (1, 0.01), "the common time stands, whatever has gone well since"
    clock.now += 60.0
    assert pace.wait(9.0) == (1, 0.0)
    assert pace.has_refused


# --- the wrapper ------------------------------------------------------------------------------


def test_c186_one_threads_refusal_makes_all_threads_wait(memory, clock):
    slept: dict[str, float] = {}
    refused = threading.Event()

    class Busy(FaultBackend):
        def put(self, key, buffers, *, if_absent=False):
            if key == "a" and not refused.is_set():
                refused.set()
                raise SLOW
            super().put(key, buffers, if_absent=if_absent)

    def sleep(seconds):
        name = threading.current_thread().name
        slept[name] = slept.get(name, 0.0) + seconds

    retrying = RetryingBackend(
        Busy(memory), sleep=sleep, random=lambda: 0.0, monotonic=lambda: clock.now, patience_seconds=100.0
    )
    retrying.put("a", [b"1"])
    others = [threading.Thread(target=retrying.put, args=(f"b{n}", [b"2"]), name=f"b{n}") for n in range(4)]
    # After the success of `a` the pause is half as long, but the common time stands.
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert set(slept) == {"MainThread", "b0", "b1", "b2", "b3"}
    assert list(slept.values()) == pytest.approx(5 * [FIRST_PAUSE_SECONDS / 2])


def test_c186_a_storm_that_outlasts_all_tries_fails_nothing(memory, faulty, retrying, clock):
    refuse(faulty, 9)
    retrying.put("a", [b"1"])
    assert memory.get("a", max_bytes=1) == b"1"
    assert clock.now - 1000.0 < 100.0


def test_patience_ends_after_the_stated_time(faulty, retrying, clock):
    refuse(faulty, None)
    with pytest.raises(BackendError, match="SlowDown"):
        retrying.put("a", [b"1"])
    assert 90.0 <= clock.now - 1000.0 <= 100.0 + MAX_PAUSE_SECONDS
    assert PATIENCE_SECONDS == 300.0


def test_patience_ends_where_sleeping_takes_no_time(faulty, clock):
    refuse(faulty, None)
    retrying = RetryingBackend(faulty, sleep=clock.sleeps.append, random=lambda: 0.5, patience_seconds=50.0)
    with pytest.raises(BackendError, match="SlowDown"):
        retrying.put("a", [b"1"])
    assert sum(clock.sleeps) == pytest.approx(50.0)


def test_refusals_use_up_no_tries(memory, faulty, retrying):
    faulty.script += [Fault("error", op="put", error=SLOW, times=6), Fault("error", op="put", times=3)]
    retrying.put("a", [b"1"])
    assert memory.get("a", max_bytes=1) == b"1"


def test_a_batch_with_refused_keys_goes_on_with_those(memory, clock):
    class Busy(FaultBackend):
        def delete(self, keys):
            results = super().delete(keys)
            if len(self.log) <= 6:
                return [DeleteResult(result.key, SLOW if result.key == "b" else None) for result in results]
            return results

    faulty = Busy(memory)
    retrying = RetryingBackend(faulty, sleep=clock.sleep, monotonic=clock.monotonic)
    assert [result.error for result in retrying.delete(["a", "b"])] == [None, None]
    assert len(faulty.log) == 7
    assert clock.now > 1000.0


def test_nothing_to_delete_is_no_request(faulty, retrying):
    assert retrying.delete([]) == []
    assert faulty.log == []


def test_an_ordered_list_waits_and_goes_on(memory, clock):
    for n in range(4):
        memory.put(f"a/{n}", [b""])

    class Busy(FaultBackend):
        refusals = 0

        def list(self, prefix):
            for n, info in enumerate(super().list(prefix)):
                if n == 2 and self.refusals < 7:
                    self.refusals += 1
                    raise SLOW
                yield info

    retrying = RetryingBackend(
        Busy(memory), sleep=clock.sleep, random=lambda: 0.5, monotonic=clock.monotonic, patience_seconds=30.0
    )
    listing = retrying.list("a/")
    seen = [next(listing).key]
    clock.now += 1000.0  # the caller may take its time
    seen += [info.key for info in listing]
    assert seen == [f"a/{n}" for n in range(4)]


def test_the_slow_down_is_told_once(faulty, retrying, caplog):
    refuse(faulty, 5)
    with caplog.at_level(logging.DEBUG, "ckptstore.tier.retry"):
        retrying.put("a", [b"1"])
        retrying.put("b", [b"1"])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "patience" in caplog.records[0].getMessage()


def test_no_pause_travels_to_another_process(faulty, memory, clock):
    retrying = RetryingBackend(memory, patience_seconds=7.0)
    retrying._slow_down.refused(0)
    assert retrying._slow_down.pause_seconds
    copy = pickle.loads(pickle.dumps(retrying))
    assert (copy._slow_down.pause_seconds, copy._patience_seconds) == (0.0, 7.0)
    pid = os.fork()
    if not pid:
        os._exit(int(retrying._slow_down.pause_seconds * 1000))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_throttled_error_is_transient_and_survives_pickling():
    error = pickle.loads(pickle.dumps(BackendError("slow", throttled=True)))
    assert (error.transient, error.throttled) == (True, True)
    assert not BackendError("no", transient=True).throttled
