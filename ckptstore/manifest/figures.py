"""Sums over a store for monitoring: what its saves wrote, and which of them failed."""

from __future__ import annotations

import dataclasses

from ckptstore.manifest.manifest import Manifest


@dataclasses.dataclass(frozen=True, slots=True)
class TierBytes:
    """What the records of a run's checkpoints in one tier say.

    Attributes:
        tier: its URL.
        new_bytes: written by the saves.
        reused_bytes: not written by them.
    """

    tier: str
    new_bytes: int
    reused_bytes: int


def bytes_by_tier(manifest: Manifest, run_key: str) -> list[TierBytes]:
    """One item per tier that holds a checkpoint of the run, hottest first."""
    return manifest.read(lambda c: [TierBytes(*row) for row in c.execute(_BYTES, (run_key,))])


def void_reasons(manifest: Manifest, run_key: str) -> dict[str, int]:
    """Reason -> attempts of the run that were fenced for it, each counted once whatever tiers say so."""
    return manifest.read(lambda c: dict(c.execute(_VOIDS, (run_key,)).fetchall()))


_BYTES = (
    "SELECT t.url, sum(r.new_bytes), sum(r.reused_bytes) FROM replicas AS r"
    " JOIN tiers AS t USING (tier_id) JOIN runs USING (run_id) WHERE run_key = ?"
    " GROUP BY t.tier_id ORDER BY t.tier_order"
)
_VOIDS = (
    "SELECT reason, count(*) FROM (SELECT attempt, min(reason) AS reason FROM ends JOIN runs USING (run_id)"
    " WHERE run_key = ? AND kind = 'void' GROUP BY attempt) GROUP BY reason ORDER BY reason"
)
