"""Checkpoints and runs of the manifest as JSON (docs/json.md describes the shapes)."""

from __future__ import annotations

from typing import Any

from ckptstore.manifest import CheckpointRow, RunRow
from ckptstore.manifest.text import iso


def run_json(row: RunRow) -> dict[str, Any]:
    """A run."""
    latest = None
    if row.latest is not None:
        latest = {
            "id": row.latest,
            "step": row.latest_step,
            "saved_at": iso(row.latest_created_at),
            "bytes": row.latest_logical_bytes,
        }
    return {
        "run": row.run,
        "created_at": iso(row.created_at),
        "checkpoints": row.checkpoints,
        "restorable": row.restorable,
        "sessions": row.sessions,
        "latest": latest,
        "new_bytes": row.new_bytes,
    }


def checkpoint_json(row: CheckpointRow) -> dict[str, Any]:
    """A checkpoint."""
    return {
        "run": row.run,
        "step": row.step,
        "id": row.checkpoint,
        "latest": row.is_latest,
        "state": row.state,
        "restorable": row.restorable,
        "damaged_reason": row.damaged_reason,
        "invalid_reason": row.invalid_reason,
        "saved_at": iso(row.created_at),
        "verified_at": iso(row.verified_at),
        "metrics": row.metrics,
        "tags": row.tags,
        "pins": row.pins,
        "bytes": row.logical_bytes,
        "new_bytes": row.new_bytes,
        "reused_bytes": row.reused_bytes,
        "tensors": row.tensors,
        "chunks": row.chunks,
        "epoch": row.epoch,
        "sequence": row.sequence,
        "session": row.session,
        "attempt": row.attempt,
        "generation": row.generation,
        "origin": row.origin,
        "host": row.host,
        "world_size": row.world_size,
        "timings": row.timings,
        "tiers": row.tiers,
    }
