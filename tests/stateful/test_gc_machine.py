"""A state machine over collecting: whatever is done to two runs in two tiers, nothing that counts is lost.

Two processes save, each its own run, and both collect, trim, evict, replicate, repair, pin, tag, forget and
take that back; any of it may be cut off by a crash at a drawn call. After each step every checkpoint that is
said to be restorable is loaded and compared, no live record names what is missing, and what must stay is
there. In the end two quiet rounds leave no garbage.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import ConflictError, GuardError, NotFoundError
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.run import Run
from ckptstore.store import Store
from ckptstore.testing.faults import FaultBackend, SimulatedCrash
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier
from ckptstore_memory import MemoryBackend, _places
from tests.crash._support import quiet, records, same
from tests.gc.made import garbage
from tests.gc.schedules.made import age_intents, threads_away
from tests.replicate.made import opened, places

RUNS = ("left", "right")
WHO = st.integers(0, 1)
WHICH = st.integers(0, 11)
NAME = st.sampled_from(RUNS)
CALLS = st.one_of(st.none(), st.none(), st.integers(1, 80))
"""Calls until the process dies; None: it does not."""

CHUNK = 64 << 10


def content(number: int) -> dict[str, Any]:
    """State `number`: what never changes, what five in a row share, and what is its own."""
    return {
        "model": {
            "frozen": np.arange(CHUNK // 8, dtype=np.float64),
            "slow": np.full(CHUNK // 4, number // 5, dtype=np.float32),
        },
        "opt": {"hot": np.full(CHUNK // 4, number, dtype=np.float32), "small": np.arange(number, number + 9)},
        "number": number,
    }


class Countdown:
    """Calls that a process makes until it dies, over all of its backends."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.backends: list[Mortal] = []

    def count(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            for backend in self.backends:
                backend.crashed = True


class Mortal(FaultBackend):
    def __init__(self, inner: MemoryBackend, countdown: Countdown) -> None:
        super().__init__(inner)
        self._countdown = countdown
        countdown.backends.append(self)

    def _enter(self, op: str, key: str) -> Any:
        self._countdown.count()
        return super()._enter(op, key)


class Process:
    """A store as one process has opened it."""

    def __init__(self, hot: MemoryBackend, cold: MemoryBackend) -> None:
        self.countdown = Countdown()
        self.store: Store = opened(Mortal(hot, self.countdown), Mortal(cold, self.countdown))
        self.runs: dict[str, Run] = {name: self.store.run(name, auto_gc=False) for name in RUNS}


@dataclasses.dataclass
class Known:
    """What the machine knows of one checkpoint.

    Attributes:
        sure: it was told that it is committed.
        forgotten: somebody asked for its deletion, or may have.
    """

    run: str
    sure: bool = False
    forgotten: bool = False
    pinned: bool = False


class Machine(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.stack = contextlib.ExitStack()
        self.hot, self.cold = self.stack.enter_context(places())
        self.processes = [Process(self.hot, self.cold), Process(self.hot, self.cold)]
        self.known: dict[int, Known] = {}
        self.number = 0
        self.may_be_trimmed = False
        self.compared: set[object] = set()
        self.damaged: set[str] = set()  # keys that the machine itself has deleted
        for who in (0, 1, 0, 1):
            self.save_now(who, None)

    # --- helpers ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def dying(self, who: int, calls: int | None) -> Iterator[Process]:
        """Whatever is done within ends after so many calls, if it has not ended by then."""
        process = self.processes[who]
        process.countdown.left = calls
        try:
            yield process
        except SimulatedCrash:
            pass
        finally:
            process.countdown.left = None
            if process.countdown.backends[0].crashed:
                self.processes[who] = Process(self.hot, self.cold)

    def fresh(self) -> Store:
        return opened(self.hot, self.cold)

    def pick(self, which: int, name: str, fits: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        with contextlib.closing(self.fresh()) as store:
            found = [checkpoint for checkpoint in store.run(name).checkpoints() if fits(checkpoint)]
        return found[which % len(found)] if found else None

    # --- rules --------------------------------------------------------------------------------

    @rule(who=WHO, calls=CALLS)
    def save(self, who: int, calls: int | None) -> None:
        self.save_now(who, calls)

    @rule(who=WHO, calls=CALLS, which=WHICH)
    def save_with_a_base_of_the_other(self, who: int, calls: int | None, which: int) -> None:
        base = self.pick(which, RUNS[1 - who], lambda checkpoint: checkpoint.restorable)
        self.save_now(who, calls, *([] if base is None else [base.id]))

    def save_now(self, who: int, calls: int | None, *bases: str) -> None:
        self.number += 1
        name, known = RUNS[who], Known(RUNS[who])
        self.known[self.number] = known
        with self.dying(who, calls) as process:
            pinned = [process.runs[RUNS[1 - who]].find(base) for base in bases]
            process.runs[name].save(self.number, content(self.number), bases=pinned).result()
            known.sure = True

    @rule(who=WHO, name=NAME, last=st.integers(1, 3), components=st.booleans())
    def policy(self, who: int, name: str, last: int, components: bool) -> None:
        self.may_be_trimmed = self.may_be_trimmed or components
        policy = Policy(Keep(last=last), {"opt": Keep(last=1)} if components else {})
        self.processes[who].store.policies.set(name, policy)

    @rule(who=WHO, calls=CALLS, tier=st.sampled_from([None, "hot", "cold"]), grace=st.booleans())
    def gc(self, who: int, calls: int | None, tier: str | None, grace: bool) -> None:
        with self.dying(who, calls) as process:
            process.store.gc(tier, grace=3600.0 if grace else 0.0)

    @rule(who=WHO, calls=CALLS)
    def replicate(self, who: int, calls: int | None) -> None:
        with self.dying(who, calls) as process:
            process.store.replication.run([process.store.tiers[1]])

    @rule(who=WHO, name=NAME, calls=CALLS, keep_last=st.sampled_from([None, 1]))
    def evict(self, who: int, name: str, calls: int | None, keep_last: int | None) -> None:
        with self.dying(who, calls) as process:
            process.store.evict(process.store.plan_evict([name], keep_last=keep_last))

    @rule(who=WHO, name=NAME, which=WHICH)
    def pin_or_unpin(self, who: int, name: str, which: int) -> None:
        found = self.pick(which, name, lambda checkpoint: checkpoint.restorable)
        if found is None:
            return
        run, known = self.processes[who].runs[name], self.known[found.step]
        if known.pinned:
            run.unpin(found.id)
        else:
            run.pin(found.id)
        known.pinned = not known.pinned

    @rule(who=WHO, name=NAME, which=WHICH, tag=st.sampled_from(["a", "b"]))
    def tag(self, who: int, name: str, which: int, tag: str) -> None:
        found = self.pick(which, name, lambda checkpoint: checkpoint.restorable)
        if found is not None:
            self.processes[who].runs[name].tag(found.id, tag, move=True)

    @rule(who=WHO, name=NAME, calls=CALLS, which=WHICH)
    def forget(self, who: int, name: str, calls: int | None, which: int) -> None:
        found = self.pick(which, name, lambda checkpoint: checkpoint.state in ("ok", "expiring"))
        if found is None:
            return
        known = self.known[found.step]
        with self.dying(who, calls) as process:
            before, known.forgotten = known.forgotten, True
            try:
                process.runs[name].forget(found.id)
            except GuardError:
                known.forgotten = before
            else:
                assert not known.pinned

    @rule(who=WHO, name=NAME, which=WHICH)
    def undelete(self, who: int, name: str, which: int) -> None:
        found = self.pick(which, name, lambda checkpoint: checkpoint.state in ("forgotten", "expiring"))
        if found is None:
            return
        with contextlib.suppress(ConflictError):
            self.processes[who].runs[name].undelete(found.id)
            with contextlib.closing(self.fresh()) as store:
                assert store.run(name).find(found.id).restorable

    @rule(who=WHO, name=NAME, which=WHICH, calls=CALLS)
    def damage_and_repair(self, who: int, name: str, which: int, calls: int | None) -> None:
        """An object of the hot tier is lost, of which the cold tier has all that names it."""
        self.processes[who].store.replication.run([self.processes[who].store.tiers[1]])
        with contextlib.closing(self.fresh()) as store:
            tier = store.tiers[0]
            elsewhere = {record.checkpoint for record in records(store.tiers[1])}
            here = records(tier)
            names = {record.attempt: set(Contents(tier, record).object_sizes) for record in here}
            safe = set().union(*names.values()) - set().union(
                *(names[record.attempt] for record in here if record.checkpoint not in elsewhere), set()
            )
        if not safe:
            return
        key = sorted(safe)[which % len(safe)]
        self.damaged.add(key)
        self.hot.delete([key])
        self.processes[who].store.verify()
        with self.dying(who, calls) as process:
            process.store.replication.repair(process.store.tiers[0])
        assert not list(
            self.processes[who].store.replication.repair(self.processes[who].store.tiers[0]).failed
        )

    @rule()
    def time_passes(self) -> None:
        """Long enough that whoever died counts as silent."""
        for place in (self.hot, self.cold):
            age_intents(place)

    @rule(who=WHO)
    def reopen(self, who: int) -> None:
        self.processes[who] = Process(self.hot, self.cold)

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "known"):
            return
        for place in (self.hot, self.cold):
            nothing_is_missing(place, self.damaged)
        with contextlib.closing(self.fresh()) as store:
            for name in RUNS:
                there = {}
                for checkpoint in store.run(name).checkpoints():
                    if checkpoint.restorable:
                        there[checkpoint.step] = self.loaded(checkpoint)
                        self.known[checkpoint.step].sure = True
                self.must_be_there(name, set(there))

    def loaded(self, checkpoint: Checkpoint) -> int:
        """Loads a checkpoint and compares all that it has, once for each set of records; its number."""
        copies = (checkpoint.step, *[(copy.tier.uuid, copy.attempt) for copy in checkpoint.copies])
        if copies in self.compared:
            return checkpoint.step
        self.compared.add(copies)
        wanted = content(checkpoint.step)
        parts = {component.name for component in checkpoint.components}
        if "opt" not in parts:
            assert self.may_be_trimmed
            del wanted["opt"]
        assert same(checkpoint.load(), wanted), f"{checkpoint} is not what was saved"
        return checkpoint.step

    def must_be_there(self, name: str, there: set[int]) -> None:
        """The newest that nobody has forgotten, and what is pinned."""
        alive = [n for n, known in self.known.items() if known.run == name and known.sure]
        kept = [n for n in alive if not self.known[n].forgotten]
        if kept:
            assert not alive or max(kept) in there or max(kept) < max(alive), f"{name} has lost its newest"
        for number in kept:
            assert number in there or not self.known[number].pinned, f"{number} is pinned, and gone"

    def teardown(self) -> None:
        if not hasattr(self, "known"):
            return
        try:
            self.quiet_rounds()
        finally:
            self.stack.close()

    def quiet_rounds(self) -> None:
        with contextlib.closing(self.fresh()) as store:
            for name in RUNS:
                for checkpoint in store.run(name).checkpoints():
                    with contextlib.suppress(NotFoundError):
                        store.run(name).unpin(checkpoint.id)
                    self.known[checkpoint.step].pinned = False
            self.time_passes()
            for _ in range(2):
                store.gc()
        self.compared.clear()
        self.nothing_is_lost()
        for place in (self.hot, self.cold):
            assert not garbage(place)
            left = [info.key for kind in ("intents/", "parts/", "dooms/") for info in place.list(kind)]
            assert not left


def nothing_is_missing(place: MemoryBackend, damaged: set[str]) -> None:
    """All that live records name is there, but for keys that are known to be lost."""
    tier = Tier.open(place, quiet())
    sizes = {key: len(data) for key, (data, _) in _places[place._name].items()}
    for record in records(tier):
        for key, size in Contents(tier, record).object_sizes.items():
            assert sizes.get(key) == size or key in damaged, f"step {record.step} misses {key}"


def _run(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    threads_away(monkeypatch)
    run_state_machine_as_test(
        Machine,
        settings=settings(deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), **options),
    )


@pytest.mark.timeout(300)
def test_whatever_is_done_nothing_that_counts_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = (Phase.explicit, Phase.generate)  # in seconds; `make soak` makes its findings small
    _run(monkeypatch, derandomize=True, phases=phases, max_examples=12, stateful_step_count=20)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_whatever_is_done_nothing_that_counts_is_lost_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(monkeypatch, derandomize=False, max_examples=600, stateful_step_count=50)
