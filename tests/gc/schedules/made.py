"""Several processes on one store, of which exactly one goes on between two calls of the backend.

Each process is a thread with a store of its own, over a backend whose every call is a point where another one
may go on, or where the process dies or stalls. Who does is drawn from a seed; :attr:`Scheduler.schedule` says
what was drawn. Nothing else is left to chance: pools make their calls in their caller's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ckptstore.gc.evict
import ckptstore.gc.rounds
import ckptstore.pool
import ckptstore.verify
from ckptstore.backend import Capabilities, ObjectInfo
from ckptstore.environment import Environment
from ckptstore.errors import CkptstoreError
from ckptstore.gc.collect import Report, collect
from ckptstore.gc.rounds import Settings, run_round
from ckptstore.gc.trim import trim
from ckptstore.model.retention import Keep
from ckptstore.testing.faults import FaultBackend
from ckptstore.tier.intents import SILENT_SECONDS, Intent, Pin
from ckptstore.tier.tier import Tier
from ckptstore_memory import MemoryBackend, _places
from tests.crash._support import check_objects, quiet, same, store_over
from tests.gc.made import garbage
from tests.inline import InlinePool, lanes_inline

CHUNK_BYTES = 64 << 10


def make_state(number: int) -> dict[str, Any]:
    """State `number`: a chunk that all share, one that 2, 3, 102, 103, 202, ... share, a pack, a value."""
    random_of = np.random.default_rng
    return {
        "frozen": np.arange(CHUNK_BYTES // 8, dtype=np.float64),
        "hot": random_of(number % 100 // 2).integers(0, 255, CHUNK_BYTES, dtype=np.uint8),
        "small": random_of(number).integers(0, 255, 100, dtype=np.uint8),
        "number": number,
    }


def threads_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread but those of the scheduler; no manifest but in memory; no lock that keeps rounds apart."""
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    monkeypatch.setattr(logging.getLogger("ckptstore"), "disabled", True)
    monkeypatch.setattr(Intent, "start", lambda _self: None)
    monkeypatch.setattr(ckptstore.gc.rounds, "Lock", NoLock)
    lanes_inline(monkeypatch)
    modules = [module for name, module in sys.modules.items() if name.startswith("ckptstore.")]
    for module in modules:
        if module is not ckptstore.pool and getattr(module, "Pool", None) is ckptstore.pool.Pool:
            monkeypatch.setattr(module, "Pool", InlinePool)
        for of_class in [found for found in vars(module).values() if isinstance(found, type)]:
            for attribute in vars(of_class).values():
                if hasattr(attribute, "lock") and isinstance(attribute, functools.cached_property):
                    # Before Python 3.12 all instances share it: whoever waits for his turn would hold it.
                    monkeypatch.setattr(attribute, "lock", contextlib.nullcontext())


