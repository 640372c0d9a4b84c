"""What a load moved, counted by its threads."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass(slots=True)
class Tally:
    """What was read, and what was not good.

    Attributes:
        bytes_read, reads: in all.
        bytes_by_tier: by name of the tier.
        rescued_chunks: those that the preferred copy did not give and another one did.
        damaged: (tier, key) of objects that were not what they should be -> a line each; with key ``""`` a
            tier that did not answer.
    """

    bytes_read: int = 0
    reads: int = 0
    bytes_by_tier: dict[str, int] = dataclasses.field(default_factory=dict)
    rescued_chunks: int = 0
    damaged: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, tier: str, nbytes: int) -> None:
        """One read."""
        with self._lock:
            self.bytes_read += nbytes
            self.reads += 1
            self.bytes_by_tier[tier] = self.bytes_by_tier.get(tier, 0) + nbytes

    def rescue(self, chunks: int) -> None:
        """Chunks that another copy gave."""
        with self._lock:
            self.rescued_chunks += chunks
