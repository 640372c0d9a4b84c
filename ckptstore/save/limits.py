"""Which chunks get an object of their own, and which share one."""

from __future__ import annotations

import dataclasses

TINY_BYTES = 64 << 10
"""Smaller chunks take longer to hand to another thread, or to look at one by one, than to hash or copy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Where small ends: chunks under `pack_below_bytes` go into packs of up to `pack_bytes`."""

    pack_below_bytes: int
    pack_bytes: int

    @classmethod
    def of(cls, chunk_bytes: int) -> Limits:
        """For a store's chunk size; 4 and 64 MiB at the default of 16 MiB (measured: docs/design)."""
        return cls(min(4 << 20, max(chunk_bytes // 4, 1)), min(64 << 20, chunk_bytes * 4))
