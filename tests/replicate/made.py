"""Stores of two tiers in memory, over backends that may fail on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ckptstore.backend import Backend
from ckptstore.config import StoreConfig, TierConfig
from ckptstore.environment import Environment
from ckptstore.store import Store
from ckptstore.tier.places import write_places
from ckptstore.tier.retry import RetryingBackend
from ckptstore.tier.tier import Tier
from ckptstore.tiers import Tiers
from ckptstore_memory import MemoryBackend
from tests.crash._support import CHUNK_BYTES, memory_place, quiet, same

RUN = "train/exp 1"
TOML = """
[[tiers]]
name = "hot"
url = "hot"

[[tiers]]
name = "cold"
url = "cold"
replicate = "{required}"
"""


@contextlib.contextmanager
def places() -> Iterator[tuple[MemoryBackend, MemoryBackend]]:
    """A new store of two tiers: hot and cold."""
    with memory_place() as hot, memory_place() as cold:
        first = Tier.create(hot, quiet(), chunk_bytes=CHUNK_BYTES)
        second = Tier.create(cold, quiet(), chunk_bytes=CHUNK_BYTES, store_uuid=first.marker.store_uuid)
        first.name, second.name = "hot", "cold"
        write_places([first, second])
        yield hot, cold


def opened(
    hot: Backend, cold: Backend, *, requirement: Any = "manual", environment: Environment | None = None
) -> Store:
    """The store as a process opens it."""
    environment = environment or quiet()
    tiers = []
    for name, backend in (("hot", hot), ("cold", cold)):
        tier = Tier.open(RetryingBackend(backend, sleep=environment.sleep), environment)
        tier.name, tier.requirement = name, requirement
        tiers.append(tier)
    config = StoreConfig(tuple(TierConfig(tier.url, {}, tier.name) for tier in tiers))
    return Store(config, Tiers(tuple(tiers), {}, "hot"))


def alone(place: Backend) -> Store:
    """One tier of it, as a host sees it that has nothing else."""
    tier = Tier.open(place, quiet())
    return Store(StoreConfig((TierConfig(tier.url, {}),)), tier)


def replicate(store: Store) -> Any:
    """One round to the cold tier."""
    (report,) = store.replication.run([store.tiers[1]])
    return report


def owed(store: Store) -> int:
    """How many checkpoints the cold tier is owed now."""
    return sum(not item.why for _, _, item in store.replication.to(store.tiers[1]).owing())


def holds(place: Backend, *states: tuple[int, Any]) -> None:
    """The place, opened alone, has exactly these steps of the run, each exact, and verifies clean."""
    with contextlib.closing(alone(place)) as store:
        found = store.run(RUN).checkpoints()
        assert [checkpoint.step for checkpoint in found] == [step for step, _ in states]
        for checkpoint, (_, state) in zip(found, states, strict=True):
            assert checkpoint.restorable
            assert same(checkpoint.load(), state)
        assert not store.verify().problems
