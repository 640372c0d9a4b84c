"""Taking note of signals, with real ones."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ckptstore.errors import UsageError
from ckptstore.signals import SignalWatch, signal_of

US = os.getpid()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    names = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in names}
    yield
    after = {number: signal.getsignal(number) for number in names}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


def watch(*names: str) -> SignalWatch:
    times = iter(range(10, 100))
    return SignalWatch(names, lambda: float(next(times)))


def test_the_first_signal_is_kept_and_all_are_counted():
    with watch("SIGTERM", "SIGUSR1") as seen:
        assert (seen.count, seen.first, seen.first_at) == (0, None, None)
        os.kill(US, signal.SIGUSR1)
        os.kill(US, signal.SIGTERM)
        os.kill(US, signal.SIGTERM)
        assert (seen.count, seen.first, seen.first_at) == (3, signal.SIGUSR1, 10.0)


def test_a_former_handler_is_called_after_and_put_back():
    calls = []

    def former(number, frame):
        calls.append((number, seen.count, frame is not None))

    signal.signal(signal.SIGUSR1, former)
    try:
        with watch("SIGUSR1") as seen:
            os.kill(US, signal.SIGUSR1)
        assert calls == [(signal.SIGUSR1, 1, True)]
        assert signal.getsignal(signal.SIGUSR1) is former
        os.kill(US, signal.SIGUSR1)
        assert len(calls) == 2
        assert seen.count == 1
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_what_a_former_handler_raises_goes_its_way():
    def former(number, _frame):
        raise SystemExit(128 + number)

    signal.signal(signal.SIGUSR1, former)
    try:
        with pytest.raises(SystemExit), watch("SIGUSR1") as seen:
            os.kill(US, signal.SIGUSR1)
        assert seen.count == 1
        assert signal.getsignal(signal.SIGUSR1) is former
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_an_ignored_signal_counts_and_is_ignored_again_afterwards():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with watch("SIGUSR1") as seen:
            os.kill(US, signal.SIGUSR1)
        assert seen.count == 1
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        os.kill(US, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_an_interrupt_is_taken_note_of_and_interrupts_again_afterwards():
    with watch("SIGINT") as seen:
        os.kill(US, signal.SIGINT)
    assert seen.count == 1
    with pytest.raises(KeyboardInterrupt):
        os.kill(US, signal.SIGINT)
        threading.Event().wait(1)


def test_an_inner_watch_tells_the_outer_one():
    with watch("SIGTERM", "SIGUSR1") as outer:
        with watch("SIGTERM") as inner:
            os.kill(US, signal.SIGTERM)
        os.kill(US, signal.SIGUSR1)
        os.kill(US, signal.SIGTERM)
    assert (inner.count, outer.count) == (1, 3)


def test_who_takes_a_signal_over_meanwhile_keeps_it():
    later = []
    with watch("SIGUSR1", "SIGUSR2") as seen:
        ours = signal.getsignal(signal.SIGUSR1)

        def chained(number, frame):
            later.append(number)
            ours(number, frame)

        signal.signal(signal.SIGUSR1, chained)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.kill(US, signal.SIGUSR1)
    try:
        assert (seen.count, later) == (1, [signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) is chained
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_only_the_main_thread_can_watch():
    errors = []

    def enter():
        try:
            with watch("SIGTERM"):
                pass
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_a_watch_is_entered_once():
    seen = watch("SIGTERM")
    with seen, pytest.raises(UsageError, match="entered before"):
        seen.__enter__()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SIGFOO", "no signal 'SIGFOO'"),
        ("TERM", "no signal 'TERM'"),
        (15, "no signal 15"),
        ("SIGKILL", "none can take note"),
        (signal.SIGSTOP, "none can take note"),
        ("SIGSEGV", "fault"),
    ],
)
def test_signals_that_cannot_be_taken_note_of(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        signal_of(name)
    assert "SIGTERM" in caught.value.hint
    assert "SIGKILL" not in caught.value.hint
