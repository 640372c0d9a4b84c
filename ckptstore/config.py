"""Where a store is: a directory, a URL, or a ``ckptstore.toml`` that names its tiers."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.backend import split_scheme
from ckptstore.errors import StoreNotFoundError, UsageError
from ckptstore.model.byte_sizes import bytes_of
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.tier.tier import MAIN, REQUIREMENTS, UNLIMITED, Limits, Requirement

FILE_NAME = "ckptstore.toml"
VARIABLE = "CKPTSTORE"

_TIER_KEYS = {
    "name",
    "url",
    "scope",
    "replicate",
    "max_bytes_per_second",
    "concurrency",
    "options",
    "retention",
}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier as configured.

    Attributes:
        url: where it is.
        options: for its backend.
        name: what people call it; unique in the store.
        requirement: whether checkpoints must reach it.
        limits: for copying to and from it in the background.
        retention: its own policy.
    """

    url: str
    options: Mapping[str, object]
    name: str = MAIN
    requirement: Requirement = "async"
    limits: Limits = UNLIMITED
    retention: Keep | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FilePolicies:
    """What a ``ckptstore.toml`` says is to be kept.

    Attributes:
        path: of the file.
        default: ``[retention]``, and ``[tiers.retention]`` of each tier; None when it has neither.
        runs: ``[runs."PATTERN".retention]``, in the file's order.
    """

    path: str
    default: Policy | None = None
    runs: tuple[tuple[str, Policy], ...] = ()

    def of_run(self, run: str) -> Policy | None:
        """What the first pattern that fits a run's name says; None when none fits."""
        return next((policy for pattern, policy in self.runs if fnmatch.fnmatchcase(run, pattern)), None)


@dataclasses.dataclass(frozen=True, slots=True)
class StoreConfig:
    """What a location says.

    Attributes:
        tiers: hottest first.
        store_uuid: the store that must be there, if the file names one: the missing-mount rule then holds
            across restarts too.
        policies: what is to be kept; None when the location is no file, which could say so.
    """

    tiers: tuple[TierConfig, ...]
    store_uuid: str | None = None
    policies: FilePolicies | None = None


def resolve(location: str | os.PathLike[str]) -> StoreConfig:
    """Reads a location.

    Raises:
        StoreNotFoundError: a toml file that is not there.
        UsageError: a toml file that cannot be used; names the key.
    """
    text = os.fspath(location)
    if not text:
        raise UsageError(
            "the location of a store must not be empty", hint="give a directory, a URL or a .toml file"
        )
    if text.endswith(".toml"):
        return _read(Path(text))
    return StoreConfig((TierConfig(text, {}),))


def find_location(start: Path, environ: Mapping[str, str]) -> str | None:
    """``$CKPTSTORE``, else the nearest ``ckptstore.toml`` from `start` upwards; None without either."""
    if environ.get(VARIABLE):
        return environ[VARIABLE]
    for directory in (start, *start.parents):
        candidate = directory / FILE_NAME
        if candidate.is_file():
            return str(candidate)
    return None


def _read(path: Path) -> StoreConfig:
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no file {path}", hint="`ckptstore init` makes a store") from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    unknown = sorted(set(body) - {"tiers", "store_uuid", "retention", "runs"})
    if unknown:
        raise UsageError(
            f"{path}: unknown key {unknown[0]!r}",
            hint='known keys: store_uuid, [[tiers]], [retention], [runs."PATTERN".retention]',
        )
    tiers = body.get("tiers")
    if not isinstance(tiers, list) or not tiers:
        raise UsageError(f"{path}: it names no tier", hint='add [[tiers]] with url = "..."')
    store_uuid = body.get("store_uuid")
    if store_uuid is not None and not isinstance(store_uuid, str):
        raise UsageError(f"{path}: store_uuid must be a string")
    found = tuple(_tier(item, number, path) for number, item in enumerate(tiers))
    names = [tier.name for tier in found]
    for kind, values in (("name", names), ("url", [tier.url for tier in found])):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise UsageError(
                f"{path}: two tiers have the {kind} {twice!r}", hint=f"give each [[tiers]] its own {kind}"
            )
    return StoreConfig(found, store_uuid, _policies(body, found, path))


