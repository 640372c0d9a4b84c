"""Documents to put into a manifest, made without a store."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from ckptstore.manifest import LayoutRows, Manifest, TensorRows
from ckptstore.model.ids import run_key, ulid
from ckptstore.model.record import CommitRecord, ComponentSummary, EpochDoc, Note, NoteKind

STORE = "0f8fad5b-d9cb-469f-a165-70867728950e"
TIER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
TIER2 = "11111111-7425-40de-944b-e07fc1f90ae7"
RUN = "llama 8b/'quoted'\nname"
KEY = run_key(RUN)
NOON = 1_795_953_600.123


def session_ulid(number: int) -> str:
    return ulid(1_795_953_600_000 + number, number.to_bytes(10, "big"))


def attempt_id(step: int, *, session: int = 1, number: int = 0) -> str:
    return f"{session_ulid(session)}-{step}-{number}"


def hexes(count: int, salt: str) -> list[str]:
    return [hashlib.sha256(f"{salt}/{i}".encode()).hexdigest() for i in range(count)]


def make_layout(tensors: int = 4, *, salt: str = "layout", boxes_per_tensor: int = 2) -> LayoutRows:
    return LayoutRows(
        digest=hexes(1, f"{salt}{tensors}")[0],
        chunk_bytes=1 << 24,
        names=[f"model.layers.{i}.weight" for i in range(tensors)],
        components=["model"] * tensors,
        dtypes=["bfloat16"] * tensors,
        shapes=[(8, 4)] * tensors,
        kinds=["parameter"] * tensors,
        box_tensor=np.repeat(np.arange(tensors, dtype=np.int64), boxes_per_tensor),
        box_offsets=[(4 * b, 0) for _ in range(tensors) for b in range(boxes_per_tensor)],
        box_shapes=[(4, 4)] * (tensors * boxes_per_tensor),
        aliases=[("model.head.weight", 0)] if tensors else [],
    )


def make_tensors(tensors: int = 4, *, salt: str = "0") -> TensorRows:
    return TensorRows(
        digests=hexes(tensors, salt),
        bytes=np.full(tensors, 64, dtype=np.int64),
        new_bytes=np.full(tensors, 64, dtype=np.int64),
        chunks=np.full(tensors, 2, dtype=np.int64),
    )


def make_record(step: int, *, session: int = 1, tensors: int = 4, **changes: object) -> CommitRecord:
    attempt = attempt_id(step, session=session)
    values: dict[str, Any] = {
        "attempt": attempt,
        "checkpoint": attempt,
        "generation": 0,
        "run": RUN,
        "step": step,
        "epoch": session,
        "sequence": step,
        "session": session_ulid(session),
        "origin": "save",
        "parents": (),
        "created_at": NOON + step,
        "world_size": 1,
        "host": "node-1",
        "writer": "ckptstore 0.1",
        "chunk_bytes": 1 << 24,
        "metrics": {"loss": 1.0 / (abs(step) + 1)},
        "metadata": {"lr": 3e-4, "shape": (1, 2)},
        "tags": (),
        "not_captured": ("loader",),
        "state_info": {},
        "timings": {"capture": 0.25, "write": 1.5},
        "components": (ComponentSummary("model", tensors, 2 * tensors, 64 * tensors, 64 * tensors, 0),),
        "tables": {},
    }
    return CommitRecord(**{**values, **changes})


def make_epoch(number: int, *, resumed_from: str | None = None) -> EpochDoc:
    return EpochDoc(
        RUN,
        number,
        session_ulid(number),
        "node-1",
        "boot",
        4242,
        NOON,
        resumed_from,
        rewound=False,
        session_key="k",
    )


def make_note(record: CommitRecord, number: int, kind: NoteKind, **data: object) -> Note:
    about = record.attempt if kind in ("verified", "damaged") else None
    return Note(
        RUN, record.checkpoint, number, ulid(number, bytes(10)), kind, NOON + number, "ann", about, data
    )


def note_key(note: Note) -> str:
    return f"notes/{KEY}/{note.checkpoint}.{note.number}.{note.ulid}.mp"


def put_basics(manifest: Manifest) -> None:
    manifest.put_tier(TIER, 0, "local", "file:///ckpts")
    manifest.put_run(RUN, KEY, NOON)
    manifest.put_epoch(KEY, make_epoch(1))


def put(
    manifest: Manifest, record: CommitRecord, *, tier: str = TIER, tensors: int = 4, salt: str | None = None
) -> bool:
    rows = make_tensors(tensors, salt=str(record.step) if salt is None else salt)
    return manifest.put_record(tier, KEY, record, make_layout(tensors), rows, 900)


def put_note(manifest: Manifest, note: Note, *, tier: str = TIER) -> None:
    manifest.put_note(tier, KEY, note_key(note), note)
