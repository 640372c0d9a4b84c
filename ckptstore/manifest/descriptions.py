"""What every table, view and column means, for people who open the file: datasette's pages and the docs."""

from __future__ import annotations

TABLES: dict[str, str] = {
    "store": "Whose manifest this file is; one row.",
    "schema_migrations": "Which schema versions this file has been through.",
    "tiers": "The store's tiers: copies of the data, hottest first.",
    "runs": "Trainings, by name.",
    "sessions": "Each time that a run was trained, and which checkpoint it resumed from.",
    "checkpoints": "One row per checkpoint of a run; facts and sizes are of the record that counts.",
    "replicas": "One row per commit record: a checkpoint in a tier.",
    "ends": "Attempts that did not commit (void), or whose record was collected (gone).",
    "components": "Top-level keys of a record's state, with their sizes.",
    "metrics": "A checkpoint's metrics: those of the save, overlaid by later annotations.",
    "tags": "A checkpoint's tags as they stand now.",
    "timings": "Seconds that each phase of the save took.",
    "notes": "Later facts about checkpoints, as they were written; never changed.",
    "layouts": "Distinct sets of tensors and how they are cut; checkpoints of a run mostly share one.",
    "tensors": "The tensors of each layout.",
    "boxes": "The stored rectangles of each tensor, in global indices.",
    "checkpoint_tensors": "What each record says of each tensor: its content and what was written anew.",
    "dooms": "Records that garbage collection has announced to delete.",
    "pins": "Which records were last seen to be pinned, by whom.",
    "v_checkpoints": "Checkpoints with everything about them, one row each. Start here.",
    "v_tensors": "Every tensor of every checkpoint; always give a run and a tensor, or a checkpoint.",
    "v_reuse": "What each checkpoint added, and how much it took from earlier ones.",
    "v_replicas": "Which checkpoint is on which tier, in which state.",
    "v_tiers": "Each run on each tier, in numbers.",
    "v_retention": "What speaks for keeping each checkpoint, whatever the policy; policies add to it.",
}
"""Table or view -> what it holds."""

_CHECKPOINT_ID = "Number of the row in `checkpoints`."
_RUN_ID = "Number of the row in `runs`."
_TIER_ID = "Number of the row in `tiers`."
_REPLICA_ID = "Number of the row in `replicas`."
_UNIX = "The same time in seconds since 1970, exactly as written."

_COMMON: dict[str, str] = {
    "run": "Name of the run.",
    "run_key": "The run's folder in every tier: a readable part and a digest of the name.",
    "checkpoint": "Id of the checkpoint, the same in every tier.",
    "step": "Training step it was saved at.",
    "epoch": "Number of the session that saved it, from 1; the first part of the run's order.",
    "sequence": "Count of saves in the session; the second part of the run's order.",
    "created_at": "When it was saved, by the writer's clock (UTC, ISO 8601).",
    "created_unix": _UNIX,
    "session": "ULID of the session.",
    "origin": "How it was made: save, import, average, replicate, repair or trim.",
    "state": "ok, damaged, invalid, doomed or expiring: the worst that applies.",
    "restorable": "1: may be latest, and counts for retention.",
    "is_latest": "1: the newest restorable checkpoint of its run.",
    "damaged": "1: an object that it needs was found missing or changed.",
    "damaged_reason": "What was found; null when not damaged.",
    "invalid_reason": "Why a person or program marked it invalid; null when valid.",
    "doomed": "1: garbage collection has announced to delete it.",
    "forgotten": "1: a person asked to have it removed.",
    "verified_at": "When all its objects were last found good; null when never, or damaged since.",
    "tensors": "Number of tensors.",
    "chunks": "Number of chunks.",
    "logical_bytes": "Size of all tensors, each counted once.",
    "new_bytes": "Bytes that the save wrote.",
    "reused_bytes": "Bytes that the save took from checkpoints stored before.",
    "attempt": "Id of the attempt that wrote the record.",
    "generation": "0 for the first record; higher after a repair or trim.",
    "world_size": "Number of ranks that saved it.",
    "host": "Host of rank 0.",
    "writer": "Program and version that wrote the record.",
    "tier": "Name of the tier.",
    "tier_order": "Place of the tier in the store, 0 is the hottest.",
    "url": "Where the tier is.",
    "layout_digest": "BLAKE3 of the layout table.",
    "boxes_expanded": "1: the boxes are rows of `boxes`; 0: there are too many, they are only in the store.",
    "tensor": "Name of the tensor.",
    "component": "Top-level key of the state that it belongs to.",
    "dtype": "Element type.",
    "shape": "Global shape, a JSON list.",
    "elements": "Number of elements; null when over 63 bits.",
    "kind": "What it is: as the writer says.",
    "digest": "Identifies the content: equal digests, equal tensors.",
    "bytes": "Size of the tensor.",
}

