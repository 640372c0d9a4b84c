"""A tier with very many objects for the benchmark of collecting: its files are put there directly.

What a round reads is real: markers, sessions, records with their key lists, and a manifest that knows them.
Objects are files of a few bytes under their true names; nothing reads them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import ckptstore
from benchmarks.manifest import layout_of, name_of, record_of, rows_of
from ckptstore.model.documents import encode_record
from ckptstore.model.ids import Digest, chunk_key, digest_of, run_key
from ckptstore.model.policies import Policy
from ckptstore.model.record import TABLE_NAMES, TableRef
from ckptstore.model.retention import Keep
from ckptstore.model.tables import KeyList
from ckptstore.tier import layout as keys
from ckptstore.tier import runs as run_documents
from ckptstore.tier.policies import write_policy

OBJECT = b"x" * 64
FILE_BYTES = 4096
"""What one takes on most file systems."""

_TENSORS = 8
_DIGEST_BYTES, _LOCATION_BYTES = 32, 21
"""Of a chunk in the tables that lie in a record and that a round reads over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How much there is; every run has as many checkpoints, and every checkpoint wrote as many objects.

    A checkpoint names its own objects and those of the first of its run, which has not changed since.
    """

    objects: int
    checkpoints: int
    runs: int

    @property
    def of_run(self) -> int:
        """Checkpoints of a run."""
        return max(self.checkpoints // self.runs, 1)

    @property
    def of_checkpoint(self) -> int:
        """Objects that a checkpoint wrote."""
        return max(self.objects // (self.of_run * self.runs), 1)

    @property
    def files(self) -> int:
        return self.runs * self.of_run * (self.of_checkpoint + 1)


def keep(store: ckptstore.Store, last: int) -> None:
    """Stores a policy for all runs."""
    write_policy(store.tiers, None, Policy.of(Keep(last=last)))


def fill(place: Path, shape: Shape) -> None:
    """Makes the store."""
    source = np.random.default_rng(0)
    with ckptstore.init(place) as store:
        keep(store, shape.of_run)
        for number in range(shape.runs):
            _fill_run(store, place, name_of(number), shape, source)


def _fill_run(
    store: ckptstore.Store, place: Path, name: str, shape: Shape, source: np.random.Generator
) -> None:
    manifest, uuid, key = store.catalog.manifest, store.tier.marker.tier_uuid, run_key(name)
    run_documents.ensure_run(store.tier, name)
    epoch = run_documents.open_epoch(store.tier, name, resumed_from=None, rewound=False, exclusive=False)
    (place / keys.commit_prefix(key)).mkdir(parents=True, exist_ok=True)
    table, rows = layout_of(_TENSORS), rows_of(_TENSORS, source)
    first: dict[str, int] = {}
    for start in range(0, shape.of_run, 100):
        with manifest.transaction():
            manifest.put_run(name, key, epoch.started_at)
            manifest.put_epoch(key, epoch)
            for number in range(start, min(start + 100, shape.of_run)):
                record = record_of(name, epoch, number, _TENSORS, rows)
                own = dict.fromkeys(_new_keys(record.attempt, shape.of_checkpoint, source), len(OBJECT))
                first = first or own
                _write(place, own)
                record = dataclasses.replace(record, tables=_tables(KeyList.of(first | own), source))
                data = encode_record(record)
                manifest.put_record(uuid, key, record, table, rows, len(data))
                (place / keys.commit_key(key, record.attempt)).write_bytes(data)


def _new_keys(attempt: str, count: int, source: np.random.Generator) -> Iterator[str]:
    raw = source.bytes(32 * count)
    for start in range(0, len(raw), 32):
        yield chunk_key(Digest(raw[start : start + 32]), attempt, 0)


def _tables(named: KeyList, source: np.random.Generator) -> dict[str, TableRef]:
    """The key list, and in place of the others as many bytes as they would have."""
    sizes = {"digests": _DIGEST_BYTES * len(named), "locations": _LOCATION_BYTES * len(named)}
    made = {name: source.bytes(sizes.get(name, 0)) for name in TABLE_NAMES} | {"keys": named.encode()}
    return {name: TableRef(digest_of(data), len(data), data) for name, data in made.items()}


def _write(place: Path, names: Sequence[str] | dict[str, int]) -> None:
    """Small files as fast as it goes: not made durable."""
    for name in names:
        file = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, OBJECT)
        os.close(file)
