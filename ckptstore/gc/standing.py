"""Intents and commit keys as they stand together: listed in the order that makes collecting safe.

A listing is no snapshot. While it goes on, a saver may commit at a key that it has passed, and another
collector, who sees that, may take the record that the saver had pinned: this listing then shows neither. So
it counts only when no record became GONE from the listing before it until its records are read
(docs/design/018); one that was not there before and reads GONE now counts as such.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from ckptstore.errors import BusyError
from ckptstore.gc import listing
from ckptstore.gc.holders import fence
from ckptstore.gc.listing import Announced
from ckptstore.model.record import CommitRecord
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier

_TRIES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What stood there.

    Attributes:
        intents: listed before the keys.
        keys: (run key, attempt) -> whether a record is there, or VOID or GONE.
        fenced: attempts of silent savers that were ended.
    """

    intents: list[Announced]
    keys: dict[Pin, bool]
    fenced: list[str]


def stand(
    tier: Tier,
    now: float,
    *,
    before: Mapping[Pin, bool],
    known: dict[Pin, CommitRecord],
    intents_before: Iterable[Announced] = (),
    among: Collection[Pin] | None = None,
) -> Standing:
    """Lists intents, then commit keys; ends silent savers and lists again.

    Args:
        now: by the tier's own clock.
        before: an earlier listing of commit keys.
        known: records that were read before; all others are added.
        intents_before: of intents.
        among: only savers who hold one of these are ended; None: all that are silent.

    Raises:
        DocumentError, FormatTooNewError: an intent or a record cannot be read.
        GuardError: a listing is short.
        BusyError: other rounds take records all the time.
    """
    fenced: list[str] = []
    announced_before = [announced.document.attempt for announced in intents_before]
    for _ in range(_TRIES):
        intents = listing.read_intents(tier, announced_before)
        keys = listing.list_commit_keys(tier, before)
        ended = [attempt for attempt in fence(tier, intents, keys, now, among) if attempt not in fenced]
        if ended:  # one may have committed after all, just before
            fenced += ended
            keys = listing.list_commit_keys(tier, keys)
        records = listing.read_records(tier, keys, known)
        if not any(before.get(pin, True) and pin not in records for pin in keys):
            return Standing(intents, keys, fenced)
        before, announced_before = keys, [announced.document.attempt for announced in intents]
    raise BusyError(f"other rounds are collecting in tier {tier.name!r} all the time", hint="try again later")
