"""Questions to the manifest, and their answers as plain data."""

from __future__ import annotations

import difflib
import json
import sqlite3
from typing import Any

from ckptstore.manifest.facts import facts_of, trimmed_of
from ckptstore.manifest.rows import (
    BoxRow,
    CheckpointRow,
    LayoutRow,
    PinRow,
    RunRow,
    TensorAt,
    TensorRow,
    TierRow,
)
from ckptstore.model.history import Entry
from ckptstore.model.record import EpochDoc


def tiers(connection: sqlite3.Connection) -> list[TierRow]:
    """All tiers, hottest first."""
    rows = connection.execute(
        "SELECT tier_uuid, tier_order, name, url FROM tiers ORDER BY tier_order, tier_id"
    )
    return [TierRow(*row) for row in rows]


def runs(connection: sqlite3.Connection) -> list[RunRow]:
    """All runs by name, with their totals."""
    totals = {
        row[0]: row[1:]
        for row in connection.execute(
            "SELECT run_id, count(*), sum(restorable), sum(new_bytes) FROM checkpoints GROUP BY run_id"
        )
    }
    newest = {
        row[0]: row[1:]
        for row in connection.execute(
            "SELECT run_id, checkpoint, step, created_unix, logical_bytes FROM checkpoints WHERE is_latest"
        )
    }
    sessions_of = dict(connection.execute("SELECT run_id, count(*) FROM sessions GROUP BY run_id").fetchall())
    found = []
    for run_id, run, key, created in connection.execute(
        "SELECT run_id, run, run_key, created_unix FROM runs ORDER BY run, run_key"
    ):
        count, restorable, new_bytes = totals.get(run_id, (0, 0, 0))
        checkpoint, step, at, size = newest.get(run_id, (None, None, None, None))
        found.append(
            RunRow(
                run=run,
                run_key=key,
                created_at=created,
                checkpoints=count,
                restorable=restorable,
                sessions=sessions_of.get(run_id, 0),
                latest=checkpoint,
                latest_step=step,
                latest_created_at=at,
                latest_logical_bytes=size,
                new_bytes=new_bytes,
            )
        )
    return found


def find_runs_like(connection: sqlite3.Connection, name: str, limit: int) -> list[str]:
    """Names of runs that somebody who typed `name` may have meant, the likeliest first."""
    names = [row[0] for row in connection.execute("SELECT DISTINCT run FROM runs ORDER BY run")]
    wanted = name.casefold()
    folded = {candidate: candidate.casefold() for candidate in names}
    same = [n for n in names if folded[n] == wanted]
    close = difflib.get_close_matches(wanted, list(folded.values()), n=limit, cutoff=0.6)
    near = [n for text in close for n in names if folded[n] == text]
    inside = [n for n in names if wanted in folded[n] or (len(folded[n]) > 2 and folded[n] in wanted)]
    return list(dict.fromkeys([*same, *near, *inside]))[:limit]


def sessions(connection: sqlite3.Connection, run_key: str) -> list[EpochDoc]:
    """A run's sessions in order."""
    rows = connection.execute(
        "SELECT runs.run, s.epoch, s.session, s.host, s.boot_id, s.pid, s.started_unix, s.resumed_from,"
        " s.rewound,"
        " s.session_key FROM sessions AS s JOIN runs USING (run_id) WHERE run_key = ? ORDER BY s.epoch",
        (run_key,),
    )
    return [EpochDoc(*(*row[:8], bool(row[8]), row[9])) for row in rows]


def history(connection: sqlite3.Connection, run_key: str, *, only_latest: bool = False) -> list[Entry]:
    """A run's checkpoints with their facts, by (epoch, sequence)."""
    wanted = "AND c.is_latest" if only_latest else ""
    copies = _copies(connection, run_key, wanted)
    rows = _named(
        connection,
        "SELECT c.checkpoint, t.tier_uuid, r.attempt, r.generation, c.step, c.epoch, c.sequence,"
        " c.created_unix, c.state, c.restorable, c.damaged, c.damaged_reason, c.invalid_reason, c.doomed,"
        " c.forgotten, c.verified_unix, c.metrics_json, c.tags_json, r.state_info_json"
        " FROM checkpoints AS c JOIN runs USING (run_id)"
        " JOIN replicas AS r ON r.replica_id = c.replica_id JOIN tiers AS t ON t.tier_id = r.tier_id"
        f" WHERE run_key = ? {wanted} ORDER BY c.epoch, c.sequence, c.checkpoint",
        (run_key,),
    )
    return [
        Entry(
            checkpoint=row["checkpoint"],
            attempt=row["attempt"],
            generation=row["generation"],
            step=row["step"],
            epoch=row["epoch"],
            sequence=row["sequence"],
            created_at=row["created_unix"],
            facts=facts_of(row),
            trimmed=trimmed_of(row["state_info_json"]),
            tier=row["tier_uuid"],
            copies=copies.get(row["checkpoint"], ((row["tier_uuid"], row["attempt"]),)),
        )
        for row in rows
    ]


