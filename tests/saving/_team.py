"""Ranks as threads over one place in memory, with lanes as they are: saves overlap, one rank may be slower.

A rank sleeps a little, as its own random numbers say, before each call that it makes of the place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import ckptstore
from ckptstore.backend import Backend
from ckptstore.environment import Environment
from ckptstore.errors import BackendError, CkptstoreError
from ckptstore.model.record import CommitRecord
from ckptstore.testing import Call, Fault, FaultBackend
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier
from ckptstore_memory import MemoryBackend
from tests.crash._support import check_objects, make_place, memory_place, quiet, records, same, store_over

NAME = "team"
DEADLINE = 15.0
ROWS = 12
BROKEN = BackendError("the disk is gone (made to)")

_keys = itertools.count(1)


def whole(step: int) -> dict[str, Any]:
    """The state at a step. Before step 100 what it holds changes now and then; who writes what follows."""
    draw = np.random.default_rng(step)
    model: dict[str, Any] = {
        "rows": draw.standard_normal((ROWS, 300)).astype(np.float32),
        "large": draw.standard_normal((2, 2500)),
        "frozen": np.arange(5000, dtype=np.float64),
        **{f"small{i}": draw.standard_normal(40).astype(np.float32) for i in range(4)},
    }
    if step < 100 and step % 6 >= 3:
        model["now and then"] = draw.standard_normal(900)
        model["still"] = np.arange(700, dtype=np.int32)
    if 9 <= step < 100:
        model[f"late{step // 4}"] = np.full(1200, step // 4, np.int64)
    return {"model": model, "steps": [step]}


def state_of(step: int, rank: int, world: int) -> dict[str, Any]:
    """What one rank holds of it; what is shared out changes from step to step, too."""
    state = whole(step)
    for name in ("rows", "frozen") if step < 100 and step % 5 == 4 else ("rows",):
        array = state["model"][name]
        first, last = rank * len(array) // world, (rank + 1) * len(array) // world
        state["model"][name] = ckptstore.LocalShard(
            array[first:last].copy(), global_shape=array.shape, offsets=(first, *[0] * (array.ndim - 1))
        )
    return state


class _Slow(FaultBackend):
    """A rank's way to the place."""

    def __init__(self, inner: Backend, seed: str, slowness: float) -> None:
        super().__init__(inner)
        self._draw = random.Random(seed)
        self._slowness = slowness

    def _enter(self, op: str, key: str) -> tuple[Call, Fault | None]:
        with self._lock:
            seconds = self._draw.random() * self._slowness
        time.sleep(seconds)
        return super()._enter(op, key)


@dataclasses.dataclass
class Member:
    """One rank.

    Attributes:
        pendings: by step, of calls that returned one.
        told: by step, what the call raised.
    """

    rank: int
    backend: FaultBackend
    run: ckptstore.Run
    pendings: dict[int, ckptstore.PendingSave] = dataclasses.field(default_factory=dict)
    told: dict[int, BaseException] = dataclasses.field(default_factory=dict)

    def save(self, step: int, world: int) -> None:
        state = state_of(step, self.rank, world)
        try:
            self.pendings[step] = self.run.save(step, state)
        except CkptstoreError as error:
            self.told[step] = error
        for value in state["model"].values():  # training goes on
            array = value.array if isinstance(value, ckptstore.LocalShard) else value
            array[:] = 0

    @property
    def committed(self) -> list[int]:
        return [step for step, pending in self.pendings.items() if pending.level == "committed"]

    def break_once(self, call: int, op: str | None = None) -> None:
        """Its storage fails at so many calls from now, once."""
        self.backend.script.append(Fault("error", op=op, skip=call, error=BROKEN))


class Team:
    """Ranks that train one run together."""

    def __init__(self, place: MemoryBackend, world: int, seed: int, slow: int | None, **options: Any) -> None:
        self.place, self.world = place, world
        key = f"team {next(_keys)}"
        self.members = []
        for rank in range(world):
            slowness = 0.004 if rank == slow else 0.0005
            backend = _Slow(place, f"{seed}.{rank}", slowness)
            run = store_over(backend, Environment()).run(
                NAME,
                rank=rank,
                world_size=world,
                session_key=key,
                deadline_seconds=DEADLINE,
                **options,
            )
            self.members.append(Member(rank, backend, run))

    def __getitem__(self, rank: int) -> Member:
        return self.members[rank]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def train(
        self, steps: range, before: Callable[[Member, int], None] = lambda _member, _step: None
    ) -> None:
        """All save these steps, one right after the other, each at its own pace; returns when all has ended.

        Args:
            before: called on each rank's thread before each save.
        """
        failures: list[BaseException] = []

        def work(member: Member) -> None:
            try:
                for step in steps:
                    before(member, step)
                    member.save(step, self.world)
                assert member.run.wait(3 * DEADLINE)
            except BaseException as error:
                error.add_note(f"on rank {member.rank}")
                failures.append(error)

        threads = [threading.Thread(target=work, args=(member,), daemon=True) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5 * DEADLINE)
            assert not thread.is_alive(), "a rank hangs"
        if failures:
            raise failures[0]

    @property
    def tier(self) -> Tier:
        return Tier.open(self.place, quiet())

    def check(self) -> list[int]:
        """All that is there is exact, and reuses nothing but what its pin held. Returns the steps."""
        check_objects(self.place)
        with contextlib.closing(store_over(self.place)) as store:
            run = store.run(NAME, rank=0, world_size=1)
            for checkpoint in run.checkpoints():
                assert checkpoint.state == "ok"
                assert same(checkpoint.load(), whole(checkpoint.step)), f"{checkpoint} is not what was saved"
        found = sorted(records(self.tier), key=lambda record: (record.epoch, record.sequence))
        names = {record.checkpoint: self._objects(record) for record in found}
        for record in found:
            held = set().union(*(names[parent] for parent in record.parents))
            strange = {key for key in names[record.checkpoint] - held if record.attempt not in key}
            assert not strange, f"step {record.step} names what its pin did not hold: {strange}"
        return [record.step for record in found]

    def _objects(self, record: CommitRecord) -> set[str]:
        return set(Contents(self.tier, record).keys.keys)

    def written_bytes(self, step: int) -> dict[int, int]:
        """Chunk bytes that each rank has put for the last save of a step."""
        attempt = max((r for r in records(self.tier) if r.step == step), key=lambda r: r.sequence).attempt
        found = dict.fromkeys(range(self.world), 0)
        for info in self.place.list(""):
            kind, _, name = info.key.partition("/")
            if kind in ("chunks", "packs") and f".{attempt}." in info.key:
                found[int(name.rpartition(".")[2])] += info.size_bytes
        return found


@contextlib.contextmanager
def team(world: int = 3, *, seed: int = 0, slow: int | None = None, **options: Any) -> Iterator[Team]:
    """Ranks over a place of their own.

    Args:
        slow: this one makes each call about eight times as slowly as the others.
        options: of :meth:`ckptstore.Store.run`.
    """
    with memory_place() as place:
        make_place(place)
        yield Team(place, world, seed, slow, **options)
