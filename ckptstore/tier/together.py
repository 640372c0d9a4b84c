"""Requests that need not wait for each other, at once where each is a way over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptstore.backend import Backend
from ckptstore.pool import Pool

T = TypeVar("T")


def together(backend: Backend, calls: Sequence[Callable[[], T]]) -> list[T]:
    """What each call gives, in their order; a disk answers quicker than a thread begins.

    Raises:
        The first error of a call; all that had begun has ended.
    """
    capabilities = backend.capabilities
    if len(calls) < 2 or capabilities.cheap_head:
        return [call() for call in calls]
    given: dict[int, T] = {}

    def make(number: int, call: Callable[[], T]) -> None:
        given[number] = call()

    with Pool(min(len(calls), capabilities.concurrency), name="ckptstore-ask") as pool:
        for number, call in enumerate(calls):
            pool.submit(make, number, call)
        pool.drain()
    return [given[number] for number in range(len(calls))]