def _copies(
    connection: sqlite3.Connection, run_key: str, wanted: str
) -> dict[str, tuple[tuple[str, str], ...]]:
    """(tier uuid, attempt) of the live records of each checkpoint, hottest tier first, damaged ones last."""
    if connection.execute("SELECT count(*) FROM tiers").fetchone()[0] < 2:
        return {}  # it is the record that counts
    rows = connection.execute(
        "SELECT c.checkpoint, t.tier_uuid, r.attempt FROM replicas AS r"
        " JOIN runs ON runs.run_id = r.run_id JOIN checkpoints AS c USING (checkpoint_id)"
        f" JOIN tiers AS t USING (tier_id) WHERE run_key = ? {wanted} AND r.state <> 'doomed'"
        " ORDER BY r.damaged_reason IS NOT NULL, t.tier_order, r.generation DESC, r.attempt",
        (run_key,),
    )
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for checkpoint, tier, attempt in rows:
        found[checkpoint] = (*found.get(checkpoint, ()), (tier, attempt))
    return found


def checkpoints(
    connection: sqlite3.Connection,
    run_key: str | None,
    restorable: bool | None,
    newest_first: bool,
    limit: int | None,
    checkpoint: str | None = None,
) -> list[CheckpointRow]:
    """Checkpoints by run name and then from oldest to newest as the run's order stands now."""
    down = " DESC" if newest_first else ""
    where = ["1"]
    values: list[object] = []
    if run_key is not None:
        where.append("runs.run_key = ?")
        values.append(run_key)
    if checkpoint is not None:
        where.append("c.checkpoint = ?")
        values.append(checkpoint)
    if restorable is not None:
        where.append("c.restorable = ?")
        values.append(int(restorable))
    rows = connection.execute(
        "SELECT c.checkpoint_id, runs.run, runs.run_key, c.checkpoint, r.attempt, r.generation, c.step,"
        " c.epoch,"
        " c.sequence, c.place_epoch, c.place_sequence, c.created_unix, c.session, c.origin, r.host,"
        " r.world_size,"
        " c.state, c.restorable, c.is_latest, c.damaged_reason, c.invalid_reason, c.verified_unix,"
        " c.tensors, c.chunks,"
        " c.logical_bytes, c.new_bytes, c.reused_bytes, c.metrics_json, c.tags_json, c.timings_json"
        " FROM checkpoints AS c JOIN runs USING (run_id)"
        " JOIN replicas AS r ON r.replica_id = c.replica_id"
        f" WHERE {' AND '.join(where)} ORDER BY runs.run, runs.run_key, c.place_epoch{down},"
        f" c.place_sequence{down},"
        f" c.checkpoint{down} LIMIT ?",
        (*values, -1 if limit is None else limit),
    ).fetchall()
    pins_of, tiers_of = _pin_counts(connection), _tier_names(connection)
    return [
        CheckpointRow(
            *(
                *row[1:9],
                (row[9], row[10]),
                *row[11:17],
                bool(row[17]),
                bool(row[18]),
                *row[19:30],
                pins_of.get(row[0], 0),
                tiers_of[row[0]],
            )
        )
        for row in rows
    ]


def _pin_counts(connection: sqlite3.Connection) -> dict[int, int]:
    rows = connection.execute(
        "SELECT r.checkpoint_id, count(DISTINCT p.intent) FROM pins AS p JOIN runs ON runs.run_key ="
        " p.run_key"
        " JOIN replicas AS r ON r.tier_id = p.tier_id AND r.run_id = runs.run_id AND r.attempt = p.attempt"
        " GROUP BY r.checkpoint_id"
    )
    return dict(rows.fetchall())


def _tier_names(connection: sqlite3.Connection) -> dict[int, tuple[str, ...]]:
    """Checkpoint row -> names of its tiers, hottest first; the tuples are shared."""
    tiers_in_order = connection.execute(
        "SELECT tier_id, name FROM tiers ORDER BY tier_order, tier_id"
    ).fetchall()
    bit_of = {tier: 1 << i for i, (tier, _) in enumerate(tiers_in_order)}
    masks: dict[int, int] = {}
    # INDEXED BY: the covering index holds all that is asked for.
    for checkpoint, tier in connection.execute(
        "SELECT checkpoint_id, tier_id FROM replicas INDEXED BY replicas_checkpoint"
    ):
        masks[checkpoint] = masks.get(checkpoint, 0) | bit_of[tier]
    names = {
        mask: tuple(name for tier, name in tiers_in_order if mask & bit_of[tier])
        for mask in set(masks.values())
    }
    return {checkpoint: names[mask] for checkpoint, mask in masks.items()}


