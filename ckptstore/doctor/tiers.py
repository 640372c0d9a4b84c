"""The tiers that are configured here, against those that the store knows of."""

from __future__ import annotations

from collections.abc import Iterator

from ckptstore.doctor.findings import Finding
from ckptstore.errors import StoreNotFoundError
from ckptstore.store import Store
from ckptstore.tier.places import Place, read_places

_WRITE_DOWN = "`ckptstore init` writes down what is configured, if that is what holds"


def unreachable(store: Store) -> Iterator[Finding]:
    """Tiers that do not answer."""
    for name, error in store.unreachable.items():
        meaning = error.hint or "what only it holds cannot be restored now"
        if isinstance(error, StoreNotFoundError):
            meaning = "is its disk mounted? If it is new, `ckptstore init` makes the tier"
        yield Finding("reachable", "fail", error.message, meaning, tier=name)


def compare(store: Store) -> Iterator[Finding]:
    """Tiers that are missing from the configuration, or described otherwise in the store."""
    configured = len(store.tiers) + len(store.unreachable)
    known: tuple[Place, ...] = ()
    for tier in store.tiers:
        found = read_places(tier)
        known = known or found or ()
        if configured > 1 and found is None:
            yield Finding("tiers", "warn", f"{tier.name} does not know of the others", _WRITE_DOWN)
        elif found and known and found != known:
            text = f"{tier.name} knows other tiers ({_names(found)}) than {store.tier.name} ({_names(known)})"
            yield Finding("tiers", "warn", text, _WRITE_DOWN)
    differences = list(_differences(store, known))
    yield from differences
    if not differences:
        names = [f"{tier.name} ({tier.requirement})" for tier in store.tiers]
        names += [f"{name} (does not answer)" for name in store.unreachable]
        yield Finding("tiers", "ok", ", ".join(names) if configured > 1 else "one")


def _differences(store: Store, known: tuple[Place, ...]) -> Iterator[Finding]:
    here = {tier.uuid: tier for tier in store.tiers}
    for place in known:
        tier = here.get(place.tier_uuid)
        if tier is None and place.name not in store.unreachable:
            meaning = (
                "checkpoints that only it has are not seen here, and none reach it from here: add it to "
                "ckptstore.toml; if it is gone for good, `ckptstore init` writes that down"
            )
            yield Finding(
                "tiers", "warn", f"the store has a tier {place.name!r} that is not configured here", meaning
            )
        elif tier is not None and len(here) + len(store.unreachable) > 1:
            if tier.requirement != place.requirement:
                text = f"{tier.name} has replicate = {tier.requirement!r} here, and {place.requirement!r}"
                yield Finding("tiers", "warn", f"{text} in the store", _WRITE_DOWN)
            if tier.name != place.name:
                yield Finding("tiers", "warn", f"{place.name} is called {tier.name} here", _WRITE_DOWN)
    uuids = [place.tier_uuid for place in known]
    both = [uuid for uuid in here if uuid in uuids]
    if both != sorted(both, key=uuids.index):
        text = f"their order here is {', '.join(here[uuid].name for uuid in both)}"
        yield Finding("tiers", "warn", f"{text}; in the store it is {_names(known)}", _WRITE_DOWN)


def _names(places: tuple[Place, ...]) -> str:
    return ", ".join(place.name for place in places)
