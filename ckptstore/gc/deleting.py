"""Deleting keys: in batches, with every key's own result, at a bearable pace."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ckptstore.errors import BackendError, GuardError
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

BATCH = 1000
"""Keys in one call of delete: as many as S3 takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How fast, and how long.

    Attributes:
        rest: pause after each batch, in shares of the time that it took.
        until: no batch begins after this, seconds of ``environment.monotonic``; None: without end.
    """

    rest: float = 0.0
    until: float | None = None


STEADY = Pace()


@dataclasses.dataclass(frozen=True, slots=True)
class Deleted:
    """What became of some keys.

    Attributes:
        gone: in their order.
        unfreed: those of them whose bytes the tier keeps.
        failures: (key, error).
        is_cut_short: time was up; the others were not tried.
    """

    gone: list[str]
    unfreed: list[str]
    failures: list[tuple[str, str]]
    is_cut_short: bool


def delete(tier: Tier, keys: Sequence[str], pace: Pace) -> Deleted:
    """Deletes `keys`; what cannot be deleted is told by key.

    Raises:
        GuardError: the tier answered for other keys.
        BackendError: it failed.
    """
    clock = tier.environment.monotonic
    done = Deleted([], [], [], False)
    for start in range(0, len(keys), BATCH):
        began = clock()
        if pace.until is not None and began >= pace.until:
            done = dataclasses.replace(done, is_cut_short=True)
            break
        batch = keys[start : start + BATCH]
        results = tier.backend.delete(batch)
        if [result.key for result in results] != list(batch):
            raise GuardError(f"{tier.url} answered a delete for other keys than were asked")
        for result in results:
            if result.error is None:
                done.gone.append(result.key)
                if result.is_unfreed:
                    done.unfreed.append(result.key)
            else:
                done.failures.append((result.key, result.error.message))
        if pace.rest and start + BATCH < len(keys):
            tier.environment.sleep(pace.rest * (clock() - began))
    if done.failures:
        log.warning("%d objects could not be deleted; the next round tries again", len(done.failures))
    return done


def tidy(tier: Tier, keys: Sequence[str]) -> int:
    """Deletes documents that nobody needs, and says how many; the next round tries the others again."""
    gone = 0
    for start in range(0, len(keys), BATCH):
        try:
            results = tier.backend.delete(keys[start : start + BATCH])
        except BackendError as error:
            log.warning("documents that nobody needs stay: %s", error.message)
            break
        for result in results:
            gone += result.error is None
            if result.error is not None:
                log.warning("%s stays: %s", result.key, result.error.message)
    return gone
