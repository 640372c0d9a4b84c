"""Opening and making the tiers that a configuration names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from ckptstore.backend import open_backend
from ckptstore.config import StoreConfig, TierConfig
from ckptstore.environment import Environment
from ckptstore.errors import BackendError, CkptstoreError, ConflictError, StoreNotFoundError, WrongStoreError
from ckptstore.tier.asking import ask
from ckptstore.tier.marker import DEFAULT_CHUNK_BYTES
from ckptstore.tier.places import place_of, read_places, write_places
from ckptstore.tier.retry import RetryingBackend
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The tiers of an open store.

    Attributes:
        tiers: those that answer, hottest first; at least one.
        unreachable: name -> why, of the others.
        hottest: name of the tier that saves go to; where that one is not there, the store can only be read.
    """

    tiers: tuple[Tier, ...]
    unreachable: Mapping[str, CkptstoreError] = dataclasses.field(default_factory=dict)
    hottest: str | None = None


def open_tiers(config: StoreConfig, environment: Environment) -> Tiers:
    """Opens what is there; writes nothing.

    Raises:
        StoreNotFoundError: no tier has a marker.
        WrongStoreError: the tiers are of different stores, or of another one than configured.
        CkptstoreError: what the first tier says, if none can be opened.
    """
    tiers: list[Tier] = []
    unreachable: dict[str, CkptstoreError] = {}
    for tier_config in config.tiers:
        try:
            tiers.append(_open(tier_config, environment, is_alone=len(config.tiers) == 1))
        except (StoreNotFoundError, BackendError) as error:
            if len(config.tiers) == 1:
                raise
            unreachable[tier_config.name] = error
    if not tiers:
        raise next(iter(unreachable.values()))
    _check_uuids(config, tiers)
    for name, reason in unreachable.items():
        log.warning("tier %s is left out: %s", name, reason.message)
    if len(config.tiers) > 1:
        _compare_places(tiers, complete=not unreachable)
    return Tiers(tuple(tiers), unreachable, config.tiers[0].name)


def create_tiers(
    config: StoreConfig,
    environment: Environment,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    new: bool = False,
) -> Tiers:
    """Makes the tiers that are missing, all of one store, and writes down which there are.

    Args:
        chunk_bytes: of a new store; that of an old one stays.
        new: it is an error if there is nothing to make and nothing to write down.

    Raises:
        ConflictError: there is a store already (`new`), or other files.
    """
    found: dict[str, Tier] = {}
    for tier_config in config.tiers:
        try:
            found[tier_config.name] = _open(tier_config, environment)
        except StoreNotFoundError:
            continue
    if found:
        _check_uuids(config, list(found.values()))
        chunk_bytes = next(iter(found.values())).marker.chunk_bytes
    if new and len(found) == len(config.tiers) and _places_are_written(list(found.values())):
        raise ConflictError(
            f"there is already a store at {next(iter(found.values())).url}",
            hint="open it; `init` only makes new ones",
        )
    store_uuid = next(iter(found.values())).marker.store_uuid if found else config.store_uuid
    tiers = []
    for tier_config in config.tiers:
        tier = found.get(tier_config.name)
        if tier is None:
            backend = _backend(tier_config, environment)
            tier = _configured(
                Tier.create(backend, environment, chunk_bytes=chunk_bytes, store_uuid=store_uuid), tier_config
            )
            store_uuid = tier.marker.store_uuid
            if found:
                log.warning("made an empty tier %s at %s for store %s", tier.name, tier.url, store_uuid)
        tiers.append(tier)
    if len(tiers) > 1:
        write_places(tiers)
    return Tiers(tuple(tiers), {}, config.tiers[0].name)


def _backend(tier_config: TierConfig, environment: Environment) -> RetryingBackend:
    return RetryingBackend(
        open_backend(tier_config.url, tier_config.options),
        sleep=environment.sleep,
        monotonic=environment.monotonic,
    )


def _open(tier_config: TierConfig, environment: Environment, *, is_alone: bool = True) -> Tier:
    """Opens a tier; one that is not alone is waited for only so long."""
    backend = _backend(tier_config, environment)
    if is_alone:
        return _configured(Tier.open(backend, environment), tier_config)
    opened = ask(backend, tier_config.name, lambda: Tier.open(backend, environment))
    return _configured(opened, tier_config)


def _configured(tier: Tier, tier_config: TierConfig) -> Tier:
    tier.name, tier.requirement = tier_config.name, tier_config.requirement
    tier.limits = tier_config.limits
    return tier


def _check_uuids(config: StoreConfig, tiers: list[Tier]) -> None:
    wanted = config.store_uuid or tiers[0].marker.store_uuid
    for tier in tiers:
        if tier.marker.store_uuid != wanted:
            configured = " as configured" if config.store_uuid else f" as at {tiers[0].url}"
            raise WrongStoreError(
                f"the store at {tier.url} is {tier.marker.store_uuid}, not {wanted}{configured}",
                hint="check that the right disk is mounted, or correct store_uuid and the urls",
            )


def _places_are_written(tiers: list[Tier]) -> bool:
    wanted = tuple(place_of(tier) for tier in tiers)
    return len(tiers) == 1 or all(read_places(tier) == wanted for tier in tiers)


def _compare_places(tiers: list[Tier], *, complete: bool) -> None:
    """Says so when the configuration and what the store knows of its tiers differ."""
    known = read_places(tiers[0])
    here = tuple(place_of(tier) for tier in tiers)
    differs = known != here if complete else not set(here) <= set(known or ())
    if differs:
        log.warning(
            "the store at %s knows other tiers than are configured: `ckptstore init` writes them down",
            tiers[0].url,
        )
