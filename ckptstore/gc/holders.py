"""Who still needs which records: pins of savers, of readers, and of people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ckptstore.gc import listing
from ckptstore.gc.listing import SAVERS, Announced
from ckptstore.tier.intents import SILENT_SECONDS, Pin
from ckptstore.tier.tier import Tier


def is_silent(announced: Announced, now: float) -> bool:
    """Whether it has not been heard of for so long that its process counts as gone.

    Args:
        now: seconds since the epoch, by the tier's own clock.
    """
    return now - announced.heard_at > SILENT_SECONDS


def holders(
    tier: Tier, intents: Iterable[Announced], keys: Mapping[Pin, bool], now: float, *, count_silent: bool
) -> dict[Pin, str]:
    """Pinned records -> by whom. Silent readers hold nothing; silent savers do until they are fenced.

    Args:
        keys: commit keys, listed after the intents.
        count_silent: False leaves silent savers out: they will be fenced.
    """
    held: dict[Pin, str] = {}
    for announced in intents:
        document = announced.document
        silent = is_silent(announced, now)
        if document.kind in SAVERS:
            if (silent and not count_silent) or listing.is_decided(tier, announced, keys):
                continue
            why = f"pinned by {announced}" + (", silent and not to be fenced here" if silent else "")
        elif document.kind == "pin":
            why = f"held by {announced}"
        elif silent:
            continue
        else:
            why = f"being read: {announced}"
        for pin in document.pins:
            held.setdefault(pin, why)
    return held


def fence(
    tier: Tier,
    intents: Iterable[Announced],
    keys: Mapping[Pin, bool],
    now: float,
    among: Collection[Pin] | None = None,
) -> list[str]:
    """Ends silent savers that have no outcome; attempts of those that never commit now, or have just done.

    After any, records must be listed again.

    Args:
        among: only those who hold one of these; None: all.
    """
    return [
        announced.document.attempt
        for announced in intents
        if announced.document.kind in SAVERS
        and is_silent(announced, now)
        and (among is None or any(pin in among for pin in announced.document.pins))
        and not listing.is_decided(tier, announced, keys)
        and listing.fence_silent(tier, announced)
    ]
