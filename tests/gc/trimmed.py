"""A run whose older checkpoints lose their optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptstore.backend import Backend
from ckptstore.gc.rounds import RoundReport, Settings, run_round
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.tier.policies import write_policy
from ckptstore_memory import MemoryBackend
from tests.crash._support import TRAIN, make_place, memory_place, store_over
from tests.gc.made import open_tier

KEEP_TWO = Policy(components={"optimizer": Keep(last=2)})


def state_at(step: int) -> dict[str, Any]:
    """Each component has chunks of its own, in packs and alone, and one that is the same at every step."""
    random = np.random.default_rng(step)

    def part(salt: int) -> dict[str, Any]:
        return {
            "large": random.standard_normal((3, 8 << 10)),
            "small": {str(i): random.standard_normal(9) for i in range(3)},
            "same": np.full(20_000, salt, np.float64),
        }

    return {
        "model": part(1),
        "optimizer": {**part(2), "groups": [{"lr": 0.1 * step}]},
        "texts": ["a" * 50_000, str(step) * 60_000],  # the tree is too large for the record
    }


def saved(place: Backend, *steps: int) -> None:
    with contextlib.closing(store_over(place)) as store, store.run(TRAIN) as run:
        for step in steps:
            run.save(step, state_at(step), wait=True)


@contextlib.contextmanager
def trained(*steps: int, policy: Policy | None = KEEP_TWO) -> Iterator[MemoryBackend]:
    """A place with these steps and a policy."""
    with memory_place() as place:
        make_place(place)
        saved(place, *steps)
        if policy is not None:
            write_policy([open_tier(place)], None, policy)
        yield place


def full(place: Backend, **options: Any) -> RoundReport:
    """A full round, as cron runs it."""
    return run_round(open_tier(place), Settings(**options))


def components(place: Backend) -> dict[int, list[str]]:
    """Step -> the components that its checkpoint has."""
    with contextlib.closing(store_over(place)) as store:
        return {found.step: list(found.saved.components) for found in store.run(TRAIN).checkpoints()}
