"""Documents into rows. Every function runs inside the caller's write transaction."""

from __future__ import annotations

import functools
import itertools
import math
import sqlite3
from collections.abc import Iterable, Sequence

from ckptstore.errors import DocumentError, NotFoundError
from ckptstore.manifest.rows import LayoutRows, TensorRows
from ckptstore.manifest.text import iso, list_json, metrics_json, people_json, ranges_text
from ckptstore.model.record import CommitEnd, CommitRecord, EpochDoc, IntentDoc, Note

_ROWS_AT_ONCE = 100

MAX_EXPANDED_BOXES = 100_000
"""Layouts with more boxes keep them in their table in the store; the row here says so."""


def tier_id(connection: sqlite3.Connection, tier_uuid: str) -> int:
    """Row id of a tier that was put; raises NotFoundError."""
    row = connection.execute("SELECT tier_id FROM tiers WHERE tier_uuid = ?", (tier_uuid,)).fetchone()
    if row is None:
        raise NotFoundError(f"the manifest knows no tier {tier_uuid}")
    return int(row[0])


def run_id(connection: sqlite3.Connection, run_key: str) -> int:
    """Row id of a run that was put; raises NotFoundError."""
    row = connection.execute("SELECT run_id FROM runs WHERE run_key = ?", (run_key,)).fetchone()
    if row is None:
        raise NotFoundError(f"the manifest knows no run {run_key}")
    return int(row[0])


def put_epoch(connection: sqlite3.Connection, run: int, epoch: EpochDoc) -> None:
    """One session; the first document of an epoch stays."""
    connection.execute(
        "INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            run,
            epoch.number,
            epoch.session,
            epoch.session_key,
            epoch.host,
            epoch.boot_id,
            epoch.pid,
            iso(epoch.started_at),
            epoch.started_at,
            epoch.resumed_from,
            int(epoch.rewound),
        ),
    )


def put_layout(connection: sqlite3.Connection, layout: LayoutRows | str) -> int:
    """The layout's row id; its tensors and boxes are written when it is new."""
    digest = layout if isinstance(layout, str) else layout.digest
    row = connection.execute("SELECT layout_id FROM layouts WHERE layout_digest = ?", (digest,)).fetchone()
    if row is not None:
        return int(row[0])
    if isinstance(layout, str):
        raise NotFoundError(f"the manifest knows no layout {layout}")
    boxes = len(layout.box_tensor)
    expanded = boxes <= MAX_EXPANDED_BOXES
    layout_id = connection.execute(
        "INSERT INTO layouts (layout_digest, chunk_bytes, tensors, boxes, boxes_expanded) VALUES (?, ?,"
        " ?, ?, ?)",
        (digest, layout.chunk_bytes, len(layout.names), boxes, int(expanded)),
    ).lastrowid
    assert layout_id is not None
    # Ids of one layout are consecutive, so that a checkpoint's tensor rows lie together.
    first = int(connection.execute("SELECT coalesce(max(tensor_id), 0) + 1 FROM tensors").fetchone()[0])
    connection.executemany(
        "INSERT INTO tensors VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                first + i,
                layout_id,
                name,
                component,
                dtype,
                *_shape_columns(tuple(shape)),
                kind,
                first + i,
            )
            for i, (name, component, dtype, shape, kind) in enumerate(
                zip(layout.names, layout.components, layout.dtypes, layout.shapes, layout.kinds, strict=True)
            )
        ),
    )
    connection.executemany(
        "INSERT INTO tensors VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", _aliases(layout, layout_id, first)
    )
    if expanded:
        connection.executemany("INSERT INTO boxes VALUES (?, ?, ?, ?, ?)", _boxes(layout, first))
    return layout_id


@functools.lru_cache(maxsize=1024)  # a layout has many tensors of few shapes
def _shape_columns(shape: tuple[int, ...]) -> tuple[str, int | None]:
    count = math.prod(int(size) for size in shape)
    return list_json(shape), count if count < 2**63 else None