def checkpoint_by_prefix(connection: sqlite3.Connection, prefix: str) -> list[tuple[str, str]]:
    """(run key, checkpoint) of every checkpoint whose id begins with `prefix`, letters in any case."""
    low = prefix.upper()
    rows = connection.execute(
        "SELECT runs.run_key, c.checkpoint FROM checkpoints AS c JOIN runs USING (run_id)"
        " WHERE c.checkpoint >= ? AND c.checkpoint < ? ORDER BY c.checkpoint, runs.run_key",
        (low, low + "\U0010ffff"),
    )
    return [(row[0], row[1]) for row in rows]


def replica_id(connection: sqlite3.Connection, checkpoint: str, run_key: str | None) -> int | None:
    """The record that speaks for the checkpoint."""
    row = connection.execute(
        "SELECT c.replica_id FROM checkpoints AS c JOIN runs USING (run_id)"
        " WHERE c.checkpoint = ? AND coalesce(?, runs.run_key) = runs.run_key ORDER BY runs.run_key",
        (checkpoint, run_key),
    ).fetchone()
    return None if row is None else int(row[0])


def tensors(connection: sqlite3.Connection, replica: int) -> list[TensorRow]:
    """The tensors of a record in the layout's order, further names of tied ones last."""
    rows = connection.execute(
        "SELECT t.tensor, t.component, t.dtype, t.shape, t.kind,"
        " iif(t.content_tensor_id = t.tensor_id, NULL, tied.tensor), x.digest, x.bytes, x.new_bytes, x.chunks"
        " FROM replicas AS r JOIN tensors AS t USING (layout_id)"
        " JOIN checkpoint_tensors AS x ON x.replica_id = r.replica_id AND x.tensor_id = t.content_tensor_id"
        " JOIN tensors AS tied ON tied.tensor_id = t.content_tensor_id"
        " WHERE r.replica_id = ? ORDER BY t.tensor_id",
        (replica,),
    )
    return [TensorRow(*(*row[:3], tuple(json.loads(row[3])), *row[4:])) for row in rows]


def layout(connection: sqlite3.Connection, replica: int) -> LayoutRow:
    """The layout of a record."""
    row = connection.execute(
        "SELECT layout_digest, chunk_bytes, l.tensors, l.boxes, l.boxes_expanded"
        " FROM replicas AS r JOIN layouts AS l USING (layout_id) WHERE r.replica_id = ?",
        (replica,),
    ).fetchone()
    return LayoutRow(*(*row[:4], bool(row[4])))


def boxes(connection: sqlite3.Connection, replica: int, tensor: str | None) -> list[BoxRow]:
    """The boxes of a record's tensors; none when the layout's are not expanded."""
    rows = connection.execute(
        "SELECT t.tensor, b.offsets, b.shape FROM replicas AS r JOIN tensors AS t USING (layout_id)"
        " JOIN boxes AS b ON b.tensor_id = t.content_tensor_id"
        " WHERE r.replica_id = ? AND coalesce(?, t.tensor) = t.tensor ORDER BY t.tensor_id, b.box",
        (replica, tensor),
    )
    return [
        BoxRow(name, tuple(json.loads(offsets)), tuple(json.loads(shape))) for name, offsets, shape in rows
    ]


def tensor_history(connection: sqlite3.Connection, run_key: str, tensor: str) -> list[TensorAt]:
    """The tensor in every checkpoint of the run that has it, by (epoch, sequence)."""
    rows = connection.execute(
        "SELECT v.checkpoint, v.step, v.epoch, v.sequence, v.digest, v.bytes, v.new_bytes FROM v_tensors AS v"
        " WHERE v.tensor = ? AND v.run = (SELECT run FROM runs WHERE run_key = ?)"
        " ORDER BY v.epoch, v.sequence, v.checkpoint",
        (tensor, run_key),
    )
    found: list[TensorAt] = []
    for row in rows:
        found.append(TensorAt(*(*row, not found or found[-1].digest != row[4])))
    return found


def pins(connection: sqlite3.Connection) -> list[PinRow]:
    """Every pin that was seen, oldest first."""
    rows = connection.execute(
        "SELECT t.tier_uuid, p.intent, p.kind, p.run_key, p.attempt, p.host, p.user, p.created_unix, p.reason"
        " FROM pins AS p JOIN tiers AS t USING (tier_id) ORDER BY p.created_unix, p.intent, p.attempt"
    )
    return [PinRow(*row) for row in rows]


def _named(connection: sqlite3.Connection, sql: str, values: tuple[object, ...]) -> list[dict[str, Any]]:
    cursor = connection.execute(sql, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
