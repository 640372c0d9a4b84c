"""What the crash, damage and soak tests share: small states made from numbers, stores over any backend, and
one check of everything that must hold in a place after whatever happened to it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckptstore.backend import Backend
from ckptstore.config import resolve
from ckptstore.environment import Environment
from ckptstore.model.documents import decode_commit, decode_epoch, decode_intent, decode_note
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.store import Store
from ckptstore.tier import commits, layout, runs
from ckptstore.tier.contents import Contents
from ckptstore.tier.retry import RetryingBackend
from ckptstore.tier.tier import Tier
from ckptstore_memory import MemoryBackend, _places

CHUNK_BYTES = 64 << 10
TRAIN = "train/exp 1"

_numbers = itertools.count()


def quiet() -> Environment:
    """A process whose waits take no time."""
    return Environment(sleep=lambda _seconds: None)


def make_state(step: int, salt: int = 0) -> dict[str, Any]:
    """The state at a step: large chunks new and unchanged, packs new and unchanged, a table too large for the
    record, values. The same numbers give the same bytes, in any process."""
    random = np.random.default_rng([step, salt])
    return {
        "model": {
            "frozen": np.arange(CHUNK_BYTES // 4, dtype=np.float32),
            "hot": random.standard_normal((3, CHUNK_BYTES // 8)),
            "small": {str(i): random.standard_normal(5).astype(np.float32) for i in range(3)},
        },
        "optimizer": {"moment": random.integers(0, 255, 700, dtype=np.uint8), "steps": [step, salt]},
        "still": {"a": np.arange(300, dtype=np.int16), "b": np.arange(9.0)},
        "texts": ["a" * 50_000, "b" * 60_000],
    }


def blank_like(state: Any) -> Any:
    """A state of that structure to restore into."""
    if isinstance(state, np.ndarray):
        return np.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank_like(item) for key, item in state.items()}
    return [0 for _ in state] if isinstance(state, list) else 0


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and every byte."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def store_over(backend: Backend, environment: Environment | None = None) -> Store:
    """A store as `ckptstore.open` makes it, over a backend of the test's own."""
    environment = environment or quiet()
    retrying = RetryingBackend(backend, sleep=environment.sleep)
    return Store(resolve("memory://only-its-form-counts"), Tier.open(retrying, environment))


def make_place(backend: Backend) -> None:
    """A new store there."""
    Tier.create(backend, quiet(), chunk_bytes=CHUNK_BYTES)


@contextlib.contextmanager
def memory_place() -> Iterator[MemoryBackend]:
    """An empty place in memory that ends with the block."""
    backend = MemoryBackend(f"crash-{next(_numbers)}")
    backend.create_root()
    try:
        yield backend
    finally:
        backend.drop()


@contextlib.contextmanager
def copy_of(place: MemoryBackend) -> Iterator[MemoryBackend]:
    """A place with the same objects."""
    with memory_place() as backend:
        _places[backend._name].update(_places[place._name])
        yield backend


@dataclasses.dataclass
class Model:
    """What a place must hold: checkpoint id -> (run, step, state), and those that may also be there."""

    sure: dict[str, tuple[str, int, Any]] = dataclasses.field(default_factory=dict)
    maybe: list[tuple[str, int, Any]] = dataclasses.field(default_factory=list)

    def saved(self, run: str, step: int, state: Any, checkpoint: str) -> None:
        self.sure[checkpoint] = (run, step, state)


def check_place(
    inner: Backend, model: Model, *, next_step: int | None = 1_000_000, wholly: bool = True
) -> None:
    """Opens the place as a new process does and checks all that must hold after any crash.

    Old checkpoints load exactly; another one is one of `model.maybe`, and whole; no live record names an
    object that is not there; every document decodes; `verify` finds nothing; the manifest made anew says the
    same (both only if `wholly`: they cost the most); and (with `next_step`) restoring and the next save work.
    """
    with contextlib.closing(store_over(inner)) as store:
        found = _check_checkpoints(store, model)
        check_objects(inner)
        if wholly:
            answers = _answers(store)
            store.rebuild()
            assert _answers(store) == answers, "the manifest made anew says something else"
            assert not store.verify().problems
        if next_step is not None:
            _check_next_save(store, next_step, found)


def _check_checkpoints(store: Store, model: Model) -> dict[str, Any]:
    names = sorted({run for run, _, _ in [*model.sure.values(), *model.maybe]} | {TRAIN})
    seen: dict[str, Any] = {}
    for name in names:
        for checkpoint in store.run(name).checkpoints():
            seen[checkpoint.id] = (name, checkpoint.step)
            assert checkpoint.state == "ok", f"{checkpoint} after a crash"
            loaded = checkpoint.load()
            if checkpoint.id in model.sure:
                run, step, state = model.sure[checkpoint.id]
                assert (run, step) == (name, checkpoint.step)
                assert same(loaded, state), f"{checkpoint} is not what was saved"
                continue
            fits = [m for m in model.maybe if m[:2] == (name, checkpoint.step) and same(loaded, m[2])]
            assert fits, f"{checkpoint} holds what nobody saved"
    lost = [model.sure[checkpoint][:2] for checkpoint in model.sure if checkpoint not in seen]
    assert not lost, f"lost: {lost}"
    return seen


def _answers(store: Store) -> list[tuple[Any, ...]]:
    return [
        (row.run, checkpoint.id, checkpoint.step, checkpoint.state, checkpoint.tags, dict(checkpoint.metrics))
        for row in store.runs()
        for checkpoint in store.run(row.run).checkpoints()
    ]


def _check_next_save(store: Store, step: int, found: Mapping[str, Any]) -> None:
    run = store.run(TRAIN)
    before = run.latest
    state = blank_like(make_state(0))
    assert run.restore(state) == (None if before is None else before.step)
    if before is not None:
        assert same(state, before.load())
    made = run.save(step, make_state(step)).result()
    assert made.id not in found
    latest = store.run(TRAIN).latest
    assert latest == made
    assert same(latest.load(), make_state(step))


def check_objects(inner: Backend) -> None:
    """Every object of every live record is there with its size; every document in the place decodes."""
    tier = Tier.open(inner, quiet())
    sizes = {info.key: info.size_bytes for info in inner.list("")}
    for record in records(tier):
        for key, size in Contents(tier, record).object_sizes.items():
            assert sizes.get(key) == size, f"step {record.step} names {key}: {sizes.get(key)} of {size} bytes"
    decoders = {"commits": decode_commit, "intents": decode_intent, "notes": decode_note}
    for key in sizes:
        decode: Any = decoders.get(key.partition("/")[0]) or (decode_epoch if "/epochs/" in key else None)
        if decode is not None and key.endswith(layout.DOCUMENT):
            decode(inner.get(key, max_bytes=1 << 26), key)


def ends(tier: Tier) -> dict[str, CommitRecord | CommitEnd]:
    """What stands at every commit key, by attempt."""
    found = {}
    for run_key in tier.run_keys():
        for attempt, _ in commits.list_commits(tier, run_key):
            end = commits.read_commit(tier, run_key, attempt)
            assert end is not None
            found[attempt] = end
    return found


def records(tier: Tier) -> list[CommitRecord]:
    """All live records."""
    return [end for end in ends(tier).values() if isinstance(end, CommitRecord)]


def epochs(store: Store, run: str) -> list[int]:
    """Numbers of the run's sessions, as the tier has them."""
    return runs.epoch_numbers(store.tier, store.run(run).key)
