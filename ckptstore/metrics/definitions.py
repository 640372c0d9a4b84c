"""Every metric: name, unit, labels. docs/metrics.md lists the same.

What is read from a store has no label ``rank``: so that it can stand in one scrape beside what a process
tells of itself.
"""

from __future__ import annotations

from ckptstore.metrics.exposition import Definition

BLOCKED_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds, seconds: from a warm copy of a small model to a synchronous save of a large one."""

# --- of a process that saves, and of a store ----------------------------------------------------------

LAST_SUCCESS = Definition(
    "last_success_timestamp_seconds",
    "gauge",
    "When the newest checkpoint was committed, in seconds since the epoch.",
    ("run", "rank"),
)
LAST_STEP = Definition("last_save_step", "gauge", "Step of the newest checkpoint.", ("run", "rank"))
LAST_BLOCKED = Definition(
    "last_save_blocked_seconds", "gauge", "How long training waited for the newest save.", ("run", "rank")
)
LAST_PHASE = Definition(
    "last_save_phase_seconds", "gauge", "Seconds per phase of the newest save.", ("run", "phase", "rank")
)
LAST_BYTES = Definition(
    "last_save_bytes",
    "gauge",
    "Tensor bytes of the newest save, written (new) or not (reused).",
    ("run", "tier", "kind", "rank"),
)

# --- of a process that saves --------------------------------------------------------------------------

SAVES = Definition("saves", "counter", "Saves that ended, by outcome.", ("run", "outcome", "rank"))
FAILURES = Definition("save_failures", "counter", "Saves that failed, by kind.", ("run", "kind", "rank"))
BLOCKED = Definition(
    "save_blocked_seconds", "histogram", "How long training waited for each save.", ("run", "rank")
)
PHASES = Definition("save_phase_seconds", "summary", "Seconds of saves per phase.", ("run", "phase", "rank"))
SAVED_BYTES = Definition(
    "saved_bytes",
    "counter",
    "Tensor bytes of committed saves, written (new) or not (reused); told by rank 0 for all ranks.",
    ("run", "tier", "kind"),
)
RESTORES = Definition("restores", "counter", "Restores that ended, by outcome.", ("run", "outcome", "rank"))
RESTORE_FAILURES = Definition(
    "restore_failures", "counter", "Restores that failed, by kind.", ("run", "kind", "rank")
)
RESTORE_SECONDS = Definition("restore_seconds", "summary", "Seconds that restores took.", ("run", "rank"))
RESTORED_BYTES = Definition("restored_bytes", "counter", "Bytes read by restores.", ("run", "tier", "rank"))

OF_A_PROCESS = (
    LAST_SUCCESS,
    LAST_STEP,
    LAST_BLOCKED,
    LAST_PHASE,
    LAST_BYTES,
    SAVES,
    FAILURES,
    BLOCKED,
    PHASES,
    SAVED_BYTES,
    RESTORES,
    RESTORE_FAILURES,
    RESTORE_SECONDS,
    RESTORED_BYTES,
)

# --- of a store ---------------------------------------------------------------------------------------

CHECKPOINTS = Definition("checkpoints", "gauge", "Checkpoints in the store, by state.", ("run", "state"))
KEPT_BYTES = Definition(
    "checkpoint_bytes",
    "gauge",
    "Tensor bytes of the checkpoints in the store: written by their saves (new) or not (reused).",
    ("run", "tier", "kind"),
)
FAILED_ATTEMPTS = Definition(
    "failed_attempts",
    "gauge",
    "Saves that failed and left word of it in the store, by kind.",
    ("run", "kind"),
)
UNREADABLE = Definition(
    "unreadable_records", "gauge", "Commit records that are there and cannot be read.", ("run",)
)
SESSIONS = Definition("sessions", "gauge", "How many times the run was trained.", ("run",))

OF_A_STORE = (
    LAST_SUCCESS,
    LAST_STEP,
    LAST_BLOCKED,
    LAST_PHASE,
    LAST_BYTES,
    CHECKPOINTS,
    KEPT_BYTES,
    FAILED_ATTEMPTS,
    UNREADABLE,
    SESSIONS,
)

# --- of a round of collecting -------------------------------------------------------------------------

GC_LAST = Definition(
    "gc_last_run_timestamp_seconds", "gauge", "When a round ended, in seconds since the epoch.", ("tier",)
)
GC_EXIT = Definition("gc_exit_code", "gauge", "How it ended: 0 well, else as docs/errors.md says.", ("tier",))
GC_SECONDS = Definition("gc_seconds", "gauge", "How long the round took.", ("tier",))
GC_CHECKPOINTS = Definition(
    "gc_checkpoints",
    "gauge",
    "Checkpoints, by what became of them: kept, expiring, deleted, held (they were to go).",
    ("tier", "outcome"),
)
GC_FREED = Definition(
    "gc_freed_bytes",
    "gauge",
    "Bytes that the round freed, of checkpoints and of ended attempts.",
    ("tier", "of"),
)
GC_UNFREED = Definition(
    "gc_unfreed_bytes",
    "gauge",
    "Bytes of deleted objects that a bucket keeps, as versions.",
    ("tier",),
)
GC_NOT_DELETED = Definition(
    "gc_objects_not_deleted",
    "gauge",
    "Objects that could not be deleted; the next round tries again.",
    ("tier",),
)
GC_LEFT = Definition(
    "gc_attempts_left", "gauge", "Attempts without an outcome, whose objects the round left alone.", ("tier",)
)

OF_A_ROUND = (GC_LAST, GC_EXIT, GC_SECONDS, GC_CHECKPOINTS, GC_FREED, GC_UNFREED, GC_NOT_DELETED, GC_LEFT)
