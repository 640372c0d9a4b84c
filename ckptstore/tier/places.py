"""Which tiers a store has, in which order, and what each requires: ``tiers/<n>.mp``, the newest counts.

Every tier holds a copy, so that the store knows of all of them wherever it is opened. Where they are and how
to get in is configuration and stands in no store: a ``ckptstore.toml`` adds URLs and credentials.
"""

from __future__ import annotations

import dataclasses
import logging

from ckptstore.errors import DamageError, DocumentError
from ckptstore.model.documents import Fields, seal, unseal
from ckptstore.tier import layout
from ckptstore.tier.tier import REQUIREMENTS, Requirement, Tier

log = logging.getLogger("ckptstore")

_MAX_TIERS = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One tier of a store, as the store knows it."""

    tier_uuid: str
    name: str
    requirement: Requirement


def place_of(tier: Tier) -> Place:
    """What the store is to know of an open tier."""
    return Place(tier.uuid, tier.name, tier.requirement)


def read_places(tier: Tier) -> tuple[Place, ...] | None:
    """The store's tiers, hottest first, as the newest readable document in `tier` says; None without one."""
    for number in reversed(_numbers(tier)):
        key = layout.places_key(number)
        try:
            data = tier.read(key)
            if data is not None:
                return _decode(data, f"{key} at {tier.url}")
        except DamageError as error:
            log.error("%s", error.message)
    return None


def write_places(tiers: list[Tier]) -> None:
    """Writes the tiers down, in each of them; those that already say so are left as they are."""
    wanted = tuple(place_of(tier) for tier in tiers)
    body = {
        "tiers": [dataclasses.asdict(place) for place in wanted],
        "at": tiers[0].environment.now(),
        "author": tiers[0].environment.author,
    }
    for tier in tiers:
        if read_places(tier) != wanted:
            number = 1 + max(_numbers(tier), default=0)
            tier.put_new(layout.places_key(number), seal("tiers", body))


def _numbers(tier: Tier) -> list[int]:
    stems = (layout.stem(info.key) for info in tier.listing("tiers/"))
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())


def _decode(data: bytes, what: str) -> tuple[Place, ...]:
    fields = Fields(unseal(data, "tiers", what=what)[1], what)
    places = []
    for item in fields.maps("tiers")[:_MAX_TIERS]:
        requirement = item.get("requirement", str)
        if requirement not in REQUIREMENTS:
            raise DocumentError(f"{what}: unknown requirement {requirement[:20]!r}")
        places.append(Place(item.get("tier_uuid", str), item.get("name", str), requirement))
    return tuple(places)
