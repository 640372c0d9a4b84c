"""A state machine over a store: whatever is done to it, it says what a plain dict model says.

Two Store objects on one place in memory act as two processes; each keeps its own idea of where its training
stands. A crash strikes a save at a drawn call of the backend; then that process is opened anew.
"""

import contextlib
import itertools
import logging
import math

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ckptstore
from ckptstore.errors import (
    CkptstoreError,
    ConflictError,
    NotFoundError,
    NothingRestorableError,
    SessionSupersededError,
)
from ckptstore.testing import FaultBackend, SimulatedCrash, crash_at
from ckptstore_memory import MemoryBackend
from tests.model.made import difference
from tests.roundtrip.made import over

_places = itertools.count()
WHO = st.integers(0, 1)
STEPS = st.integers(0, 4)
TAGS = st.sampled_from(["a", "b"])


class Model:
    """The history of one run as a list and a few dicts."""

    def __init__(self):
        self.saves = {}  # id -> (epoch, sequence, step, content)
        self.epochs = 0
        self.gone_back_to = {}  # id -> epoch of the last session that resumed from it
        self.tags = {}  # id -> set
        self.invalid = set()
        self.metrics = {}  # id -> {"loss": x}

    def add(self, name, epoch, sequence, step, content, metrics):
        self.saves[name] = (epoch, sequence, step, content)
        self.tags[name] = set()
        self.metrics[name] = dict(metrics)

    def open(self, resumed_from):
        self.epochs += 1
        if resumed_from is not None:
            self.gone_back_to[resumed_from] = self.epochs
        return self.epochs

    def order(self):
        def place(name):
            epoch, sequence, _, _ = self.saves[name]
            return max((epoch, sequence), (self.gone_back_to.get(name, -1), 0))

        return sorted(self.saves, key=place)

    def restorable(self):
        return [name for name in self.order() if name not in self.invalid]

    def latest(self):
        return (self.restorable() or [None])[-1]

    def at_step(self, step):
        here = [name for name in self.order() if self.saves[name][2] == step]
        return ([name for name in here if name not in self.invalid] or here or [None])[-1]

    def best(self):
        ranked = [
            (self.metrics[name]["loss"], (-self.saves[name][0], -self.saves[name][1]), name)
            for name in self.saves
            if name not in self.invalid and "loss" in self.metrics[name]
        ]
        return min(ranked)[2] if ranked else None

    def tagged(self, tag):
        return ([name for name in self.order() if tag in self.tags[name]] or [None])[-1]


class Process:
    """One opened store with one run, and what the model knows of its session."""

    def __init__(self, place):
        self.backend = FaultBackend(MemoryBackend(place))
        self.store = over(self.backend)
        self.run = self.store.run("r")
        self.epoch = None  # of its open session
        self.sequence = 0
        self.point = None  # id of what its next save continues from
        self.base = None  # id of what its session last saved or began with


