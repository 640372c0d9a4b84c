"""All interleavings of a few processes, by their states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ckptstore.testing.protocol.processes import Process
from ckptstore.testing.protocol.world import World

LIMIT = 2_000_000
"""States after which a search says that the model is too large for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a search came to: how many states it saw, the first loss, and the steps that led there."""

    states: int
    loss: str | None = None
    steps: tuple[str, ...] = ()


def search(
    start: World, processes: Sequence[Process], *, rounds: Sequence[Process] = (), limit: int = LIMIT
) -> Found:
    """Looks for a loss in all interleavings.

    Of a state that was seen only a hash of 64 bits is kept (hash compaction: P. Wolper, D. Leroy, *Reliable
    Hashing without Collision Detection*, CAV 1993): of ten million states one is missed in a hundred thousand
    searches.

    Args:
        rounds: if given: whatever state all others stop in, these, one after the other, leave no garbage.
        limit: of states.

    Raises:
        ValueError: there are more.
    """
    seen: set[int] = set()
    stack: list[tuple[World, tuple[Process, ...], Any]] = [(start, tuple(processes), None)]
    while stack:
        world, running, trail = stack.pop()
        loss = world.check() or (_left_after(world, rounds) if rounds else "")
        if loss:
            return Found(len(seen), loss, _steps(trail))
        for i, process in enumerate(running):
            for step, after, me in process.moves(world):
                others = (*running[:i], me, *running[i + 1 :])
                key = hash((after.key(), *[other.key() for other in others]))
                if key not in seen or after.lost:
                    seen.add(key)
                    stack.append((after, others, (step, trail)))
        if len(seen) > limit:
            raise ValueError(f"more than {limit} states")
    return Found(len(seen))


def _left_after(world: World, rounds: Sequence[Process]) -> str:
    for one in rounds:
        while one.at is not None:
            _, world, one = next(iter(one.moves(world)))
            if loss := world.check():
                return f"in a quiet round: {loss}"
    left = world.garbage()
    return f"{sorted(left)} stays for ever" if left else ""


def _steps(trail: Any) -> tuple[str, ...]:
    steps: list[str] = []
    while trail is not None:
        step, trail = trail
        steps.append(step)
    return tuple(reversed(steps))
