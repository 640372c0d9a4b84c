"""What the store's documents say, as plain data: records, epochs, intents, notes.

No I/O here; :mod:`ckptstore.model.documents` turns these into bytes and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ckptstore.model.ids import Digest

NoteKind = Literal[
    "metrics", "tag", "untag", "invalid", "valid", "forgotten", "expiring", "verified", "damaged"
]
NOTE_KINDS: tuple[NoteKind, ...] = (
    "metrics",
    "tag",
    "untag",
    "invalid",
    "valid",
    "forgotten",
    "expiring",
    "verified",
    "damaged",
)

IntentKind = Literal["save", "read", "replicate", "repair", "trim", "pin"]
INTENT_KINDS: tuple[IntentKind, ...] = ("save", "read", "replicate", "repair", "trim", "pin")

TRIMMED = "trimmed"
"""In a record's `state_info`: component -> reason and time of its trim."""

TABLE_NAMES = ("layout", "tree", "digests", "locations", "keys")


@dataclasses.dataclass(frozen=True, slots=True)
class TablePiece:
    """One object holding a part of a table."""

    digest: Digest
    key: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TableRef:
    """Where a table is: inside the record (`inline`), or in `pieces`, end to end.

    Attributes:
        digest: over the whole table.
        size_bytes: of the whole table.
    """

    digest: Digest
    size_bytes: int
    inline: bytes | None
    pieces: tuple[TablePiece, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentSummary:
    """What one top-level key of the state amounts to.

    Attributes:
        logical_bytes: of all its tensors, each counted once.
        new_bytes: written by this save.
        reused_bytes: not written: in checkpoints it pinned, or equal to other chunks of this save.
    """

    name: str
    tensors: int
    chunks: int
    logical_bytes: int
    new_bytes: int
    reused_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trimmed:
    """Why a checkpoint has a component no more, and since when (seconds since the epoch)."""

    reason: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class CommitRecord:
    """The document that makes a checkpoint exist in a tier.

    Attributes:
        attempt: id of the attempt that wrote it; its key.
        checkpoint: the attempt id of the checkpoint's first save, the same in every tier.
        generation: 0 for the first record; higher after repair or trim.
        epoch, sequence: its place in the run's order; the only order there is.
        origin: "save", "fork", "import", "average", "replicate", "repair" or "trim".
        parents: checkpoint ids that it continues or was made from: the run's checkpoint before, what its
            session resumed from, or the source of a fork.
        created_at: seconds since the epoch, by the writer's clock; for people and time rules only.
        metadata: the caller's values, any that the value codec holds.
        tags: given at save; later ones are notes.
        not_captured: names of training state that the caller's TrainState did not hold.
        state_info: facts about the state; small. Its entry "trimmed" is read by :attr:`trimmed`.
        timings: seconds per phase, as far as known when the record was written.
        tables: layout, tree, digests, locations, keys.
    """

    attempt: str
    checkpoint: str
    generation: int
    run: str
    step: int
    epoch: int
    sequence: int
    session: str
    origin: str
    parents: tuple[str, ...]
    created_at: float
    world_size: int
    host: str
    writer: str
    chunk_bytes: int
    metrics: Mapping[str, int | float]
    metadata: Mapping[str, Any]
    tags: tuple[str, ...]
    not_captured: tuple[str, ...]
    state_info: Mapping[str, Any]
    timings: Mapping[str, float]
    components: tuple[ComponentSummary, ...]
    tables: Mapping[str, TableRef]

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, sequence)."""
        return (self.epoch, self.sequence)

    @property
    def trimmed(self) -> Mapping[str, Trimmed]:
        """The components that the checkpoint was saved with and has lost to a trim, by name."""
        found = self.state_info.get(TRIMMED, {})
        return {
            str(name): Trimmed(str(said.get("reason", "")), float(said.get("at", 0.0)))
            for name, said in (found.items() if isinstance(found, dict) else ())
            if isinstance(said, dict)
        }

    @property
    def logical_bytes(self) -> int:
        return sum(component.logical_bytes for component in self.components)

    @property
    def new_bytes(self) -> int:
        return sum(component.new_bytes for component in self.components)

    @property
    def reused_bytes(self) -> int:
        return sum(component.reused_bytes for component in self.components)


@dataclasses.dataclass(frozen=True, slots=True)
class CommitEnd:
    """What can stand at a commit key instead of a record: VOID (fenced) or GONE (collected)."""

    attempt: str
    kind: Literal["void", "gone"]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class EpochDoc:
    """One session of a run: who trains it, since when, and what it resumed from.

    Attributes:
        number: the epoch, 1 and up.
        session: its ULID.
        resumed_from: checkpoint id, or None for a start from nothing.
        rewound: the session was opened by ``run.rewind``.
    """

    run: str
    number: int
    session: str
    host: str
    boot_id: str
    pid: int
    started_at: float
    resumed_from: str | None
    rewound: bool
    session_key: str


@dataclasses.dataclass(frozen=True, slots=True)
class IntentDoc:
    """An announcement to garbage collection: what this process may still read or reuse.

    Attributes:
        attempt: id of the attempt, or of the read or pin; its key.
        pins: attempt ids of the commit records pinned, with their run keys: ``(run key, attempt)``.
    """

    attempt: str
    kind: IntentKind
    run: str
    host: str
    pid: int
    user: str
    created_at: float
    pins: tuple[tuple[str, str], ...]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A later fact about a checkpoint; never changed, ordered by (number, ulid).

    Attributes:
        attempt: the record it speaks of, for "verified" and "damaged" (they concern one tier's copy);
            else None.
        data: by kind: ``{"metrics": {...}}``, ``{"tag": ...}``, ``{"reason": ...}``,
            ``{"chunks": n, "bytes": n, "complete": bool}``, ``{"keys": [...], "reason": ...}``.
    """

    run: str
    checkpoint: str
    number: int
    ulid: str
    kind: NoteKind
    at: float
    author: str
    attempt: str | None
    data: Mapping[str, Any]

    @property
    def order(self) -> tuple[int, str]:
        return (self.number, self.ulid)
