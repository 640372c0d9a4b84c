"""The tables of the manifest, version 1. STRICT, with foreign keys, for people to read.

What is not enforced and why: ``checkpoint_tensors.tensor_id`` names a row of ``tensors`` without a
foreign key, because the index that enforcing it needs would be as large as the table and cost every
save thousands of scattered page writes.
"""

from __future__ import annotations

APPLICATION_ID = 0x636B7074
"""``ckpt`` in ASCII, in the header of the file."""

TABLES: dict[str, str] = {
    "tiers": """
CREATE TABLE tiers (
    tier_id INTEGER PRIMARY KEY,
    tier_uuid TEXT NOT NULL UNIQUE,
    tier_order INTEGER NOT NULL,
    name TEXT NOT NULL,
    url TEXT NOT NULL
) STRICT""",
    "runs": """
CREATE TABLE runs (
    run_id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    run_key TEXT NOT NULL UNIQUE,
    created_at TEXT,
    created_unix REAL
) STRICT""",
    "sessions": """
CREATE TABLE sessions (
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    session TEXT NOT NULL,
    session_key TEXT NOT NULL,
    host TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started_at TEXT,
    started_unix REAL,
    resumed_from TEXT,
    rewound INTEGER NOT NULL CHECK (rewound IN (0, 1)),
    PRIMARY KEY (run_id, epoch)
) STRICT""",
    "layouts": """
CREATE TABLE layouts (
    layout_id INTEGER PRIMARY KEY,
    layout_digest TEXT NOT NULL UNIQUE,
    chunk_bytes INTEGER NOT NULL,
    tensors INTEGER NOT NULL,
    boxes INTEGER NOT NULL,
    boxes_expanded INTEGER NOT NULL CHECK (boxes_expanded IN (0, 1))
) STRICT""",
    "tensors": """
CREATE TABLE tensors (
    tensor_id INTEGER PRIMARY KEY,
    layout_id INTEGER NOT NULL REFERENCES layouts ON DELETE CASCADE,
    tensor TEXT NOT NULL,
    component TEXT NOT NULL,
    dtype TEXT NOT NULL,
    shape TEXT NOT NULL,
    elements INTEGER,
    kind TEXT NOT NULL,
    content_tensor_id INTEGER NOT NULL
) STRICT""",
    "boxes": """
CREATE TABLE boxes (
    tensor_id INTEGER NOT NULL REFERENCES tensors ON DELETE CASCADE,
    box INTEGER NOT NULL,
    offsets TEXT NOT NULL,
    shape TEXT NOT NULL,
    ranges TEXT NOT NULL,
    PRIMARY KEY (tensor_id, box)
) STRICT, WITHOUT ROWID""",
    "checkpoints": """
CREATE TABLE checkpoints (
    checkpoint_id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    checkpoint TEXT NOT NULL,
    replica_id INTEGER REFERENCES replicas ON DELETE SET NULL,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    place_epoch INTEGER NOT NULL,
    place_sequence INTEGER NOT NULL,
    created_at TEXT,
    created_unix REAL,
    session TEXT NOT NULL,
    origin TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ok', 'damaged', 'invalid', 'doomed', 'expiring')),
    restorable INTEGER NOT NULL CHECK (restorable IN (0, 1)),
    is_latest INTEGER NOT NULL CHECK (is_latest IN (0, 1)),
    damaged INTEGER NOT NULL CHECK (damaged IN (0, 1)),
    damaged_reason TEXT,
    invalid_reason TEXT,
    doomed INTEGER NOT NULL CHECK (doomed IN (0, 1)),
    forgotten INTEGER NOT NULL CHECK (forgotten IN (0, 1)),
    verified_at TEXT,
    verified_unix REAL,
    tensors INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    logical_bytes INTEGER NOT NULL,
    new_bytes INTEGER NOT NULL,
    reused_bytes INTEGER NOT NULL,
    metrics_json TEXT NOT NULL,
    tags_json TEXT NOT NULL,
    timings_json TEXT NOT NULL,
    UNIQUE (run_id, checkpoint)
) STRICT""",
    "replicas": """
CREATE TABLE replicas (
    replica_id INTEGER PRIMARY KEY,
    checkpoint_id INTEGER NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    attempt TEXT NOT NULL,
    generation INTEGER NOT NULL,
    layout_id INTEGER NOT NULL REFERENCES layouts,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    created_at TEXT,
    created_unix REAL,
    session TEXT NOT NULL,
    origin TEXT NOT NULL,
    parents_json TEXT NOT NULL,
    world_size INTEGER NOT NULL,
    host TEXT NOT NULL,
    writer TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ok', 'damaged', 'invalid', 'doomed', 'expiring')),
    restorable INTEGER NOT NULL CHECK (restorable IN (0, 1)),
    damaged_reason TEXT,
    verified_at TEXT,
    tensors INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    logical_bytes INTEGER NOT NULL,
    new_bytes INTEGER NOT NULL,
    reused_bytes INTEGER NOT NULL,
    record_bytes INTEGER NOT NULL,
    saved_metrics_json TEXT NOT NULL,
    saved_tags_json TEXT NOT NULL,
    timings_json TEXT NOT NULL,
    metadata_json TEXT NOT NULL,
    not_captured_json TEXT NOT NULL,
    state_info_json TEXT NOT NULL,
    UNIQUE (tier_id, run_id, attempt)
) STRICT""",
    "ends": """
CREATE TABLE ends (
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    attempt TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('void', 'gone')),
    reason TEXT NOT NULL,
    PRIMARY KEY (tier_id, run_id, attempt)
) STRICT, WITHOUT ROWID""",
    "components": """
CREATE TABLE components (
    replica_id INTEGER NOT NULL REFERENCES replicas ON DELETE CASCADE,
    component TEXT NOT NULL,
    tensors INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    logical_bytes INTEGER NOT NULL,
    new_bytes INTEGER NOT NULL,
    reused_bytes INTEGER NOT NULL,
    PRIMARY KEY (replica_id, component)
) STRICT, WITHOUT ROWID""",
    "checkpoint_tensors": """
CREATE TABLE checkpoint_tensors (
    replica_id INTEGER NOT NULL REFERENCES replicas ON DELETE CASCADE,
    tensor_id INTEGER NOT NULL,
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    new_bytes INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    PRIMARY KEY (replica_id, tensor_id)
) STRICT, WITHOUT ROWID""",
    "metrics": """
CREATE TABLE metrics (
    checkpoint_id INTEGER NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
    metric TEXT NOT NULL,
    value REAL,
    exact TEXT NOT NULL,
    PRIMARY KEY (checkpoint_id, metric)
) STRICT, WITHOUT ROWID""",
    "tags": """
CREATE TABLE tags (
    checkpoint_id INTEGER NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
    tag TEXT NOT NULL,
    PRIMARY KEY (checkpoint_id, tag)
) STRICT, WITHOUT ROWID""",
    "timings": """
CREATE TABLE timings (
    checkpoint_id INTEGER NOT NULL REFERENCES checkpoints ON DELETE CASCADE,
    phase TEXT NOT NULL,
    seconds REAL,
    PRIMARY KEY (checkpoint_id, phase)
) STRICT, WITHOUT ROWID""",
    "notes": """
CREATE TABLE notes (
    note_id INTEGER PRIMARY KEY,
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    note_key TEXT NOT NULL,
    checkpoint TEXT NOT NULL,
    attempt TEXT,
    number INTEGER NOT NULL,
    ulid TEXT NOT NULL,
    kind TEXT NOT NULL,
    noted_at TEXT,
    noted_unix REAL,
    author TEXT NOT NULL,
    data_json TEXT NOT NULL,
    UNIQUE (tier_id, run_id, note_key)
) STRICT""",
    "dooms": """
CREATE TABLE dooms (
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    run_id INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
    attempt TEXT NOT NULL,
    PRIMARY KEY (tier_id, run_id, attempt)
) STRICT, WITHOUT ROWID""",
    "pins": """
CREATE TABLE pins (
    tier_id INTEGER NOT NULL REFERENCES tiers ON DELETE CASCADE,
    intent TEXT NOT NULL,
    run_key TEXT NOT NULL,
    attempt TEXT NOT NULL,
    kind TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    user TEXT NOT NULL,
    created_at TEXT,
    created_unix REAL,
    reason TEXT NOT NULL,
    PRIMARY KEY (tier_id, intent, run_key, attempt)
) STRICT, WITHOUT ROWID""",
}
"""Every table that is filled from documents, parents before children."""

