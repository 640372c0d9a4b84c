"""What goes into the manifest and what comes out of it, as plain data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptstore.manifest.text import metrics_from_json

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutRows:
    """The tensors of a checkpoint and how they were cut, by columns. Stored once per `digest`.

    Attributes:
        digest: of the layout table; 64 hex digits.
        chunk_bytes: the largest chunk.
        names, components, dtypes, shapes, kinds: one item per tensor.
        box_tensor: int64, (boxes,); index of each box's tensor.
        box_offsets, box_shapes: per box, in global indices: a sequence of tuples, or int64 (boxes, n) of
            which the first ndim columns count.
        aliases: further names of tensors: (name, component, index of the tensor), or (name, index) when
            the component is the tensor's.
    """

    digest: str
    chunk_bytes: int
    names: Sequence[str]
    components: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    kinds: Sequence[str]
    box_tensor: Int64Array | Sequence[int]
    box_offsets: Int64Array | Sequence[Sequence[int]]
    box_shapes: Int64Array | Sequence[Sequence[int]]
    aliases: Sequence[tuple[str, int] | tuple[str, str, int]] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRows:
    """What one record says of each tensor of its layout, in the layout's order, by columns.

    Attributes:
        digests: of the tensor's content; 64 hex digits each.
        bytes: int64, (tensors,); logical bytes.
        new_bytes: int64, (tensors,); written by this record's save, the rest was reused.
        chunks: int64, (tensors,).
    """

    digests: Sequence[str]
    bytes: Int64Array | Sequence[int]
    new_bytes: Int64Array | Sequence[int]
    chunks: Int64Array | Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class TierRow:
    """A tier that the manifest has seen."""

    tier_uuid: str
    ordinal: int
    name: str
    url: str


@dataclasses.dataclass(frozen=True, slots=True)
class RunRow:
    """A run and what it amounts to.

    Attributes:
        created_at: seconds since the epoch.
        latest_*: of its newest restorable checkpoint; None without one.
        new_bytes: written by the saves of all its checkpoints.
        latest_logical_bytes: size of the newest restorable checkpoint.
        sessions: how many times it was trained.
    """

    run: str
    run_key: str
    created_at: float
    checkpoints: int
    restorable: int
    sessions: int
    latest: str | None
    latest_step: int | None
    latest_created_at: float | None
    latest_logical_bytes: int | None
    new_bytes: int


@dataclasses.dataclass(slots=True)
class CheckpointRow:
    """One checkpoint for a table: its counting record's identity, facts and sizes.

    Not frozen, and its JSON is read when asked for: made ten thousand at a time, that is a third of the time.

    Attributes:
        created_at, verified_at: seconds since the epoch.
        place: where it stands in the run's order now, (epoch, sequence); going back to it moves it.
        metrics_json, tags_json, timings_json: as in the table; see the properties.
        pins: how many intents were seen to pin one of its records.
        tiers: names of the tiers that hold a record of it, hottest first.
    """

    run: str
    run_key: str
    checkpoint: str
    attempt: str
    generation: int
    step: int
    epoch: int
    sequence: int
    place: tuple[int, int]
    created_at: float
    session: str
    origin: str
    host: str
    world_size: int
    state: str
    restorable: bool
    is_latest: bool
    damaged_reason: str | None
    invalid_reason: str | None
    verified_at: float | None
    tensors: int
    chunks: int
    logical_bytes: int
    new_bytes: int
    reused_bytes: int
    metrics_json: str
    tags_json: str
    timings_json: str
    pins: int
    tiers: tuple[str, ...]

    @property
    def metrics(self) -> dict[str, int | float]:
        """Its metrics, exactly."""
        return metrics_from_json(self.metrics_json)

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags, sorted."""
        return () if self.tags_json == "[]" else tuple(json.loads(self.tags_json))

    @property
    def timings(self) -> dict[str, int | float]:
        """Seconds per phase of its save."""
        return metrics_from_json(self.timings_json)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a checkpoint.

    Attributes:
        alias_of: name of the tensor that it is tied to, else None.
        digest: of its content; 64 hex digits.
    """

    name: str
    component: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    alias_of: str | None
    digest: str
    bytes: int
    new_bytes: int
    chunks: int


@dataclasses.dataclass(frozen=True, slots=True)
class BoxRow:
    """One stored rectangle of a tensor, in global indices."""

    tensor: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutRow:
    """A layout: how many tensors and boxes, and whether the boxes are rows of the manifest."""

    digest: str
    chunk_bytes: int
    tensors: int
    boxes: int
    boxes_expanded: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TensorAt:
    """A tensor in one checkpoint of a run.

    Attributes:
        changed: its content differs from the run's checkpoint before (True where it first appears).
    """

    checkpoint: str
    step: int
    epoch: int
    sequence: int
    digest: str
    bytes: int
    new_bytes: int
    changed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PinRow:
    """A pin seen in a tier: who promised to still need which record."""

    tier_uuid: str
    intent: str
    kind: str
    run_key: str
    attempt: str
    host: str
    user: str
    created_at: float
    reason: str
