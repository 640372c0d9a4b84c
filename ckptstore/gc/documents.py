"""``gc/<round>.mp``: what a round is about to delete, written before it deletes; afterwards its log.

A plan that was cut off is taken up by the next round. That is safe at any later time: each of its keys was
named by doomed records only, a doom is never taken back, and no key is ever written a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from ckptstore.errors import DocumentError
from ckptstore.model.documents import Fields, seal, unseal
from ckptstore.model.ids import ObjectName
from ckptstore.tier import layout
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier

State = Literal["begun", "planned", "done"]
STATES: tuple[State, ...] = ("begun", "planned", "done")

KEYS_PER_PLAN = 50_000
"""So that a plan stays a document of a size that every reader takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanDoc:
    """A round's plan, or one part of a long one.

    Attributes:
        name: the ULID that is its key.
        state: "begun": nothing is decided; "planned": keys may be gone; "done": they are.
        records: (run key, attempt) of the records that become GONE.
        keys: of the objects to delete; empty once done.
    """

    name: str
    state: State
    at: float
    author: str
    reason: str
    records: tuple[Pin, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Where it is."""
        return plan_key(self.name)


def plan_key(name: str) -> str:
    """A round's plan."""
    return f"gc/{name}{layout.DOCUMENT}"


def put_plan(tier: Tier, plan: PlanDoc) -> None:
    """Writes or overwrites a plan; durable after the next sync."""
    body = {
        "state": plan.state,
        "at": plan.at,
        "author": plan.author,
        "reason": plan.reason,
        "records": [list(record) for record in plan.records],
        "keys": list(plan.keys),
    }
    tier.backend.put(plan.key, [seal("gc", body)])


def read_plans(tier: Tier) -> Iterator[PlanDoc]:
    """All plans, oldest first; names that are none are left alone.

    Raises:
        DocumentError, FormatTooNewError: one cannot be read.
    """
    keys = [info.key for info in tier.listing("gc/") if info.key.endswith(layout.DOCUMENT)]
    for key in sorted(keys):
        data = tier.read(key)
        if data is not None:  # else it was reaped just now
            yield _decode(data, key)


def _decode(data: bytes, key: str) -> PlanDoc:
    fields = Fields(unseal(data, "gc", what=key)[1], key)
    state = fields.get("state", str)
    if state not in STATES:
        raise DocumentError(f"{key}: unknown state {state[:20]!r}")
    records = []
    for record in fields.get("records", list):
        if not (isinstance(record, list) and len(record) == 2 and all(isinstance(x, str) for x in record)):
            raise DocumentError(f"{key}: a record is malformed")
        records.append((record[0], record[1]))
    keys = fields.strings("keys")
    for named in keys:  # what is deleted on a document's word is a chunk or a pack, and nothing else
        try:
            ObjectName.parse(named)
        except ValueError as error:
            raise DocumentError(f"{key}: {error}") from error
    return PlanDoc(
        name=layout.stem(key),
        state=state,
        at=fields.number("at"),
        author=fields.get("author", str),
        reason=fields.get("reason", str),
        records=tuple(records),
        keys=keys,
    )


def split_keys(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Keys in parts that fit a plan each; at least one part."""
    parts = [tuple(keys[i : i + KEYS_PER_PLAN]) for i in range(0, len(keys), KEYS_PER_PLAN)]
    return parts or [()]
