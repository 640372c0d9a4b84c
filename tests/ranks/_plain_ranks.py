"""Ranks without torch: threads over one place in memory, one running at a time, on a clock of their own.

    with crew(world=4) as ranks:
        ends = ranks.each(lambda rank: rank.run.save(1, rank.state(1)).result())

Time passes only when all ranks wait, so hours of waiting cost nothing, and the same numbers give the same
interleaving. Every call that a rank makes of its backend is a point: there it can die, or be stopped until no
other rank can go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import ckptstore
from ckptstore.backend import Backend, Capabilities
from ckptstore.environment import Environment
from ckptstore.run import Run
from ckptstore.store import Store
from ckptstore.testing import Call, Fault, FaultBackend, SimulatedCrash
from ckptstore.tier.retry import RetryingBackend
from ckptstore.tier.tier import Tier
from ckptstore_memory import MemoryBackend, _places
from tests.crash._support import blank_like, check_objects, make_place, quiet, same, store_over

NAME = "train/many"
DEADLINE = 2.0
"""Seconds of the ranks' own clock."""

ROWS = 12
_starts = itertools.count(1)
_numbers = itertools.count()

Work = Callable[["Rank"], Any]


# --- states -----------------------------------------------------------------------------------


def whole(step: int) -> dict[str, Any]:
    """The logical state at a step, as one process would hold it."""
    draw = np.random.default_rng(step)
    return {
        "model": {
            "rows": draw.standard_normal((ROWS, 300)).astype(np.float32),
            "large": draw.standard_normal((2, 2500)),
            "small": {str(i): draw.standard_normal(40).astype(np.float32) for i in range(4)},
            "frozen": np.arange(5000, dtype=np.float64),
        },
        "optimizer": {"steps": [step, 7]},
    }


def state_of(step: int, rank: int, world: int) -> dict[str, Any]:
    """What one rank holds of it: rows shared out, the rest whole; and a value of its own."""
    state = whole(step)
    state["model"]["rows"] = _rows(state["model"]["rows"], rank, world)
    state["own"] = {"cursor": ckptstore.PerRank(f"step {step} rank {rank}")}
    return state


def blank_of(rank: int, world: int) -> dict[str, Any]:
    """A state of that structure to restore into."""
    state: dict[str, Any] = blank_like(whole(0))
    state["model"]["rows"] = _rows(state["model"]["rows"], rank, world)
    state["own"] = {"cursor": ckptstore.PerRank("")}
    return state


def _rows(array: np.ndarray[Any, Any], rank: int, world: int) -> ckptstore.LocalShard:
    first, last = rank * ROWS // world, (rank + 1) * ROWS // world
    return ckptstore.LocalShard(array[first:last].copy(), global_shape=array.shape, offsets=(first, 0))


