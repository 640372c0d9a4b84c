"""What the processes of the model share: one tier, as sets and maps of short names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

Record = frozenset[str] | str
"""Keys that a record names; or "VOID" or "GONE"."""


@dataclasses.dataclass(slots=True)
class World:
    """One tier.

    Attributes:
        records: attempt -> what stands at its commit key.
        objects: keys.
        intents: attempt -> (the attempt that it pins, whether it is a saver's).
        dooms: attempts.
        plans: collector -> keys that it is about to delete.
        sent: requests that the network may repeat: (what, key, content).
        lost: what has gone wrong; empty as long as nothing has.
    """

    records: dict[str, Record]
    objects: set[str]
    intents: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    dooms: set[str] = dataclasses.field(default_factory=set)
    plans: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    sent: set[tuple[str, str, frozenset[str]]] = dataclasses.field(default_factory=set)
    lost: str = ""

    @classmethod
    def of(cls, **records: Collection[str]) -> World:
        """A world in which these attempts have committed these keys."""
        named = {attempt: frozenset(keys) for attempt, keys in records.items()}
        return cls(dict(named), {key for keys in named.values() for key in keys})

    def copy(self) -> World:
        """Another one that says the same."""
        return World(
            dict(self.records),
            set(self.objects),
            dict(self.intents),
            set(self.dooms),
            dict(self.plans),
            set(self.sent),
            self.lost,
        )

    def key(self) -> tuple[object, ...]:
        """Equal for worlds that say the same."""
        return (
            frozenset(self.records.items()),
            frozenset(self.objects),
            frozenset(self.intents.items()),
            frozenset(self.dooms),
            frozenset(self.plans.items()),
            frozenset(self.sent),
        )

    def live(self) -> dict[str, frozenset[str]]:
        """The records among :attr:`records`."""
        return {a: record for a, record in self.records.items() if not isinstance(record, str)}

    def check(self) -> str:
        """What is wrong: a live record names what is not there, or no record is left; or ``""``."""
        if self.lost:
            return self.lost
        live = self.live()
        for attempt, keys in live.items():
            if not keys <= self.objects:
                return f"{attempt} names {sorted(keys - self.objects)}, which is gone"
        return "" if live else "no record is left"

    def garbage(self) -> set[str]:
        """Objects that no live record names, and documents that nobody needs any more."""
        named = {key for keys in self.live().values() for key in keys}
        return (
            (self.objects - named) | {f"intent {a}" for a in self.intents} | {f"doom {a}" for a in self.dooms}
        )
