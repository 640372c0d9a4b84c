"""Stores for these tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import ckptstore
from ckptstore.backend import ObjectInfo
from ckptstore.model.boxes import Box
from ckptstore.model.ids import Digest, digest_of
from ckptstore.model.layout import Layout, Tensor
from ckptstore.model.tables import KeyList, Locations
from ckptstore.tier.contents import Contents
from ckptstore.tier.retry import RetryingBackend

CHUNK_BYTES = 1 << 16

AWKWARD = (
    "plain",
    'it\'s "quoted"',
    "a/b/../c",
    "line\nbreak\ttab",
    "naïve-模型-🚀",
    "%2F; DROP TABLE runs; --",
    " edges ",
    "$x^2$",
    "\x1b[31mred",
)


def random_state(seed: int = 0, tensors: int = 4) -> dict:
    source = np.random.default_rng(seed)
    return {
        "model": {f"w{i}": source.standard_normal((100, 80)).astype(np.float32) for i in range(tensors)},
        "optimizer": {"lr": 0.1, "moments": source.standard_normal(50)},
    }


class NoChunks(RetryingBackend):
    """Refuses to read the objects that hold chunks; tables may be read."""

    forbidden: frozenset[str] = frozenset()

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        assert key not in self.forbidden, f"{key} was read"
        super().read_into(key, offset, buffer)

    def read_parts(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        assert key not in self.forbidden, f"{key} was read"
        super().read_parts(key, offset, buffers)


@pytest.fixture
def store(tmp_path) -> Iterator[ckptstore.Store]:
    with ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as made:
        yield made


def recut(checkpoint: ckptstore.Checkpoint, cuts: dict[str, list[Box]]) -> ckptstore.Checkpoint:
    """The checkpoint as several ranks would have saved it: these tensors in these boxes; new objects."""
    tier, contents = checkpoint.tier, checkpoint.contents
    tensors = tuple(
        dataclasses.replace(t, boxes=tuple(cuts[t.name])) if t.name in cuts else t
        for t in contents.layout.tensors
    )
    layout = Layout(tensors, contents.layout.aliases, contents.layout.chunk_bytes)
    digests: list[Digest] = []
    objects: dict[str, int] = {}
    rows: list[tuple[str, int]] = []
    attempt = checkpoint.record.attempt
    for index, tensor in enumerate(tensors):
        whole = checkpoint.tensors[tensor.name].read(Box.whole(tensor.shape))
        array = np.ascontiguousarray(np.asarray(whole)).view(np.uint8)
        array = array.reshape(*tensor.shape, tensor.dtype.itemsize)
        for box in layout.chunk_boxes(index):
            data = array[box.within(Box.whole(tensor.shape))].tobytes()
            digest = digest_of(data)
            key = f"chunks/{digest.hex()[:2]}/{digest.hex()}.{attempt}.{9}"
            tier.backend.put(key, [data])
            digests.append(digest)
            objects[key] = len(data)
            rows.append((key, len(data)))
    keys = KeyList.of(objects)
    place = {key: i for i, key in enumerate(keys.keys)}
    locations = Locations(
        np.array([place[key] for key, _ in rows], np.int64),
        np.zeros(len(rows), np.int64),
        np.array([size for _, size in rows], np.int64),
        np.zeros(len(rows), np.uint8),
    )
    tables = dict(contents.record.tables)
    tables["layout"] = dataclasses.replace(tables["layout"], digest=digest_of(layout.encode()))
    record = dataclasses.replace(contents.record, tables=tables)
    made = type(checkpoint)(checkpoint._store, tier, checkpoint.run, checkpoint._entry)
    recut_contents = Contents.of(tier, record, layout=layout, digests=digests, locations=locations, keys=keys)
    recut_contents.__dict__["tree"] = contents.tree
    made.__dict__["contents"] = recut_contents
    return made


def listed(store: ckptstore.Store) -> dict[str, int]:
    """Key -> bytes of every object that holds data."""
    found: list[ObjectInfo] = [*store.tier.listing("chunks/"), *store.tier.listing("packs/")]
    return {info.key: info.size_bytes for info in found}


__all__ = ["Tensor", "listed", "random_state", "recut", "store"]
