"""A second tier whose server takes connections and never answers: nobody waits for it for long."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest

import ckptstore
from ckptstore.errors import BackendError
from ckptstore.inspect.status import status
from ckptstore.replicate import replicator
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier import asking
from tests.crash._support import blank_like, make_state, same
from tests.replicate.made import RUN, holds, opened, places

LONG = 60.0


class Silent(FaultBackend):
    """Answers nothing from :meth:`fall_silent` until :meth:`speak`."""

    def __init__(self, inner):
        super().__init__(inner)
        self._speaks = threading.Event()
        self.asked = threading.Event()

    def _call(self, op, key, call):
        if self.script:
            self.asked.set()
        return super()._call(op, key, call)

    def fall_silent(self):
        self.script.append(Fault("hang", times=None, event=self._speaks))

    def speak(self):
        self.script.clear()
        self._speaks.set()


@pytest.fixture
def tiers():
    """Two tiers, the second of which can fall silent; it speaks again in the end."""
    with places() as (hot, cold):
        silent = Silent(cold)
        yield hot, cold, silent
        silent.speak()


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(replicator, "QUIET_SECONDS", 0.05)


@pytest.mark.usefixtures("_impatient")
def test_training_goes_on_and_ends_beside_a_tier_that_never_answers(tiers, caplog, monkeypatch):
    hot, cold, silent = tiers
    store = opened(hot, silent, requirement="async")
    run = store.run(RUN)
    run.save(1, make_state(1)).wait("replicated", timeout=LONG)
    store.refresh()
    silent.fall_silent()
    for step in (2, 3):
        run.save(step, make_state(step)).result()
    assert silent.asked.wait(LONG)  # by the replicator, which stays there
    run.annotate(3, metrics={"loss": 1.0})
    target = blank_like(make_state(3))
    assert run.restore(target) == 3
    assert same(target, make_state(3))
    shown = status(store, RUN)
    assert [(tier.name, tier.debt and tier.debt.checkpoints) for tier in shown.tiers] == [
        ("hot", None),
        ("cold", 2),
    ]
    assert "tier cold does not answer" in caplog.text
    left = store.replication.to(store.tiers[1])._thread
    with caplog.at_level(logging.ERROR):
        run.close()
        store.close(timeout=0.0)
    told = [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR]
    assert [text[: text.index(" checkpoints")] for text in told] == [
        "tier cold is still owed",
        "tier cold does not answer, a copy to it is broken off; it is owed",
    ]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("ckptstore-"))
    monkeypatch.setattr(asking, "ANSWER_SECONDS", LONG)
    silent.speak()
    left.join(LONG)  # it is copying still, and nobody else does meanwhile
    with contextlib.closing(opened(hot, cold)) as store:
        store.replication.run([store.tiers[1]])
    holds(cold, *[(step, make_state(step)) for step in (1, 2, 3)])


@pytest.mark.usefixtures("_impatient")
def test_opening_a_session_says_which_tier_is_silent(tiers):
    hot, _, silent = tiers
    with contextlib.closing(opened(hot, silent)) as store:
        silent.fall_silent()
        with pytest.raises(BackendError, match="tier 'cold' has given no answer for"):
            store.run(RUN).save(1, make_state(1), wait=True)
        run = store.run(RUN, offline=True)
        run.save(1, make_state(1), wait=True)
        assert run.latest.step == 1


def test_a_time_out_given_is_kept_while_copying_gets_on(tiers):
    """Bytes that move keep nobody beyond the time that was given."""
    hot, _, silent = tiers
    with contextlib.closing(opened(hot, silent, requirement="async")) as store:
        run = store.run(RUN)
        run.save(1, make_state(1)).wait("replicated", timeout=LONG)
        silent.fall_silent()
        run.save(2, make_state(2)).result()
        assert not store.replication.drain(timeout=0.0)
        run.close(timeout=0.0)
        silent.speak()
        assert store.replication.drain(timeout=LONG)


def test_after_a_copy_was_broken_off_the_next_has_a_thread_of_its_own(tiers):
    hot, cold, silent = tiers
    with contextlib.closing(opened(hot, silent, requirement="async")) as store:
        run = store.run(RUN)
        run.save(1, make_state(1)).wait("replicated", timeout=LONG)
        silent.script.append(Fault("hang", op="put", key="commits/*", event=silent._speaks))
        run.save(2, make_state(2)).result()
        assert silent.asked.wait(LONG)
        before = store.replication.to(store.tiers[1])
        store.close(timeout=0.0)
        assert store.replication.to(store.tiers[1]) is not before
        silent.speak()
        run.save(3, make_state(3)).wait("replicated", timeout=LONG)
        run.close()
    holds(cold, *[(step, make_state(step)) for step in (1, 2, 3)])


@pytest.mark.usefixtures("_impatient")
def test_a_store_opens_without_a_tier_that_never_answers(tmp_path, monkeypatch, caplog):
    toml = tmp_path / "ckptstore.toml"
    toml.write_text("".join(f'[[tiers]]\nname = "{n}"\nurl = "memory://hung-{n}"\n' for n in ("hot", "cold")))
    ckptstore.init(toml).close()
    speaks = threading.Event()
    real = ckptstore.tiers.open_backend

    def open_backend(url, options):
        backend = real(url, options)
        return FaultBackend(backend, [Fault("hang", times=None, event=speaks)]) if "cold" in url else backend

    monkeypatch.setattr(ckptstore.tiers, "open_backend", open_backend)
    try:
        with ckptstore.open(toml) as store:
            assert [tier.name for tier in store.tiers] == ["hot"]
        assert "tier cold is left out: tier 'cold' has given no answer" in caplog.text
    finally:
        speaks.set()


def test_who_answers_slowly_is_waited_for(monkeypatch):
    """Only silence counts, not how long it takes."""
    monkeypatch.setattr(asking, "ANSWER_SECONDS", 0.01)
    given = threading.Event()

    class Slow:
        answers = 0

    slow = Slow()
    turns = iter(range(1, 4))

    def heard(_):
        slow.answers = next(turns, None) or (given.set() or 4)
        return slow.answers

    monkeypatch.setattr(asking, "answers", heard)
    assert asking.ask(slow, "cold", lambda: given.wait(LONG)) is True
    monkeypatch.setattr(asking, "answers", lambda _: 0)
    go_on = threading.Event()
    with pytest.raises(BackendError, match="no answer"):
        asking.ask(slow, "cold", lambda: go_on.wait(LONG))
    with pytest.raises(BackendError, match="no answer"):  # at once: nobody asks a second time meanwhile
        asking.ask(slow, "cold", lambda: pytest.fail("asked"))
    left = next(iter(asking._asked.values()))
    go_on.set()
    assert left.ended.wait(LONG)
    assert asking.ask(slow, "cold", lambda: 7) == 7
    with pytest.raises(KeyError):
        asking.ask(slow, "cold", lambda: {}[1])