@functools.lru_cache(maxsize=1024)
def _box_columns(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[str, str, str]:
    return list_json(offsets), list_json(sizes), ranges_text(offsets, sizes)


def _aliases(layout: LayoutRows, layout_id: int, first: int) -> Iterable[tuple[object, ...]]:
    for number, alias in enumerate(layout.aliases, start=first + len(layout.names)):
        name, target = alias[0], int(alias[-1])
        component = alias[1] if len(alias) == 3 else layout.components[target]
        yield (
            number,
            layout_id,
            name,
            component,
            layout.dtypes[target],
            *_shape_columns(tuple(layout.shapes[target])),
            layout.kinds[target],
            first + target,
        )


def _boxes(layout: LayoutRows, first: int) -> Iterable[tuple[object, ...]]:
    seen: dict[int, itertools.count[int]] = {}
    for tensor, all_offsets, all_sizes in zip(
        layout.box_tensor, layout.box_offsets, layout.box_shapes, strict=True
    ):
        index = int(tensor)
        ndim = len(layout.shapes[index])
        offsets = tuple(int(x) for x in all_offsets[:ndim])
        sizes = tuple(int(x) for x in all_sizes[:ndim])
        number = next(seen.setdefault(index, itertools.count()))
        yield (first + index, number, *_box_columns(offsets, sizes))


def put_record(
    connection: sqlite3.Connection,
    tier: int,
    run: int,
    record: CommitRecord,
    layout: LayoutRows | str,
    tensors: TensorRows,
    record_bytes: int,
) -> bool:
    """One commit record of a tier; False when it is in, or is known to have been collected since."""
    key = (tier, run, record.attempt)
    if connection.execute("SELECT 1 FROM ends WHERE (tier_id, run_id, attempt) = (?, ?, ?)", key).fetchone():
        return False
    if connection.execute(
        "SELECT 1 FROM replicas WHERE (tier_id, run_id, attempt) = (?, ?, ?)", key
    ).fetchone():
        return False
    layout_id = put_layout(connection, layout)
    checkpoint_id = _checkpoint(connection, run, record)
    chunks = sum(component.chunks for component in record.components)
    count = sum(component.tensors for component in record.components)
    values: dict[str, object] = {
        "checkpoint_id": checkpoint_id,
        "tier_id": tier,
        "run_id": run,
        "attempt": record.attempt,
        "generation": record.generation,
        "layout_id": layout_id,
        "step": record.step,
        "epoch": record.epoch,
        "sequence": record.sequence,
        "created_at": iso(record.created_at),
        "created_unix": record.created_at,
        "session": record.session,
        "origin": record.origin,
        "parents_json": list_json(record.parents),
        "world_size": record.world_size,
        "host": record.host,
        "writer": record.writer,
        "state": "ok",
        "restorable": 0,
        "tensors": count,
        "chunks": chunks,
        "logical_bytes": record.logical_bytes,
        "new_bytes": record.new_bytes,
        "reused_bytes": record.reused_bytes,
        "record_bytes": record_bytes,
        "saved_metrics_json": metrics_json(record.metrics),
        "saved_tags_json": list_json(record.tags),
        "timings_json": metrics_json(record.timings),
        "metadata_json": people_json(record.metadata),
        "not_captured_json": list_json(record.not_captured),
        "state_info_json": people_json(record.state_info),
    }
    replica_id = connection.execute(
        f"INSERT INTO replicas ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})",
        tuple(values.values()),
    ).lastrowid
    assert replica_id is not None
    connection.executemany(
        "INSERT INTO components VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            (replica_id, c.name, c.tensors, c.chunks, c.logical_bytes, c.new_bytes, c.reused_bytes)
            for c in record.components
        ),
    )
    _put_tensors(connection, replica_id, layout_id, tensors)
    return True


def _checkpoint(connection: sqlite3.Connection, run: int, record: CommitRecord) -> int:
    """Row id of the record's checkpoint; a new row holds only who it is, the facts come at the end."""
    row = connection.execute(
        "SELECT checkpoint_id FROM checkpoints WHERE run_id = ? AND checkpoint = ?", (run, record.checkpoint)
    ).fetchone()
    if row is not None:
        return int(row[0])
    made = connection.execute(
        "INSERT INTO checkpoints (run_id, checkpoint, step, epoch, sequence, place_epoch,"
        " place_sequence, session, origin,"
        " state, restorable, is_latest, damaged, doomed, forgotten, tensors, chunks, logical_bytes,"
        " new_bytes,"
        " reused_bytes, metrics_json, tags_json, timings_json)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'ok', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '{}', '[]', '{}')",
        (run, record.checkpoint, record.step, *record.order, *record.order, record.session, record.origin),
    ).lastrowid
    assert made is not None
    return made


