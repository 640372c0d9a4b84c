"""The columns that say what a checkpoint amounts to, computed by :mod:`ckptstore.model.history` alone."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from ckptstore.manifest.text import (
    iso,
    list_json,
    metrics_from_json,
    metrics_from_plain,
    metrics_json,
    number_real,
    number_text,
)
from ckptstore.model.history import Entry, Facts, counting, derive
from ckptstore.model.record import TRIMMED, Note


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """A record of a checkpoint in a tier, with what its tier's notes and dooms make of it."""

    replica_id: int
    tier_id: int
    tier_order: int
    entry: Entry


def replicas_of(connection: sqlite3.Connection, run: int, checkpoint: str) -> list[Replica]:
    """All records of a checkpoint, hottest tier first, each with its facts."""
    rows = connection.execute(
        "SELECT r.replica_id, r.tier_id, t.tier_order, r.attempt, r.generation, r.step, r.epoch, r.sequence,"
        " r.created_unix, r.saved_metrics_json, r.saved_tags_json, r.state_info_json,"
        " EXISTS (SELECT 1 FROM dooms AS d WHERE (d.tier_id, d.run_id, d.attempt) = (r.tier_id,"
        " r.run_id, r.attempt))"
        " FROM checkpoints AS c JOIN replicas AS r USING (checkpoint_id) JOIN tiers AS t USING (tier_id)"
        " WHERE c.run_id = ? AND c.checkpoint = ? ORDER BY t.tier_order, t.tier_id, r.attempt",
        (run, checkpoint),
    ).fetchall()
    notes = notes_of(connection, run, checkpoint) if rows else []
    found = []
    for (
        replica_id,
        tier_id,
        order,
        attempt,
        generation,
        step,
        epoch,
        sequence,
        created,
        metrics,
        tags,
        state_info,
        doomed,
    ) in rows:
        facts = derive(attempt, metrics_from_json(metrics), json.loads(tags), notes, doomed=bool(doomed))
        entry = Entry(
            checkpoint, attempt, generation, step, epoch, sequence, created, facts, trimmed_of(state_info)
        )
        found.append(Replica(replica_id, tier_id, order, entry))
    return found


def trimmed_of(state_info: str) -> tuple[str, ...]:
    """Components that a record has lost, out of what it says of its state."""
    if TRIMMED not in state_info:  # as nearly always: nothing is parsed
        return ()
    found = json.loads(state_info).get(TRIMMED)
    return tuple(found) if isinstance(found, dict) else ()


def notes_of(connection: sqlite3.Connection, run: int, checkpoint: str) -> list[Note]:
    """The checkpoint's notes; one that stands in several tiers counts once."""
    rows = connection.execute(
        "SELECT number, ulid, kind, noted_unix, author, attempt, data_json FROM notes"
        " WHERE run_id = ? AND checkpoint = ? GROUP BY note_key",
        (run, checkpoint),
    ).fetchall()
    return [
        Note("", checkpoint, number, ulid, kind, at, author, attempt, _note_data(kind, data))
        for number, ulid, kind, at, author, attempt, data in rows
    ]