class NoLock:
    """The lock of full rounds is thrift only; without it they meet."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.now = 0.0

    def __enter__(self) -> NoLock:
        key = f"gc/lock.{self._tier.environment.new_ulid()}"
        self._tier.backend.put(key, [b"0"])
        self.now = self._tier.backend.head(key).modified
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Scheduler:
    """Lets one thread go on at a time; who it is, is drawn anew at some of its calls.

    Args:
        seed: of all that is drawn.
        crashes: share of the calls at which the process dies.
        stalls: share of those at which it is not heard of for an hour, by the clock of the tier.

    Attributes:
        schedule: who made how many calls in a row, and what befell it.
    """

    def __init__(self, seed: int, *, crashes: float = 0.0, stalls: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.schedule: list[str] = []
        self._crashes, self._stalls = crashes, stalls
        self._stay = self.random.choice([0.5, 0.8, 0.95])
        self._gates: dict[str, threading.Semaphore] = {}
        self._waiting: set[str] = set()
        self._stalled: dict[str, int] = {}
        self._turn = ""
        self._began = time.time()
        self._calls = 0

    def run(self, works: dict[str, Callable[[], object]]) -> dict[str, BaseException]:
        """Runs all to their end; name -> error of those that failed."""
        errors: dict[str, BaseException] = {}
        self._gates = {name: threading.Semaphore(0) for name in works}

        def body(name: str, work: Callable[[], object]) -> None:
            self._gates[name].acquire()
            try:
                work()
            except BaseException as error:
                errors[name] = error
            finally:
                self._waiting.discard(name)
                self._hand_over()

        self._waiting = set(works)
        threads = [
            threading.Thread(target=body, args=item, name=item[0], daemon=True) for item in works.items()
        ]
        for thread in threads:
            thread.start()
        self._hand_over()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} is stuck: {self}"
        return errors

    def step(self, backend: Stepped) -> None:
        """A call of `backend` is about to be made."""
        self._calls += 1
        draw = self.random.random()
        if draw < self._crashes:
            self.schedule.append(f"{backend.name} dies")
            backend.crashed = True
            return
        if draw > 1 - self._stalls:
            self.schedule.append(f"{backend.name} stalls")
            backend.age()
            self._stalled[backend.name] = self.random.choice([20, 60, 1000])
            self._hand_over()
        elif self.random.random() < self._stay:
            return
        else:
            self._hand_over()
        self._gates[backend.name].acquire()

    def _hand_over(self) -> None:
        """Chooses who goes on; whoever is stalled only when his time is over, or nobody else is there."""
        for name in list(self._stalled):
            self._stalled[name] -= 1
            if self._stalled[name] <= 0:
                del self._stalled[name]
        ready = sorted(self._waiting - self._stalled.keys()) or sorted(self._waiting)
        if ready:
            self._turn = self.random.choice(ready)
            self.schedule.append(f"{self._calls}:{self._turn}")
            self._gates[self._turn].release()

    def environment(self) -> Environment:
        """Of one process: what is drawn there, is drawn from the seed; a call takes a millisecond."""
        return Environment(
            now=lambda: self._began + self._calls / 1000,
            monotonic=lambda: self._calls / 1000,
            random_bytes=self.random.randbytes,
            sleep=lambda _seconds: None,
        )

    def __str__(self) -> str:
        return " ".join(self.schedule)


class Stepped(FaultBackend):
    """A backend whose every call is a point of the scheduler; so is every few keys of a listing."""

    def __init__(self, inner: MemoryBackend, scheduler: Scheduler, name: str) -> None:
        super().__init__(inner)
        self.name = name
        self._scheduler = scheduler
        self._place = inner
        self._intents: set[str] = set()
        self.environment = scheduler.environment()

    @property
    def capabilities(self) -> Capabilities:
        """Without order: see :meth:`list`."""
        return dataclasses.replace(self.inner.capabilities, ordered_list=False)

    def _enter(self, op: str, key: str) -> Any:
        self._scheduler.step(self)
        if op == "put" and key.startswith("intents/"):
            self._intents.add(key)
        return super()._enter(op, key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """In no order, and each key as it is when the listing comes to it, or not at all."""
        keys = [info.key for info in super().list(prefix)]
        self._scheduler.random.shuffle(keys)
        for i, key in enumerate(keys):
            if i % 2:
                self._scheduler.step(self)
                self._check_alive("list", prefix)
            found = _places[self._place._name].get(key)
            if found is not None:
                yield ObjectInfo(key, len(found[0]), found[1])

    def age(self) -> None:
        """This process has not been heard of for an hour."""
        age_intents(self._place, self._intents)


class Steady(FaultBackend):
    """A backend of somebody who is alone."""

    environment = quiet()


Process = Stepped | Steady


def age_intents(place: MemoryBackend, keys: set[str] | None = None) -> None:
    """Makes intents look as if they had last been heard of long ago; all unless told which."""
    objects = _places[place._name]
    for key, (content, modified) in list(objects.items()):
        if key.startswith("intents/") and (keys is None or key in keys):
            objects[key] = (content, modified - 4 * SILENT_SECONDS)


# --- what processes do ------------------------------------------------------------------------------


@dataclasses.dataclass
class Told:
    """What processes know to be true: attempt -> number of its state, and what rounds were to take."""

    committed: dict[str, int] = dataclasses.field(default_factory=dict)
    loaded: int = 0
    gone_while_reading: int = 0


def checked(checkpoint: Any) -> int:
    """Loads a checkpoint; the number of the state that it holds, every byte of it, trimmed or not."""
    state = checkpoint.load()
    number = state["number"]
    wanted = make_state(number)
    if "small" not in state:
        assert "small" not in {part.name for part in checkpoint.components}
        del wanted["small"]
    assert same(state, wanted), f"{checkpoint} does not hold state {number}"
    assert isinstance(number, int)
    return number


def save(backend: Process, told: Told, run: str, numbers: list[int], bases: list[tuple[str, int]]) -> None:
    """A session of `run`: saves these states, the first one with chunks of `bases`, (run, step)."""
    with contextlib.closing(store_over(backend, backend.environment)) as store:
        training = store.run(run)
        pinned = [store.run(name)[step] for name, step in bases]
        for number in numbers:
            made = training.save(number, make_state(number), bases=pinned).result()
            told.committed[made.id] = number
            pinned = []
        training.close()


def read(backend: Process, told: Told, run: str, step: int) -> None:
    """Loads; either all is exact, or it hears that the checkpoint is gone."""
    with contextlib.closing(store_over(backend, backend.environment)) as store:
        checkpoint = store.run(run)[step]
        try:
            assert checked(checkpoint) == step
            told.loaded += 1
        except CkptstoreError:
            told.gone_while_reading += 1


def light_round(backend: Process, *targets: Pin) -> Report:
    """A round on given records."""
    return collect(Tier.open(backend, backend.environment), targets, reason="test")


def trim_small(backend: Process, pin: Pin) -> None:
    """Takes a component from a checkpoint."""
    trim(Tier.open(backend, backend.environment), *pin, ["small"], reason="test")


def full_round(backend: Process, keep: int) -> Report:
    """A full round that keeps the last `keep` of every run."""
    return run_round(
        Tier.open(backend, backend.environment), Settings(), rules_of=lambda _run: Keep(last=keep)
    )


# --- what must hold afterwards ------------------------------------------------------------------------


def check(place: MemoryBackend, told: Told, always: Sequence[set[int]]) -> None:
    """Nothing that is named is missing; every checkpoint loads exactly; after quiet rounds nothing is left.

    Args:
        always: of each of these sets of states one must be there.
    """
    check_objects(place)
    check_loads(place, told, always)
    age_intents(place)
    for _ in range(2):
        full_round(Steady(place), 1)
    check_objects(place)
    assert not garbage(place), "objects stay that nobody names"
    left = [info.key for kind in ("intents/", "parts/", "dooms/") for info in place.list(kind)]
    assert not left, f"documents stay: {left}"


def check_loads(place: MemoryBackend, told: Told, always: Sequence[set[int]]) -> None:
    """Loads all that is there."""
    found: set[int] = set()
    with contextlib.closing(store_over(place)) as store:
        for run in store.runs():
            for checkpoint in store.run(run.run).checkpoints():
                if checkpoint.state != "doomed":
                    number = checked(checkpoint)
                    assert told.committed.get(checkpoint.id, number) == number
                    found.add(number)
    for wanted in always:
        assert wanted & found, f"none of {sorted(wanted)} is left"