def holds(state: dict[str, Any], step: int, rank: int, world: int) -> bool:
    """Whether a restored state is that of the step, byte for byte."""
    return same(_plain(state), _plain(state_of(step, rank, world)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, ckptstore.LocalShard):
        return [value.array, str(value)]
    return value.value if isinstance(value, ckptstore.PerRank) else value


# --- ranks ------------------------------------------------------------------------------------


class _Points(FaultBackend):
    """One rank's way to the place: the rank is told of each call before it is made."""

    def __init__(self, inner: Backend, rank: Rank) -> None:
        super().__init__(inner)
        self._rank = rank

    def _enter(self, op: str, key: str) -> tuple[Call, Fault | None]:
        self._rank.at_point()
        return super()._enter(op, key)


@dataclasses.dataclass(frozen=True, slots=True)
class _Host(Environment):
    """A process on a host of its own: what ranks of one host share is not for threads of one process."""

    name: str = ""

    @property
    def host(self) -> str:
        return self.name


class Rank:
    """One rank: a store and a run of its own, and how its last work ended.

    Attributes:
        value, error: what the work returned or raised; neither if the rank died in it.
        seconds: of the crew's clock that the work took.
        stop_at: it stops before its call of this number, and goes on when no other rank can.
    """

    def __init__(self, crew: Crew, rank: int, world: int, **options: Any) -> None:
        self.crew, self.rank, self.world = crew, rank, world
        self.wakes: float | None = None
        self.stop_at: int | None = None
        self.was_stopped = self.is_stopped = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.go = threading.Semaphore(0)
        draw = random.Random(f"{crew.seed}.{rank}")
        self.environment = _Host(
            name=f"host-{rank}",
            now=lambda: crew.born + crew.now,
            monotonic=lambda: crew.now,
            random_bytes=draw.randbytes,
            sleep=self.pause,
        )
        self.points = _Points(crew.place, self)
        backend = RetryingBackend(self.points, sleep=self.pause, random=lambda: 0.5)
        self.store: Store = store_over(backend, self.environment)
        self.options = options
        self.run: Run = self.store.run(
            NAME,
            rank=rank,
            world_size=world,
            deadline_seconds=DEADLINE,
            **{"session_key": crew.key, **options},
        )

    @property
    def calls(self) -> list[Call]:
        return self.points.log

    @property
    def is_dead(self) -> bool:
        return self.points.crashed

    def state(self, step: int) -> dict[str, Any]:
        return state_of(step, self.rank, self.world)

    def save(self, step: int) -> ckptstore.Checkpoint:
        return self.run.save(step, self.state(step)).result()

    def restore(self, **options: Any) -> tuple[int | None, dict[str, Any]]:
        state = blank_of(self.rank, self.world)
        return self.run.restore(state, **options), state

    def pause(self, seconds: float) -> None:
        self.crew.wait_turn(self, self.crew.now + seconds)

    def at_point(self) -> None:
        if self.stop_at == len(self.points.log) + 1 and not self.was_stopped:
            self.was_stopped = self.is_stopped = True
            self.crew.wait_turn(self, None)
            self.is_stopped = False
        elif self.crew.draw is not None and not self.is_dead:
            self.crew.wait_turn(self, self.crew.now)

    def work(self, work: Work) -> None:
        self.go.acquire()
        self.value = self.error = None
        started = self.crew.now
        try:
            self.value = work(self)
        except SimulatedCrash:
            assert self.is_dead
        except BaseException as error:
            self.error = error
        self.seconds = self.crew.now - started
        self.crew.has_ended(self)


class Crew:
    """Ranks that train one run together.

    Args:
        seed: draws which rank goes on at each call of a backend; None: a rank goes on until it waits.
    """

    def __init__(self, place: MemoryBackend, world: int, *, seed: int | None = None, **options: Any) -> None:
        self.place = place
        self.seed = seed
        self.draw = None if seed is None else random.Random(seed)
        self.now = 0.0
        number = next(_starts)
        self.key = f"start {number}"
        self.born = 1.7e9 + 1000 * number  # so that ulids of two crews differ, though they draw the same
        self._back = threading.Semaphore(0)
        self._running: list[Rank] = []
        self._setting_up = True
        self.ranks = [Rank(self, rank, world, **options) for rank in range(world)]
        self._setting_up = False

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    @property
    def tier(self) -> Tier:
        """The place, as one looks at it from outside."""
        return Tier.open(self.place, quiet())

    @property
    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.is_dead]

    def each(self, work: Work, ranks: Sequence[int] | None = None) -> list[Any]:
        """Does it on all ranks (of those given), and returns what each returned; raises the first error."""
        self.try_each(work, ranks)
        for rank in self._chosen(ranks):
            if rank.error is not None:
                rank.error.add_note(f"on rank {rank.rank}")
                raise rank.error
        return [rank.value for rank in self._chosen(ranks)]

    def try_each(self, work: Work | dict[int, Work], ranks: Sequence[int] | None = None) -> list[Rank]:
        """As :meth:`each`, but raises nothing; each rank keeps its value or error."""
        chosen = self._chosen(ranks)
        threads = []
        for rank in chosen:
            own = work[rank.rank] if isinstance(work, dict) else work
            rank.wakes = self.now
            thread = threading.Thread(target=rank.work, args=(own,), name=f"rank-{rank.rank}", daemon=True)
            thread.start()
            threads.append(thread)
        self._running = list(chosen)
        while self._running:
            self._turn()
        for thread in threads:
            thread.join()
        return chosen

    def _chosen(self, ranks: Sequence[int] | None) -> list[Rank]:
        return [rank for rank in self.living if ranks is None or rank.rank in ranks]

    def _turn(self) -> None:
        ready = [rank for rank in self._running if rank.wakes is not None]
        if not ready:
            next_one = self._running[0]  # all others have given up: a stopped one goes on
        else:
            self.now = max(self.now, min(rank.wakes for rank in ready if rank.wakes is not None))
            due = [rank for rank in ready if rank.wakes is not None and rank.wakes <= self.now]
            next_one = due[0] if self.draw is None else self.draw.choice(due)
        next_one.go.release()
        assert self._back.acquire(timeout=60), f"rank {next_one.rank} neither waits nor ends"

    def wait_turn(self, rank: Rank, until: float | None) -> None:
        """Called by a rank: lets others run until then; None: until none of them can."""
        if not self._running or self._setting_up:
            return
        rank.wakes = until
        self._back.release()
        rank.go.acquire()

    def has_ended(self, rank: Rank) -> None:
        self._running.remove(rank)
        self._back.release()

    def close(self) -> None:
        for rank in self.ranks:
            rank.store.close()