def _put_tensors(connection: sqlite3.Connection, replica: int, layout: int, tensors: TensorRows) -> None:
    first, count = connection.execute(
        "SELECT (SELECT min(tensor_id) FROM tensors AS t WHERE t.layout_id = l.layout_id), l.tensors"
        " FROM layouts AS l WHERE l.layout_id = ?",
        (layout,),
    ).fetchone()
    lengths = {len(column) for column in (tensors.digests, tensors.bytes, tensors.new_bytes, tensors.chunks)}
    if lengths != {count}:  # the rows would be taken for another layout's tensors
        raise DocumentError(f"a record describes {sorted(lengths)} tensors of a layout that has {count}")
    if not count:
        return
    columns: tuple[Sequence[object], ...] = (
        [replica] * count,
        range(first, first + count),
        tensors.digests,
        _ints(tensors.bytes),
        _ints(tensors.new_bytes),
        _ints(tensors.chunks),
    )
    cells: list[object] = [None] * (count * len(columns))  # row after row
    for number, column in enumerate(columns):
        cells[number :: len(columns)] = column
    # Many rows in one statement: each statement lets the interpreter go and asks for it again, which costs
    # as much as the row, and training is what it is asked of.
    step = _ROWS_AT_ONCE * len(columns)
    for start in range(0, len(cells), step):
        some = cells[start : start + step]
        places = ", ".join(["(?, ?, ?, ?, ?, ?)"] * (len(some) // len(columns)))
        connection.execute(f"INSERT INTO checkpoint_tensors VALUES {places}", some)


def _ints(column: object) -> Sequence[int]:
    return column.tolist() if hasattr(column, "tolist") else column  # type: ignore[return-value]


def put_end(connection: sqlite3.Connection, tier: int, run: int, end: CommitEnd) -> str | None:
    """VOID or GONE at a commit key. Returns the checkpoint whose record was there, if one was."""
    key = (tier, run, end.attempt)
    connection.execute("INSERT OR REPLACE INTO ends VALUES (?, ?, ?, ?, ?)", (*key, end.kind, end.reason))
    return drop_record(connection, tier, run, end.attempt)


def drop_record(connection: sqlite3.Connection, tier: int, run: int, attempt: str) -> str | None:
    """Takes a record's rows out. Returns its checkpoint id."""
    row = connection.execute(
        "SELECT r.replica_id, r.layout_id, c.checkpoint FROM replicas AS r JOIN checkpoints AS c USING"
        " (checkpoint_id)"
        " WHERE (r.tier_id, r.run_id, r.attempt) = (?, ?, ?)",
        (tier, run, attempt),
    ).fetchone()
    if row is None:
        return None
    connection.execute("DELETE FROM replicas WHERE replica_id = ?", (row[0],))
    connection.execute(
        "DELETE FROM layouts WHERE layout_id = ? AND NOT EXISTS (SELECT 1 FROM replicas WHERE layout_id = ?)",
        (row[1], row[1]),
    )
    return str(row[2])


def put_note(connection: sqlite3.Connection, tier: int, run: int, key: str, note: Note) -> None:
    """One note; it is there once."""
    data = dict(note.data)
    if note.kind == "metrics":
        text = '{"metrics": ' + metrics_json(data.get("metrics", {})) + "}"
    else:
        text = people_json(data, max_chars=None)  # facts are derived from it
    connection.execute(
        "INSERT OR IGNORE INTO notes (tier_id, run_id, note_key, checkpoint, attempt, number, ulid,"
        " kind, noted_at,"
        " noted_unix, author, data_json) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            tier,
            run,
            key,
            note.checkpoint,
            note.attempt,
            note.number,
            note.ulid,
            note.kind,
            iso(note.at),
            note.at,
            note.author,
            text,
        ),
    )


def set_pins(connection: sqlite3.Connection, tier: int, intents: Iterable[IntentDoc]) -> None:
    """The pins of all intents that the tier was just seen to hold; earlier ones are forgotten."""
    connection.execute("DELETE FROM pins WHERE tier_id = ?", (tier,))
    connection.executemany(
        "INSERT OR IGNORE INTO pins VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                tier,
                i.attempt,
                key,
                pinned,
                i.kind,
                i.host,
                i.pid,
                i.user,
                iso(i.created_at),
                i.created_at,
                i.reason,
            )
            for i in intents
            for key, pinned in i.pins
        ),
    )
