"""Which probes a store, or a place that is none yet, goes through."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from ckptstore.backend import Backend
from ckptstore.doctor import documents, place, trial
from ckptstore.doctor.findings import Finding, Probe, made
from ckptstore.doctor.tiers import compare, unreachable
from ckptstore.environment import Environment
from ckptstore.manifest import Manifest
from ckptstore.manifest import place as manifest_place
from ckptstore.store import Store
from ckptstore.tier.tier import Tier


def examine(store: Store, *, write: bool = True) -> Iterator[Finding]:
    """Looks at a store, tier by tier, one finding after the other as they are made.

    Args:
        write: try writing, too; otherwise nothing in the store is changed, and no manifest is made.
    """
    yield from made([functools.partial(compare, store), lambda: _manifest(store, write=write)], None)
    for tier in store.tiers:
        yield from made(_probes(tier, write=write), tier.name)
    yield from made([functools.partial(unreachable, store)], None)


def examine_place(backend: Backend, environment: Environment, *, write: bool = True) -> Iterator[Finding]:
    """Looks at a place that holds no store yet: what can be known before one is made there."""
    yield from made(_place_probes(backend, environment, write=write), None)


def _probes(tier: Tier, *, write: bool) -> list[Probe]:
    looks = (documents.marker, documents.records, documents.announced, documents.leftovers)
    return [
        *(functools.partial(look, tier) for look in looks),
        *_place_probes(tier.backend, tier.environment, write=write),
    ]


def _place_probes(backend: Backend, environment: Environment, *, write: bool) -> list[Probe]:
    probes: list[Probe] = []
    path = backend.capabilities.local_path
    if path is not None:
        probes += [functools.partial(place.space, path), functools.partial(place.file_system, path)]
    probes += [lambda: _rules(backend), functools.partial(trial.reading, backend)]
    if write:
        probes.append(functools.partial(trial.writing, backend, environment))
    return probes


def _rules(backend: Backend) -> Iterator[Finding]:
    """What the backend itself knows of the place: rules that delete or keep objects."""
    for name, status, found, meaning in backend.examine():
        yield Finding(name, status, found, meaning)


def _manifest(store: Store, *, write: bool) -> Iterator[Finding]:
    if write:
        store.catalog.refresh()
        manifest = store.catalog.manifest
        manifest.check()
        if manifest.path is None:
            meaning = (
                "`ls` reads every record anew each time: set CKPTSTORE_MANIFEST to a writable local file"
            )
            yield Finding("manifest", "warn", "in memory: no place for a file may be written", meaning)
        else:
            yield _journal(manifest.path)
        return
    local = store.tier.backend.capabilities.local_path
    where = manifest_place.choose(None if local is None else Path(local), store.uuid)
    if where.path is None or not where.path.is_file():
        yield Finding("manifest", "ok", f"none yet ({where.why})", "the first `ls` makes it")
        return
    with Manifest.open(where.path, store_uuid=store.uuid, read_only=True) as manifest:
        manifest.check()
    yield _journal(where.path)


def _journal(path: Path) -> Finding:
    """WAL mode is kept in the file, and any SQLite tool can have turned it on."""
    # Bytes 18 and 19 of a database: 1 with a rollback journal, 2 with WAL (https://sqlite.org/fileformat.html).
    with path.open("rb") as file:
        in_wal = file.read(20)[18:] == b"\x02\x02"
    if not in_wal:
        return Finding("manifest", "ok", str(path))
    meaning = (
        "another program turned that on: every reader must then be able to write beside it, and old SQLite "
        "can lose pages (WAL-reset bug). Delete the file; `ckptstore rebuild` makes it anew"
    )
    return Finding("manifest", "warn", f"{path} is in WAL mode", meaning)