OWN_TABLES: dict[str, str] = {
    "store": """
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    store_uuid TEXT NOT NULL,
    file_inode TEXT NOT NULL,
    created_at TEXT NOT NULL,
    written_by TEXT NOT NULL
) STRICT""",
    "schema_migrations": """
CREATE TABLE schema_migrations (
    version INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at TEXT NOT NULL
) STRICT""",
}
"""What is about the file itself; kept by a rebuild."""

INDEXES: dict[str, str] = {
    "runs_run": "CREATE INDEX runs_run ON runs (run)",
    "sessions_resumed_from": "CREATE INDEX sessions_resumed_from ON sessions (run_id, resumed_from)",
    "tensors_layout": "CREATE INDEX tensors_layout ON tensors (layout_id)",
    "tensors_tensor": "CREATE INDEX tensors_tensor ON tensors (tensor, layout_id)",
    "checkpoints_step": "CREATE INDEX checkpoints_step ON checkpoints (run_id, step)",
    "checkpoints_place": (
        "CREATE INDEX checkpoints_place ON checkpoints (run_id, place_epoch, place_sequence,"
        " checkpoint, restorable)"
    ),
    "checkpoints_latest": "CREATE UNIQUE INDEX checkpoints_latest ON checkpoints (run_id) WHERE is_latest",
    "checkpoints_name": "CREATE INDEX checkpoints_name ON checkpoints (checkpoint)",
    "checkpoints_replica": "CREATE INDEX checkpoints_replica ON checkpoints (replica_id)",
    "replicas_checkpoint": "CREATE INDEX replicas_checkpoint ON replicas (checkpoint_id, tier_id)",
    "replicas_layout": "CREATE INDEX replicas_layout ON replicas (layout_id)",
    "replicas_run": "CREATE INDEX replicas_run ON replicas (run_id)",
    "metrics_metric": "CREATE INDEX metrics_metric ON metrics (metric, value)",
    "tags_tag": "CREATE INDEX tags_tag ON tags (tag)",
    "notes_checkpoint": "CREATE INDEX notes_checkpoint ON notes (run_id, checkpoint)",
    "pins_attempt": "CREATE INDEX pins_attempt ON pins (attempt)",
}


def table_statements() -> list[str]:
    """What makes the tables that documents fill, and their indexes."""
    return [*TABLES.values(), *INDEXES.values()]


def drop_statements() -> list[str]:
    """What removes them; children before parents, so that no row is checked one by one."""
    return [f"DROP TABLE IF EXISTS {name}" for name in reversed(TABLES)]
