from __future__ import annotations

import dataclasses
import logging
import pickle
import threading

import pytest

from ckptstore.checkpoint import RestoreReport
from ckptstore.errors import OutOfSpaceError, SaveFailedError, UsageError
from ckptstore.events import (
    Hook,
    Hooks,
    error_kind,
    public_url,
    restore_event,
    save_event,
    save_line,
)
from tests.manifest.made import make_record
from tests.metrics.made import COMMITTED, EVENTS, FAILED, RESTORED, SKIPPED


class Heard(Hook):
    def __init__(self):
        self.events = []

    def saved(self, event):
        self.events.append(event)

    def restored(self, event):
        self.events.append(event)


class Broken(Hook):
    def __init__(self, error):
        self.error = error

    def saved(self, event):
        raise self.error


# --- events ---------------------------------------------------------------------------------------------


def known(**more):
    return {"rank": 0, "world_size": 2, "tier": "/ckpts", "blocked_seconds": 0.25, **more}


def test_a_commit_is_told_with_what_its_record_says():
    record = make_record(7)
    event = save_event("gpt", 7, record=record, **known())
    assert (event.outcome, event.error_kind) == ("committed", None)
    assert event.checkpoint == record.checkpoint
    assert event.seconds == {"capture": 0.25, "write": 1.5}
    assert (event.logical_bytes, event.new_bytes, event.reused_bytes) == (256, 256, 0)
    assert event.committed_at == "2026-11-29T12:00:07.123Z"
    assert event.background_seconds == 1.5


def test_another_rank_does_not_take_the_times_of_rank_0_for_its_own():
    assert save_event("gpt", 7, record=make_record(7), **known(rank=1)).seconds == {}
    own = save_event("gpt", 7, record=make_record(7), seconds={"write": 3}, **known(rank=1))
    assert own.seconds == {"write": 3.0}


def test_a_failure_is_told_by_the_kind_of_its_cause():
    error = SaveFailedError("save failed")
    error.__cause__ = OutOfSpaceError("full")
    event = save_event("gpt", 7, error=error, **known())
    assert (event.outcome, event.error_kind) == ("failed", "out-of-space")
    assert (event.committed_at, event.checkpoint, event.new_bytes) == (None, None, 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SaveFailedError("rank 3: no answer"), "save-failed"),
        (OutOfSpaceError("full"), "out-of-space"),
        (MemoryError(), "MemoryError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_kinds(error, kind):
    assert error_kind(error) == kind


def test_neither_record_nor_error_is_a_save_that_was_skipped():
    event = save_event("gpt", 7, **known())
    assert (event.outcome, event.error_kind, event.seconds) == ("skipped", None, {})


def test_a_restore_is_told_with_its_report():
    report = RestoreReport("gpt", 7, "id", bytes_read=10, seconds=2.0)
    event = restore_event("gpt", rank=1, tier="/ckpts", report=report)
    assert (event.outcome, event.step, event.seconds, event.bytes_read) == ("restored", 7, 2.0, 10)
    event = restore_event("gpt", rank=1, tier="/ckpts", error=OutOfSpaceError("x"), seconds=1.0)
    assert (event.outcome, event.step, event.error_kind, event.seconds) == (
        "failed",
        None,
        "out-of-space",
        1.0,
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/data/ckpts", "/data/ckpts"),
        ("/data/a?b#c@d", "/data/a?b#c@d"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("https://user:secret@host:9000/b/p?token=secret#secret", "https://host:9000/b/p"),
        ("s3://key:se@cret@bucket/p", "s3://bucket/p"),
        ("s3://u:secret@[::1", "s3://"),
    ],
)
def test_no_credentials_are_shown(url, shown):
    assert public_url(url) == shown
    assert save_event("gpt", 1, **known(tier=url)).tier == shown


@pytest.mark.parametrize("event", EVENTS)
def test_events_travel_between_processes(event):
    assert pickle.loads(pickle.dumps(event)) == event


# --- the log line ---------------------------------------------------------------------------------------


def test_the_line_of_a_save():
    assert save_line(COMMITTED) == (
        "saved 'gpt' step 500: 1.5 GiB, 312.0 MiB new, blocked 0.25 s, 2.12 s in the background"
    )
    waited_for = dataclasses.replace(COMMITTED, seconds={"write": 3.0}, new_bytes=0, logical_bytes=1000)
    assert save_line(waited_for) == "saved 'gpt' step 500: 1000 B, 0 B new, blocked 0.25 s"
    assert save_line(FAILED) == "save of 'gpt' step 500 failed: out-of-space, blocked 0.25 s"
    assert save_line(SKIPPED) == "skipped the save of 'gpt' step 500: earlier saves are still under way"


def test_it_is_one_line_whatever_the_run_is_called():
    assert "\n" not in save_line(dataclasses.replace(COMMITTED, run="a\nb"))


# --- hooks ----------------------------------------------------------------------------------------------


def test_all_hooks_are_told_in_order():
    first, second = Heard(), Heard()
    hooks = Hooks([first])
    hooks.saved(COMMITTED)
    hooks.add(second)
    hooks.restored(RESTORED)
    assert first.events == [COMMITTED, RESTORED]
    assert second.events == [RESTORED]
    assert list(hooks) == [first, second]


@pytest.mark.parametrize("error", [ValueError("no disk"), SystemExit(3), MemoryError()])
def test_what_a_hook_raises_is_logged_once_and_goes_no_further(caplog, error):
    after = Heard()
    hooks = Hooks([Broken(error), after])
    with caplog.at_level(logging.INFO, "ckptstore"):
        hooks.saved(COMMITTED)
        hooks.saved(FAILED)
    assert after.events == [COMMITTED, FAILED]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "hook Broken failed in saved()" in record.getMessage()
    assert type(error).__name__ in record.getMessage()
    assert record.exc_info[1] is error


def test_each_hook_is_logged_for_itself(caplog):
    hooks = Hooks([Broken(ValueError("a")), Broken(ValueError("b"))])
    hooks.saved(COMMITTED)
    assert len(caplog.records) == 2


def test_an_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        Hooks([Broken(KeyboardInterrupt())]).saved(COMMITTED)


def test_a_hook_need_not_define_both():
    Hooks([Broken(ValueError())]).restored(RESTORED)


def test_what_is_no_hook_is_refused_at_once():
    with pytest.raises(UsageError, match="not the class Heard"):
        Hooks([Heard])
    with pytest.raises(UsageError, match="no method saved and no method restored"):
        Hooks([print])


def test_hooks_stay_in_their_process():
    assert len(pickle.loads(pickle.dumps(Hooks([Heard()])))) == 0


def test_a_hook_may_be_added_by_another_thread_or_by_a_hook():
    hooks = Hooks()

    class Adds(Hook):
        def saved(self, event):
            hooks.add(Heard())

    hooks.add(Adds())
    threads = [threading.Thread(target=lambda: [hooks.saved(COMMITTED) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hooks) == 81