class _NoExclusiveCreate(MemoryBackend):
    """A place that cannot create exclusively, as some file systems and object stores cannot."""

    @property
    def capabilities(self) -> Capabilities:
        full = super().capabilities
        return Capabilities(
            create_if_absent=False,
            ordered_list=full.ordered_list,
            ranged_read=full.ranged_read,
            part_bytes=full.part_bytes,
            concurrency=full.concurrency,
        )


@contextlib.contextmanager
def new_place(*, exclusive: bool = True) -> Iterator[MemoryBackend]:
    """A new store in memory that ends with the block."""
    cls = MemoryBackend if exclusive else _NoExclusiveCreate
    place = cls(f"ranks-{next(_numbers)}")
    place.create_root()
    try:
        make_place(place)
        yield place
    finally:
        place.drop()


@contextlib.contextmanager
def copied(place: MemoryBackend) -> Iterator[MemoryBackend]:
    """A place with the same objects."""
    own = MemoryBackend(f"ranks-{next(_numbers)}")
    own.create_root()
    _places[own._name].update(_places[place._name])
    try:
        yield own
    finally:
        own.drop()


@contextlib.contextmanager
def crew(
    place: MemoryBackend | None = None, *, world: int = 4, seed: int | None = None, **options: Any
) -> Iterator[Crew]:
    """A start of that many ranks, over a place of their own if none is given.

    Args:
        options: of :meth:`ckptstore.Store.run`.
    """
    with contextlib.ExitStack() as stack:
        own = place if place is not None else stack.enter_context(new_place())
        ranks = Crew(own, world, seed=seed, **options)
        try:
            yield ranks
        finally:
            ranks.close()


def steps_of(place: MemoryBackend) -> list[int]:
    """Steps of all checkpoints, as a process sees them that looks from outside."""
    with contextlib.closing(store_over(place)) as store:
        return [checkpoint.step for checkpoint in store.run(NAME, rank=0, world_size=1).checkpoints()]


def check_place(place: MemoryBackend, world: int = 4) -> list[int]:
    """Every checkpoint there holds exactly what was saved at its step, every object and document is whole.

    Returns:
        Their steps.
    """
    with contextlib.closing(store_over(place)) as store:
        found = store.run(NAME, rank=0, world_size=1).checkpoints()
        for checkpoint in found:
            assert checkpoint.state == "ok"
            loaded = checkpoint.load()
            own = loaded.pop("own")["cursor"]
            step = checkpoint.step
            assert same(loaded, whole(step)), f"{checkpoint} is not what was saved"
            assert dict(own) == {rank: f"step {step} rank {rank}" for rank in range(world)}
    check_objects(place)
    return [checkpoint.step for checkpoint in found]
