"""Where a store is: a directory, a URL, or a ``ckptstore.toml`` that names its tiers."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.errors import StoreNotFoundError, UsageError

FILE_NAME = "ckptstore.toml"
VARIABLE = "CKPTSTORE"


@dataclasses.dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier as configured: where it is, and options for its backend."""

    url: str
    options: Mapping[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class StoreConfig:
    """What a location says.

    Attributes:
        tiers: hottest first.
        store_uuid: the store that must be there, if the file names one: the missing-mount rule then holds
            across restarts too.
    """

    tiers: tuple[TierConfig, ...]
    store_uuid: str | None = None


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
    unknown = sorted(set(body) - {"tiers", "store_uuid"})
    if unknown:
        raise UsageError(f"{path}: unknown key {unknown[0]!r}", hint="known keys: store_uuid, [[tiers]]")
    tiers = body.get("tiers")
    if not isinstance(tiers, list) or not tiers:
        raise UsageError(f"{path}: it names no tier", hint='add [[tiers]] with url = "..."')
    if len(tiers) > 1:
        raise UsageError(
            f"{path} names {len(tiers)} tiers; this release opens stores of one",
            hint="keep the first [[tiers]] only",
        )
    store_uuid = body.get("store_uuid")
    if store_uuid is not None and not isinstance(store_uuid, str):
        raise UsageError(f"{path}: store_uuid must be a string")
    return StoreConfig(tuple(_tier(item, path) for item in tiers), store_uuid)


def _tier(item: Any, path: Path) -> TierConfig:
    if not isinstance(item, dict) or not isinstance(item.get("url"), str):
        raise UsageError(f'{path}: each [[tiers]] wants url = "..."')
    if item.get("scope", "shared") != "shared":
        raise UsageError(
            f"{path}: scope = {item['scope']!r} is not supported", hint='use a shared tier (no "scope")'
        )
    options = item.get("options", {})
    unknown = sorted(set(item) - {"url", "scope", "options"})
    if unknown or not isinstance(options, dict):
        raise UsageError(f"{path}: unknown key {(unknown or ['options'])[0]!r} in [[tiers]]")
    url = item["url"]
    if "://" not in url and not os.path.isabs(url):
        url = str(path.parent / url)  # relative to the file, whatever the working directory
    return TierConfig(url, options)