def _tier(item: Any, number: int, path: Path) -> TierConfig:
    if not isinstance(item, dict) or not isinstance(item.get("url"), str):
        raise UsageError(f'{path}: each [[tiers]] wants url = "..."')
    if item.get("scope", "shared") != "shared":
        raise UsageError(
            f"{path}: scope = {item['scope']!r} is not supported", hint='use a shared tier (no "scope")'
        )
    unknown = sorted(set(item) - _TIER_KEYS)
    if unknown:
        raise UsageError(
            f"{path}: unknown key {unknown[0]!r} in [[tiers]]",
            hint=f"known keys: {', '.join(sorted(_TIER_KEYS))}",
        )
    for key in ("options", "retention"):
        if not isinstance(item.get(key, {}), dict):
            raise UsageError(f"{path}: {key!r} in [[tiers]] must be a table: write [tiers.{key}]")
    url = item["url"]
    scheme, _ = split_scheme(url)
    if "://" not in url and not os.path.isabs(url):
        url = str(path.parent / url)  # relative to the file, whatever the working directory
    name = item.get("name", MAIN if number == 0 else scheme)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{path}: {name!r} cannot be the name of a tier",
            hint="use letters, digits, '-' and '_', up to 40",
        )
    requirement = item.get("replicate", "async")
    if requirement not in REQUIREMENTS:
        raise UsageError(
            f"{path}: replicate = {requirement!r} in [[tiers]]", hint=f"use {', '.join(REQUIREMENTS)}"
        )
    retention = None
    if item.get("retention"):
        try:
            retention = Keep.from_map(item["retention"])
        except UsageError as error:
            raise UsageError(f"{path}: [tiers.retention]: {error.message}", hint=error.hint) from error
    return TierConfig(url, item.get("options", {}), name, requirement, _limits(item, path), retention)


def _policies(body: Mapping[str, Any], tiers: tuple[TierConfig, ...], path: Path) -> FilePolicies:
    default = _policy(body.get("retention"), f"{path}: [retention]")
    of_tiers = {tier.name: tier.retention for tier in tiers if tier.retention is not None}
    for name, keep in of_tiers.items():
        if default is not None and default.tiers.get(name, keep) != keep:
            raise UsageError(
                f"{path}: [retention.tiers.{name}] and the [tiers.retention] of tier {name!r} differ",
                hint="leave one of them out",
            )
    if of_tiers:
        before = default or Policy(tiers=of_tiers)
        default = Policy(before.keep, before.components, {**before.tiers, **of_tiers})
    runs = body.get("runs", {})
    if not isinstance(runs, dict) or not all(isinstance(table, dict) for table in runs.values()):
        raise UsageError(f"{path}: 'runs' must hold tables", hint='write [runs."llama-*".retention]')
    found = []
    for pattern, table in runs.items():
        unknown = sorted(set(table) - {"retention"})
        if unknown:
            raise UsageError(
                f"{path}: unknown key {unknown[0]!r} in [runs.{pattern!r}]", hint="it has retention"
            )
        policy = _policy(table.get("retention"), f"{path}: [runs.{pattern!r}.retention]")
        if policy is not None:
            found.append((pattern, policy))
    return FilePolicies(str(path), default, tuple(found))


def _policy(table: object, what: str) -> Policy | None:
    if table is None or table == {}:
        return None
    if not isinstance(table, dict):
        raise UsageError(f"{what} must be a table", hint="for instance: last = 3")
    try:
        return Policy.from_map(table)
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from error


def _limits(item: Mapping[str, Any], path: Path) -> Limits:
    rate, concurrency = item.get("max_bytes_per_second"), item.get("concurrency")
    if rate is not None:
        rate = bytes_of(rate, f"{path}: max_bytes_per_second")
    if rate == 0:
        raise UsageError(f"{path}: max_bytes_per_second = 0 would stop all copying", hint="leave it out")
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise UsageError(f"{path}: concurrency must be a whole number from 1, not {concurrency!r}")
    return Limits(rate, concurrency)