def _note_data(kind: str, text: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(text)
    if kind == "metrics":
        return {"metrics": metrics_from_plain(data["metrics"])}
    return data


def choose(replicas: Iterable[Replica]) -> Replica:
    """The record that speaks for the checkpoint: the first tier's that can be restored, else the first."""
    by_tier: dict[int, list[Replica]] = {}
    for replica in replicas:
        by_tier.setdefault(replica.tier_id, []).append(replica)
    candidates = []
    for of_tier in by_tier.values():
        winner = counting(replica.entry for replica in of_tier)[0]
        candidates.append(next(replica for replica in of_tier if replica.entry is winner))
    return min(candidates, key=lambda r: (not r.entry.facts.restorable, r.tier_order, r.tier_id))


def refresh(connection: sqlite3.Connection, run: int, checkpoints: Iterable[str]) -> None:
    """Recomputes the facts of these checkpoints of a run, and which one is latest."""
    for checkpoint in checkpoints:
        replicas = replicas_of(connection, run, checkpoint)
        if not replicas:
            connection.execute(
                "DELETE FROM checkpoints WHERE run_id = ? AND checkpoint = ?", (run, checkpoint)
            )
            continue
        for replica in replicas:
            facts = replica.entry.facts
            connection.execute(
                "UPDATE replicas SET state = ?, restorable = ?, damaged_reason = ?, verified_at = ? WHERE"
                " replica_id = ?",
                (
                    facts.state,
                    facts.restorable,
                    facts.damaged_reason,
                    iso(facts.verified_at),
                    replica.replica_id,
                ),
            )
        _write(connection, run, checkpoint, choose(replicas))
    _mark_latest(connection, run)


_FROM_REPLICA = (
    "step",
    "epoch",
    "sequence",
    "created_at",
    "created_unix",
    "session",
    "origin",
    "tensors",
    "chunks",
    "logical_bytes",
    "new_bytes",
    "reused_bytes",
    "timings_json",
)
_UPDATE = (
    f"UPDATE checkpoints SET ({', '.join(_FROM_REPLICA)}) ="
    f" (SELECT {', '.join(_FROM_REPLICA)} FROM replicas WHERE replica_id = :replica_id),"
    " replica_id = :replica_id, place_epoch = :place_epoch, place_sequence = :place_sequence, state = :state,"
    " restorable = :restorable, is_latest = 0, damaged = :damaged, damaged_reason = :damaged_reason,"
    " invalid_reason = :invalid_reason, doomed = :doomed, forgotten = :forgotten, verified_at = :verified_at,"
    " verified_unix = :verified_unix, metrics_json = :metrics_json, tags_json = :tags_json"
    " WHERE checkpoint_id = :checkpoint_id"
)


def _write(connection: sqlite3.Connection, run: int, checkpoint: str, replica: Replica) -> None:
    entry, facts = replica.entry, replica.entry.facts
    checkpoint_id = connection.execute(
        "SELECT checkpoint_id FROM checkpoints WHERE run_id = ? AND checkpoint = ?", (run, checkpoint)
    ).fetchone()[0]
    gone_back = connection.execute(
        "SELECT max(epoch) FROM sessions WHERE run_id = ? AND resumed_from = ?", (run, checkpoint)
    ).fetchone()[0]
    place = entry.order if gone_back is None else max(entry.order, (gone_back, 0))
    connection.execute(
        _UPDATE,
        {
            "checkpoint_id": checkpoint_id,
            "replica_id": replica.replica_id,
            "place_epoch": place[0],
            "place_sequence": place[1],
            "state": facts.state,
            "restorable": int(facts.restorable),
            "damaged": int(facts.damaged),
            "damaged_reason": facts.damaged_reason,
            "invalid_reason": facts.invalid_reason,
            "doomed": int(facts.doomed),
            "forgotten": int(facts.forgotten),
            "verified_at": iso(facts.verified_at),
            "verified_unix": facts.verified_at,
            "metrics_json": metrics_json(facts.metrics),
            "tags_json": list_json(facts.tags),
        },
    )
    for table in ("metrics", "tags", "timings"):
        connection.execute(f"DELETE FROM {table} WHERE checkpoint_id = ?", (checkpoint_id,))
    connection.executemany(
        "INSERT INTO metrics VALUES (?, ?, ?, ?)",
        ((checkpoint_id, name, number_real(v), number_text(v)) for name, v in facts.metrics.items()),
    )
    connection.executemany("INSERT INTO tags VALUES (?, ?)", ((checkpoint_id, tag) for tag in facts.tags))
    timings = connection.execute(
        "SELECT timings_json FROM replicas WHERE replica_id = ?", (replica.replica_id,)
    ).fetchone()[0]
    connection.executemany(
        "INSERT INTO timings VALUES (?, ?, ?)",
        ((checkpoint_id, phase, number_real(v)) for phase, v in metrics_from_json(timings).items()),
    )


def _mark_latest(connection: sqlite3.Connection, run: int) -> None:
    connection.execute("UPDATE checkpoints SET is_latest = 0 WHERE run_id = ? AND is_latest", (run,))
    connection.execute(
        "UPDATE checkpoints SET is_latest = 1 WHERE checkpoint_id = (SELECT checkpoint_id FROM checkpoints"
        " WHERE run_id = ? AND restorable ORDER BY place_epoch DESC, place_sequence DESC, checkpoint"
        " DESC LIMIT 1)",
        (run,),
    )


def facts_of(row: sqlite3.Row | dict[str, Any]) -> Facts:
    """The facts out of a row of `checkpoints`."""
    return Facts(
        state=row["state"],
        restorable=bool(row["restorable"]),
        damaged=bool(row["damaged"]),
        damaged_reason=row["damaged_reason"],
        invalid_reason=row["invalid_reason"],
        doomed=bool(row["doomed"]),
        forgotten=bool(row["forgotten"]),
        verified_at=row["verified_unix"],
        metrics=metrics_from_json(row["metrics_json"]),
        tags=tuple(json.loads(row["tags_json"])),
    )
