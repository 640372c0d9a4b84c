"""The SQLite manifest: what people and programs query. The only place with SQL.

A cache over the tiers' documents: lost, stale or damaged, it is made anew, and no answer changes.
"""

from ckptstore.manifest.errors import ManifestUnusable
from ckptstore.manifest.ingest import MAX_EXPANDED_BOXES
from ckptstore.manifest.manifest import Manifest
from ckptstore.manifest.rows import (
    BoxRow,
    CheckpointRow,
    LayoutRow,
    LayoutRows,
    PinRow,
    RunRow,
    TensorAt,
    TensorRow,
    TensorRows,
    TierRow,
)

__all__ = [
    "MAX_EXPANDED_BOXES",
    "BoxRow",
    "CheckpointRow",
    "LayoutRow",
    "LayoutRows",
    "Manifest",
    "ManifestUnusable",
    "PinRow",
    "RunRow",
    "TensorAt",
    "TensorRow",
    "TensorRows",
    "TierRow",
]
