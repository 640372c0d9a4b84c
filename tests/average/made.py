"""Checkpoints to average, in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptstore.store import Store
from tests.crash._support import make_place, memory_place, store_over


@contextlib.contextmanager
def new_store() -> Iterator[Store]:
    """A store in memory, with chunks of 64 KiB."""
    with memory_place() as place:
        make_place(place)
        with contextlib.closing(store_over(place)) as store:
            yield store


def saved(store: Store, *states: Any, run: str = "gpt") -> list[Any]:
    """The states as checkpoints of a new run, at the steps 1, 2, ..."""
    training = store.run(run)
    return [training.save(step, state, wait=True).result() for step, state in enumerate(states, start=1)]


def objects_of(store: Store) -> list[str]:
    return sorted(info.key for info in store.tier.backend.list(""))


def model_at(step: int) -> dict[str, Any]:
    """Chunks large and small, integers, values that differ from step to step."""
    random = np.random.default_rng(step)
    return {
        "model": {
            "wide": random.standard_normal((300, 400)).astype(np.float32),
            "half": random.standard_normal(70).astype(np.float16),
            "frozen": np.arange(5000, dtype=np.float64),
            "seen": np.array([step, 7]),
            "mask": np.array([step % 2 == 0]),
        },
        "optimizer": {"moment": random.standard_normal(40), "groups": [{"lr": 0.1 * step}]},
        "progress": {"step": step, "text": str(step) * 70_000},
    }