class Machine(RuleBasedStateMachine):
    @initialize()
    def make(self):
        self.place = f"machine-{next(_places)}"
        ckptstore.init(f"memory://{self.place}", chunk_bytes=1024)
        self.model = Model()
        self.processes = [Process(self.place), Process(self.place)]
        self.forks = {}
        self.counter = 0

    # --- helpers ------------------------------------------------------------------------------

    def content(self):
        """A state that shares most of its chunks with the one before."""
        self.counter += 1
        weights = torch.arange(700, dtype=torch.int32)
        weights[self.counter % 700] = -self.counter
        return {
            "m": {"w": weights, "b": torch.full((3,), float(self.counter))},
            "n": [self.counter, (None, b"x")],
        }

    def model_opens(self, process, resumed_from):
        process.epoch = self.model.open(resumed_from)
        process.sequence = 0
        process.base = process.point = resumed_from

    def model_session(self, process):
        """What a save does about its session before it writes."""
        if process.epoch is None or process.point != process.base:
            self.model_opens(process, process.point)

    def is_superseded(self, process):
        return process.epoch < self.model.epochs

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.model.saves)), label="checkpoint")

    # --- rules --------------------------------------------------------------------------------

    @rule(
        who=WHO,
        step=STEPS,
        loss=st.one_of(st.none(), st.integers(0, 3), st.just(float("nan"))),
        tag=st.booleans(),
    )
    def save(self, who, step, loss, tag):
        process = self.processes[who]
        state = self.content()
        metrics = {} if loss is None else {"loss": loss}
        pending = process.run.save(step, state, metrics=metrics, tags=["saved"] if tag else [])
        self.model_session(process)
        if self.is_superseded(process):
            with pytest.raises(SessionSupersededError):
                pending.result()
            return
        if loss is not None and math.isnan(loss):
            metrics = {}  # it never wins: to the model it is none
        self.committed(process, pending.result(), step, state, metrics, tag)

    def committed(self, process, checkpoint, step, state, metrics, tag=False):
        process.sequence += 1
        assert (checkpoint.epoch, checkpoint.step) == (process.epoch, step)
        self.model.add(checkpoint.id, process.epoch, process.sequence, step, state, metrics)
        assert checkpoint.sequence == process.sequence
        if tag:
            self.model.tags[checkpoint.id].add("saved")
        process.base = process.point = checkpoint.id

    @rule(who=WHO, step=STEPS, at=st.integers(1, 30), after=st.booleans())
    def crash_in_a_save(self, who, step, at, after):
        process = self.processes[who]
        state = self.content()
        fault = crash_at(len(process.backend.log) + at)
        if after:
            fault.kind = "crash_after"
        process.backend.script.append(fault)
        before = {checkpoint.id for checkpoint in self.fresh_run().checkpoints()}
        known = self.model.epochs
        with contextlib.suppress(SimulatedCrash, CkptstoreError):
            process.run.save(step, state).result()
        self.processes[who] = Process(self.place)
        seen = self.fresh_run()
        epochs = seen.sessions()
        for document in epochs[known:]:
            assert document.resumed_from == process.point
            self.model_opens(process, document.resumed_from)
        new = [checkpoint for checkpoint in seen.checkpoints() if checkpoint.id not in before]
        assert len(new) <= 1
        if new:
            process.sequence = new[0].sequence - 1  # a failed save may have taken a number
            self.committed(process, new[0], step, state, {})

    @rule(who=WHO, before=st.one_of(st.none(), STEPS))
    def restore(self, who, before):
        process = self.processes[who]
        target = self.content()
        candidates = [
            name for name in self.model.restorable() if before is None or self.model.saves[name][2] < before
        ]
        if not self.model.saves:
            assert process.run.restore(target, before_step=before) is None
            return
        if not candidates:
            with pytest.raises(NothingRestorableError):
                process.run.restore(target, before_step=before)
            return
        name = candidates[-1]
        assert process.run.restore(target, before_step=before) == self.model.saves[name][2]
        assert difference(target, self.model.saves[name][3]) is None
        assert process.run.restored.checkpoint == name
        process.point = name

    @precondition(lambda self: self.model.saves)
    @rule(who=WHO, data=st.data())
    def rewind(self, who, data):
        process = self.processes[who]
        step = self.model.saves[self.some(data)][2]
        name = self.model.at_step(step)
        if name in self.model.invalid:
            with pytest.raises(ConflictError):
                process.run.rewind(step)
            return
        assert process.run.rewind(step).id == name
        self.model_opens(process, name)

    @precondition(lambda self: self.model.saves)
    @rule(who=WHO, data=st.data(), tag=TAGS, move=st.booleans())
    def tag(self, who, data, tag, move):
        name = self.some(data)
        run = self.processes[who].run
        checkpoint = run.find(name)
        holders = [other for other, tags in self.model.tags.items() if tag in tags and other != name]
        if holders and not move:
            with pytest.raises(ConflictError):
                run.tag(checkpoint, tag)
            return
        run.tag(checkpoint, tag, move=move)
        for other in holders:
            self.model.tags[other].discard(tag)
        self.model.tags[name].add(tag)

    @precondition(lambda self: self.model.saves)
    @rule(who=WHO, data=st.data(), tag=TAGS)
    def untag(self, who, data, tag):
        name = self.some(data)
        run = self.processes[who].run
        if tag in self.model.tags[name]:
            run.untag(run.find(name), tag)
            self.model.tags[name].discard(tag)
        else:
            with pytest.raises(NotFoundError):
                run.untag(run.find(name), tag)

    @precondition(lambda self: self.model.saves)
    @rule(who=WHO, data=st.data())
    def invalidate_or_undo(self, who, data):
        name = self.some(data)
        run = self.processes[who].run
        if name in self.model.invalid:
            run.revalidate(run.find(name))
            self.model.invalid.discard(name)
        else:
            run.invalidate(run.find(name), "drawn")
            self.model.invalid.add(name)

    @precondition(lambda self: self.model.saves)
    @rule(who=WHO, data=st.data(), loss=st.integers(0, 3))
    def annotate(self, who, data, loss):
        name = self.some(data)
        run = self.processes[who].run
        run.annotate(run.find(name), metrics={"loss": loss})
        self.model.metrics[name]["loss"] = loss

    @precondition(lambda self: self.model.saves and len(self.forks) < 3)
    @rule(who=WHO, data=st.data())
    def fork(self, who, data):
        name = self.some(data)
        store = self.processes[who].store
        fork = f"fork {len(self.forks)}"
        chunks = {
            info.key for prefix in ("chunks/", "packs/") for info in MemoryBackend(self.place).list(prefix)
        }
        store.run(fork).fork_from(self.processes[who].run.find(name))
        after = {
            info.key for prefix in ("chunks/", "packs/") for info in MemoryBackend(self.place).list(prefix)
        }
        assert after == chunks
        self.forks[fork] = name

    @rule(who=WHO)
    def reopen(self, who):
        self.processes[who] = Process(self.place)

    @rule(who=WHO)
    def rebuild(self, who):
        self.processes[who].store.rebuild()

    @rule(who=WHO)
    def lose_the_manifest(self, who):
        self.processes[who].store.catalog.close()

    # --- what always holds --------------------------------------------------------------------

    def fresh_run(self):
        return over(MemoryBackend(self.place)).run("r")

    @invariant()
    def everyone_says_what_the_model_says(self):
        if not hasattr(self, "model"):
            return
        model = self.model
        for run in (self.fresh_run(), *(process.run for process in self.processes)):
            found = run.checkpoints()
            assert [checkpoint.id for checkpoint in found] == model.order()
            for checkpoint in found:
                assert set(checkpoint.tags) == model.tags[checkpoint.id]
                assert checkpoint.restorable == (checkpoint.id not in model.invalid)
            assert getattr(run.latest, "id", None) == model.latest()
            assert getattr(run.best("loss", "min"), "id", None) == model.best()
            for step in {self.model.saves[name][2] for name in model.saves}:
                assert run[step].id == model.at_step(step)
            for tag in ("a", "b", "saved"):
                name = model.tagged(tag)
                if name is None:
                    with pytest.raises(NotFoundError):
                        run.find(tag)
                else:
                    assert run.find(tag).id == name
            assert len(run.sessions()) == model.epochs

    def teardown(self):
        if not hasattr(self, "model"):
            return
        run = self.fresh_run()
        for checkpoint in run.checkpoints():
            assert difference(checkpoint.load(), self.model.saves[checkpoint.id][3]) is None
        store = over(MemoryBackend(self.place))
        for fork, name in self.forks.items():
            found = store.run(fork).latest
            assert found.step == self.model.saves[name][2]
            assert difference(found.load(), self.model.saves[name][3]) is None


def _run(**options):
    logging.getLogger("ckptstore").setLevel(logging.CRITICAL)
    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), **options
            ),
        )
    finally:
        logging.getLogger("ckptstore").setLevel(logging.NOTSET)


def test_a_store_always_says_what_a_plain_model_says():
    _run(derandomize=True, max_examples=25, stateful_step_count=20)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_store_always_says_what_a_plain_model_says_for_long():
    _run(max_examples=1500, stateful_step_count=60)
