"""From written chunks to a committed checkpoint: tables, sync, checks, record (DESIGN part 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore._version import __version__
from ckptstore.errors import BackendError, SaveFailedError
from ckptstore.model.documents import encode_record
from ckptstore.model.ids import Digest
from ckptstore.model.layout import Layout
from ckptstore.model.record import CommitEnd, CommitRecord, ComponentSummary
from ckptstore.model.tables import KeyList, Locations, encode_digests, written_bytes
from ckptstore.save.phases import Phases
from ckptstore.save.session import Session
from ckptstore.save.tables import TableWriter
from ckptstore.tier import commits
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier


@dataclasses.dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a caller asked to be kept, besides the state.

    Attributes:
        parents: checkpoint ids that it was made from.
        not_captured: training state that the caller's TrainState did not hold.
    """

    step: int
    metrics: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tags: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    origin: str = "save"
    not_captured: tuple[str, ...] = ()
    state_info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly:
    """All chunks of a checkpoint, written or reused, ready for its tables.

    Attributes:
        digests: one per chunk; `locations` likewise, into `keys`.
        keys: every object that holds one of the chunks.
        components: the state's top-level keys.
    """

    layout: Layout
    tree: bytes
    digests: Sequence[Digest]
    locations: Locations
    keys: KeyList
    components: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint.

    Attributes:
        contents: the record and its tables.
        record_bytes: size of the commit record.
        seconds: per phase, the commit itself included.
    """

    contents: Contents
    record_bytes: int
    seconds: Mapping[str, float]

    @property
    def record(self) -> CommitRecord:
        return self.contents.record


def commit(
    tier: Tier,
    session: Session,
    request: SaveRequest,
    attempt: str,
    assembly: Assembly,
    tables: TableWriter,
    phases: Phases,
    *,
    world_size: int = 1,
) -> Saved:
    """Writes the tables and then, after everything is durable, the record.

    Raises:
        SaveFailedError: fenced, or the outcome is not known because the tier does not answer.
        SessionSupersededError, WrongStoreError, BackendError: nothing was committed.
    """
    layout, base = assembly.layout, session.base
    refs = {
        "layout": tables.write_layout(layout, base.record.tables["layout"] if base is not None else None),
        "tree": tables.write(assembly.tree),
        "digests": tables.write(encode_digests(assembly.digests)),
        "locations": tables.write(assembly.locations.encode()),
        "keys": tables.write(assembly.keys.encode()),
    }
    phases.end("tables")
    tier.backend.sync()
    phases.end("sync")
    environment = tier.environment
    record = CommitRecord(
        attempt=attempt,
        checkpoint=attempt,
        generation=0,
        run=session.epoch.run,
        step=request.step,
        epoch=session.epoch.number,
        sequence=session.next_sequence(),
        session=session.epoch.session,
        origin=request.origin,
        parents=request.parents,
        created_at=environment.now(),
        world_size=world_size,
        host=environment.host,
        writer=f"ckptstore {__version__}",
        chunk_bytes=layout.chunk_bytes,
        metrics=dict(request.metrics),
        metadata=dict(request.metadata),
        tags=request.tags,
        not_captured=request.not_captured,
        state_info=dict(request.state_info),
        timings=dict(phases.seconds),
        components=summarize(assembly, written_bytes(layout, assembly.locations, assembly.keys, attempt)),
        tables=refs,
    )
    data = encode_record(record)
    # A zombie must not commit, and nothing may be committed into an empty mount point.
    session.check_current()
    tier.check_marker()
    create_record(tier, session.run_key, record, data)
    phases.end("commit")
    contents = Contents.of(
        tier,
        record,
        layout=layout,
        digests=assembly.digests,
        locations=assembly.locations,
        keys=assembly.keys,
    )
    return Saved(contents, len(data), dict(phases.seconds))


def create_record(tier: Tier, run_key: str, record: CommitRecord, data: bytes) -> CommitRecord | CommitEnd:
    """Creates a commit record; returns what stands at its key afterwards: the one outcome.

    Raises:
        SaveFailedError: it was fenced, and will never commit.
        BackendError: the tier does not answer, and the outcome is not known.
    """
    failure: BackendError | None = None
    try:
        found = commits.settle(tier, run_key, record.attempt, data)
    except BackendError as error:
        # The outcome is not known: whoever comes first at the key now, the record or this VOID, decides.
        failure = error
        found = commits.fence(tier, run_key, record.attempt, error.kind)
    if isinstance(found, CommitEnd) and found.kind == "void":
        raise SaveFailedError(
            f"save of run {record.run!r} step {record.step} failed: "
            + (failure.message if failure is not None else f"it was fenced ({found.reason})"),
            hint="older checkpoints are untouched; the next save starts anew",
        ) from failure
    # GONE means: it was committed, and garbage collection has taken it since. The save succeeded.
    return found


def summarize(assembly: Assembly, new_bytes: npt.NDArray[np.int64]) -> tuple[ComponentSummary, ...]:
    """Sums per component, in name order; one without tensors is there too, with zeros."""
    rows = dict.fromkeys(assembly.components, (0, 0, 0, 0))
    for found in assembly.layout.components:
        new = int(new_bytes[found.tensors].sum())
        rows[found.name] = (len(found.tensors), found.chunks, found.nbytes, new)
    return tuple(
        ComponentSummary(name, tensors, count, logical, new, logical - new)
        for name, (tensors, count, logical, new) in sorted(rows.items())
    )
