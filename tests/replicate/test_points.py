"""A process that dies, or whose storage fails, at every single call of a replication."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.replicate import attempts, copying
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import intents
from tests.crash._support import check_objects, copy_of, make_state, same
from tests.inline import all_inline
from tests.replicate.made import RUN, alone, holds, opened, owed, places, replicate


@pytest.fixture(autouse=True)
def _no_manifest_files(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")


@contextlib.contextmanager
def prepared():
    """Two checkpoints in the hot tier, the first of them in the cold one, too."""
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            store.run(RUN).save(1, make_state(1), wait=True)
            replicate(store)
            store.run(RUN).save(2, make_state(2), wait=True)
        yield hot, cold


def struck(hot, cold, which, kind=None, number=0):
    """The calls that a replication makes of one tier, with the fault at that one of them."""
    watched = FaultBackend(hot if which == "hot" else cold)
    pair = (watched, cold) if which == "hot" else (hot, watched)
    with contextlib.closing(opened(*pair)) as store:
        first = len(watched.log)
        if kind is not None:
            watched.script.append(Fault(kind, n=first + 1 + number))
        with contextlib.suppress(SimulatedCrash):
            replicate(store)
        return watched.log[first:]


def calls(hot, cold, which):
    """Those that a replication makes of one tier when all goes well."""
    with copy_of(hot) as own_hot, copy_of(cold) as own_cold:
        made = struck(own_hot, own_cold, which)
    assert len(made) > 20
    return list(enumerate(made))


@pytest.mark.parametrize("which", ["hot", "cold"])
def test_a_crash_after_any_call_shows_nothing_partial_and_loses_nothing(monkeypatch, which):
    """C012: the record comes last, whatever the order of names."""
    all_inline(monkeypatch)
    monkeypatch.setattr(attempts, "seems_alive", lambda document: False)  # this process "died"
    sent = []
    with prepared() as (hot, cold):
        for number, _ in calls(hot, cold, which):
            with copy_of(hot) as own_hot, copy_of(cold) as own_cold:
                assert len(struck(own_hot, own_cold, which, "crash_after", number)) > number
                if which == "hot":
                    holds(own_hot, (1, make_state(1)), (2, make_state(2)))
                check_objects(own_cold)
                with contextlib.closing(alone(own_cold)) as store:
                    for checkpoint in store.run(RUN).checkpoints():
                        assert same(checkpoint.load(), make_state(checkpoint.step))
                with contextlib.closing(opened(own_hot, own_cold)) as store:
                    is_there = len(alone(own_cold).run(RUN).checkpoints()) == 2
                    assert owed(store) == (0 if is_there else 1)
                    sent += [one.sent_bytes for one in replicate(store).sent]
                    assert [d.kind for d in intents.list_intents(store.tiers[1])] in ([], ["replicate"])
                holds(own_cold, (1, make_state(1)), (2, make_state(2)))
    # Whoever comes next goes on where the dead one stopped, and does not begin anew.
    assert min(sent) < max(sent) if which == "cold" else sent


@pytest.mark.parametrize("which", ["hot", "cold"])
@pytest.mark.parametrize("kind", ["error", "error_after"])
def test_an_error_or_a_lost_reply_at_any_call_is_made_good(monkeypatch, which, kind):
    """An error at each; a lost reply where it matters, at each that changes something."""
    all_inline(monkeypatch)
    with prepared() as (hot, cold):
        for number, call in calls(hot, cold, which):
            if kind == "error_after" and call.op not in ("put", "delete", "sync"):
                continue
            with copy_of(hot) as own_hot, copy_of(cold) as own_cold:
                struck(own_hot, own_cold, which, kind, number)
                if which == "hot":
                    holds(own_hot, (1, make_state(1)), (2, make_state(2)))
                with contextlib.closing(opened(own_hot, own_cold)) as store:
                    replicate(store)
                holds(own_cold, (1, make_state(1)), (2, make_state(2)))


def test_two_at_once_do_no_harm():
    with prepared() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        source = store.copies_of(store.run(RUN).key, store.run(RUN).latest.entry)
        for _ in range(2):  # the second does not know of the first
            copying.copy_checkpoint(source[:1], store.tiers[1])
        holds(cold, (1, make_state(1)), (2, make_state(2)))
        assert not replicate(store).sent


def test_what_another_process_is_copying_is_left_to_it(monkeypatch):
    with prepared() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        crashing = FaultBackend(cold, [Fault("crash", op="put", key="commits/*")])
        with contextlib.closing(opened(hot, crashing)) as other, pytest.raises(SimulatedCrash):
            replicate(other)
        monkeypatch.setattr(attempts, "seems_alive", lambda document: True)
        report = replicate(store)
        assert not report.sent
        assert "is being copied" in report.skipped[0].reason
        monkeypatch.setattr(attempts, "seems_alive", lambda document: False)
        (sent,) = replicate(store).sent
        assert sent.sent_bytes == 0 < sent.new_bytes