_RECORD: dict[str, str] = {
    "parents_json": "Checkpoint ids it was made from, a JSON list.",
    "timings_json": "Seconds per phase of the save, a JSON object.",
    "metadata_json": "The caller's metadata as JSON for people; the store has the exact values.",
    "not_captured_json": "Training state that the save did not hold, a JSON list.",
    "state_info_json": "Facts about the state, a JSON object.",
}

_SPECIFIC: dict[str, dict[str, str]] = {
    "store": {
        "one": "Always 1.",
        "store_uuid": "The store's uuid.",
        "file_inode": "The file's inode number when it was made; a copy of the file has another.",
        "created_at": "When this file was made (UTC, ISO 8601).",
        "written_by": "Program and version that made it.",
    },
    "schema_migrations": {
        "version": "Schema version.",
        "name": "Name of the step.",
        "applied_at": "When (UTC, ISO 8601).",
    },
    "tiers": {"tier_id": _TIER_ID, "tier_uuid": "The tier's uuid.", "name": "Name of the tier."},
    "runs": {"run_id": _RUN_ID, "created_at": "When the run was first opened (UTC, ISO 8601)."},
    "sessions": {
        "run_id": _RUN_ID,
        "epoch": "Number of the session, from 1.",
        "session_key": "The launcher's key for this start, if there was one.",
        "boot_id": "Identifies the host's boot.",
        "pid": "Process of rank 0.",
        "started_at": "When it was opened (UTC, ISO 8601).",
        "started_unix": _UNIX,
        "resumed_from": "Checkpoint that it continued; null for a start from nothing.",
        "rewound": "1: opened by going back on purpose.",
    },
    "checkpoints": {
        "checkpoint_id": _CHECKPOINT_ID,
        "run_id": _RUN_ID,
        "replica_id": "Which row of `replicas` speaks for it.",
        "place_epoch": "First part of its place in the order that stands now: going back to it moves it.",
        "place_sequence": "Second part of that place.",
        "verified_unix": _UNIX,
        "metrics_json": "All metrics, a JSON object; NaN and infinities as text.",
        "tags_json": "All tags, a JSON list.",
        "timings_json": _RECORD["timings_json"],
    },
    "replicas": {
        "replica_id": _REPLICA_ID,
        "checkpoint_id": _CHECKPOINT_ID,
        "tier_id": _TIER_ID,
        "run_id": _RUN_ID,
        "layout_id": "Number of the row in `layouts`.",
        "record_bytes": "Size of the commit record itself.",
        "saved_metrics_json": "Metrics in the record, without later annotations.",
        "saved_tags_json": "Tags in the record, without later changes.",
        **_RECORD,
    },
    "ends": {
        "tier_id": _TIER_ID,
        "run_id": _RUN_ID,
        "kind": "void: it will never commit; gone: it was collected.",
        "reason": "Why, as written.",
    },
    "components": {"replica_id": _REPLICA_ID},
    "metrics": {
        "checkpoint_id": _CHECKPOINT_ID,
        "metric": "Name of the metric.",
        "value": "Its value; null for NaN; the nearest float for integers over 53 bits.",
        "exact": "Its value as text, exactly: NaN, Infinity, -0.0 and integers of any size.",
    },
    "tags": {"checkpoint_id": _CHECKPOINT_ID, "tag": "The tag."},
    "timings": {
        "checkpoint_id": _CHECKPOINT_ID,
        "phase": "Name of the phase.",
        "seconds": "How long it took.",
    },
    "notes": {
        "note_id": "Number of the row.",
        "tier_id": _TIER_ID,
        "run_id": _RUN_ID,
        "note_key": "Key of the document in the tier.",
        "attempt": "The record it speaks of (verified, damaged); null when about the checkpoint.",
        "number": "Notes about a checkpoint apply in the order of number, then ulid.",
        "ulid": "Breaks ties.",
        "kind": "metrics, tag, untag, invalid, valid, forgotten, expiring, verified or damaged.",
        "noted_at": "When it was written (UTC, ISO 8601).",
        "noted_unix": _UNIX,
        "author": "Who wrote it.",
        "data_json": "What it says, a JSON object.",
    },
    "layouts": {
        "layout_id": "Number of the row.",
        "chunk_bytes": "Largest chunk.",
        "boxes": "Number of boxes.",
    },
    "tensors": {
        "tensor_id": "Number of the row; those of one layout follow each other.",
        "layout_id": "Number of the row in `layouts`.",
        "content_tensor_id": "Whose content it has: its own number, or that of the tensor it is tied to.",
    },
    "boxes": {
        "tensor_id": "Number of the row in `tensors`.",
        "box": "Number of the box in its tensor, from 0.",
        "offsets": "Where it begins in each dimension, a JSON list.",
        "shape": "Its size in each dimension, a JSON list.",
        "ranges": "The same as a slice: [0:1024, 0:4096].",
    },
    "checkpoint_tensors": {
        "replica_id": _REPLICA_ID,
        "tensor_id": "Number of the row in `tensors`.",
        "new_bytes": "Bytes of it that the save wrote; the rest was reused.",
    },
    "dooms": {"tier_id": _TIER_ID, "run_id": _RUN_ID, "attempt": "The doomed record."},
    "pins": {
        "tier_id": _TIER_ID,
        "intent": "Id of the announcement that pins.",
        "run_key": "Run of the pinned record.",
        "attempt": "The pinned record.",
        "kind": "save, read, replicate, repair, trim or pin.",
        "host": "Where the holder runs.",
        "pid": "Its process.",
        "user": "Who runs it.",
        "created_at": "When it was announced (UTC, ISO 8601).",
        "reason": "Why, as written.",
    },
    "v_checkpoints": {
        "metrics": "All metrics, a JSON object; NaN and infinities as text.",
        "tags": "All tags, a JSON list.",
        "timings": _RECORD["timings_json"],
        "parents": _RECORD["parents_json"],
        "metadata": _RECORD["metadata_json"],
        "not_captured": _RECORD["not_captured_json"],
        "tier": "Tier of the record that speaks for the checkpoint.",
        "boxes": "Number of boxes of its layout.",
    },
    "v_tensors": {
        "new_bytes": "Bytes of it that the save wrote; the rest was reused.",
        "alias_of": "Name of the tensor that it is tied to; null otherwise.",
        "boxes": "Number of its boxes; 0 when boxes_expanded is 0.",
    },
    "v_reuse": {
        "reused_percent": "Share of its bytes that were reused; null when it has none.",
        "run_new_bytes": "Bytes written by this and all earlier saves of the run.",
        "run_logical_bytes": "What they would have been without reuse.",
    },
    "v_replicas": {
        "unverified": "1: never verified there, or damaged since.",
        "counts": "1: this record speaks for the checkpoint.",
        "record_bytes": "Size of the commit record itself.",
    },
    "v_tiers": {
        "checkpoints": "Checkpoints of the run with a record in the tier.",
        "restorable": "How many of them can be restored from there.",
        "only_elsewhere": "Checkpoints of the run that other tiers have and this one has not.",
        "damaged": "Damaged records there.",
        "unverified": "Records there that were never verified, or are damaged since.",
        "highest_restorable_step": "Highest step that can be restored from there.",
        "oldest_verified_at": "When the longest unchecked of the verified ones was verified.",
        "new_bytes": "Bytes that the saves of these records wrote.",
    },
    "v_retention": {
        "newest_rank": "1 is the newest restorable, 2 the one before, ...: what `last=N` counts.",
        "newest_verified": "1: the newest restorable one that was verified.",
        "tags": "All tags, a JSON list.",
        "pins": "How many intents were last seen to pin it.",
        "expiring": "1: retention has said that it will go, and when; it can still be kept.",
        "held_by": "What keeps it whatever the policy says; null: only a policy can.",
    },
}


def describe(table: str, column: str) -> str:
    """What a column means; raises KeyError when nobody has written it down."""
    specific = _SPECIFIC.get(table, {})
    return specific[column] if column in specific else _COMMON[column]


def columns(table: str) -> dict[str, str]:
    """The columns of `table` that mean something else there than elsewhere."""
    return dict(_SPECIFIC.get(table, {}))
