"""Stores whose bytes are counted, and the saves and loads of drawn cases on the ranks of a pool."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import ckptstore
from ckptstore import shards
from ckptstore.backend import Backend, ReadableBuffer
from ckptstore.config import resolve
from ckptstore.environment import Environment
from ckptstore.load import division, plan
from ckptstore.model.boxes import Box
from ckptstore.store import Store
from ckptstore.testing import FaultBackend
from ckptstore.tier.retry import RetryingBackend
from ckptstore.tier.tier import Tier
from ckptstore_local import LocalBackend
from tests.ranks.layouts import Case, Corner, Side, bytes_of, leaf

RUN = "matrix"
DEADLINE_SECONDS = 30.0


class CountingBackend(FaultBackend):
    """Counts the bytes of chunks and packs that pass.

    Attributes:
        read: bytes read of each object, gaps and repeats included.
        written: bytes put under each key.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()

    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Counted once it is there."""
        nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        super().put(key, buffers, if_absent=if_absent)
        if is_data(key):
            with self._lock:
                self.written[key] += nbytes

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Counted once it has been read."""
        super().read_into(key, offset, buffer)
        if is_data(key):
            with self._lock:
                self.read[key] += buffer.nbytes


def is_data(key: str) -> bool:
    """Whether it is a chunk or a pack."""
    return key.startswith(("chunks/", "packs/"))


@contextlib.contextmanager
def counted_store(directory: str | Path) -> Iterator[tuple[Store, CountingBackend]]:
    """The store at a directory, its bytes counted."""
    backend = CountingBackend(LocalBackend(Path(directory)))
    environment = Environment()
    tier = Tier.open(RetryingBackend(backend, sleep=environment.sleep), environment)
    with Store(resolve(str(directory)), tier) as store:
        yield store, backend


def run_of(store: Store, rank: int, side: Side, key: str, **options: Any) -> Any:
    """The run as one rank of a side has it; `key` is new for each start."""
    if side.plain:
        options |= {"rank": rank, "world_size": side.world, "session_key": key}
    return store.run(RUN, deadline_seconds=DEADLINE_SECONDS, **options)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What one rank found after a load.

    Attributes:
        differing: names of tensors that are not what they must be.
        read: bytes of chunks and packs.
        wanted: tensor -> boxes.
    """

    differing: tuple[str, ...]
    read: int
    wanted: Mapping[str, tuple[Corner, ...]]
    values: Any


def state_of(case: Case, rank: int, side: Side, *, blank: bool) -> dict[str, Any]:
    """The state of one rank."""
    model = {
        drawn.name: leaf(drawn, drawn.wanted if blank else drawn.saved, rank, plain=side.plain, blank=blank)
        for drawn in case.tensors
    }
    return {"model": model, "values": {"steps": 0 if blank else 7, "of": ["a", rank * 0]}}


def save_case(rank: int, _world: int, directory: str, case: Case, key: str) -> tuple[str, int]:
    """Saves; returns the checkpoint's id and the bytes that this rank wrote."""
    with counted_store(directory) as (store, backend):
        run = run_of(store, rank, case.saving, key)
        checkpoint = run.save(1, state_of(case, rank, case.saving, blank=False)).result()
        run.close()
        return checkpoint.id, backend.written.total()


def load_case(rank: int, _world: int, directory: str, case: Case, key: str) -> Loaded:
    """Restores into blank tensors and compares each byte."""
    side = case.loading
    state = state_of(case, rank, side, blank=True)
    wanted = {f"model.{name}": _boxes(value, name) for name, value in state["model"].items()}
    # Packs of these sizes are smaller than one gap: all of each would be read at once.
    with (
        counted_store(directory) as (store, backend),
        mock.patch.object(plan, "MAX_GAP_BYTES", 0),
        mock.patch.object(division, "MAX_GAP_BYTES", 0),
    ):
        run = run_of(store, rank, side, key)
        if case.together:
            assert run.restore(state) == 1
        else:
            run.latest.restore(state)
        run.close()
        read = backend.read.total()
    differing = tuple(
        drawn.name
        for drawn in case.tensors
        if bytes_of(state["model"][drawn.name])
        != bytes_of(leaf(drawn, drawn.wanted, rank, plain=side.plain, blank=False))
    )
    return Loaded(differing, read, wanted, state["values"])


def _boxes(value: Any, name: str) -> tuple[Corner, ...]:
    held = shards.held_of(value, (name,))
    if held is None:
        return (((0,) * len(value.shape), tuple(value.shape)),)
    return tuple((box.offsets, box.sizes) for box, _ in held.parts)


def together(wanted: Sequence[Mapping[str, tuple[Corner, ...]]]) -> dict[str, tuple[Corner, ...]]:
    """What the ranks of one host want, as that of one reader."""
    joined: dict[str, tuple[Corner, ...]] = {}
    for boxes in wanted:
        for name, corners in boxes.items():
            joined[name] = joined.get(name, ()) + corners
    return joined


def most_bytes(checkpoint: ckptstore.Checkpoint, wanted: Sequence[Mapping[str, tuple[Corner, ...]]]) -> int:
    """What loading boxes may read: 1.1 times what they hold, and each chunk that an edge of them cuts.

    Args:
        wanted: for each reader its boxes. What several readers want counts for each.
    """
    layout = checkpoint.contents.layout
    most = 0.0
    for boxes_of_tensor in wanted:
        for name, corners in boxes_of_tensor.items():
            index = layout.by_name[name]
            tensor = layout.tensors[index]
            mask = np.zeros(tensor.shape, bool)
            for offsets, sizes in corners:
                mask[Box(offsets, sizes).within(Box.whole(tensor.shape))] = True
            most += 1.1 * float(mask.sum()) * tensor.dtype.itemsize
            for chunk in layout.chunk_boxes(index):
                part = mask[chunk.within(Box.whole(tensor.shape))]
                if part.any() and not part.all():
                    most += chunk.numel * tensor.dtype.itemsize
    return int(most)
