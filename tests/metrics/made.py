"""Events as a training would tell them."""

from __future__ import annotations

import dataclasses

from ckptstore.events import RestoreEvent, SaveEvent

PHASES = {"capture": 0.25, "prepare": 0.5, "write": 1.5, "sync": 0.125}

COMMITTED = SaveEvent(
    run="gpt",
    step=500,
    rank=0,
    world_size=1,
    outcome="committed",
    error_kind=None,
    blocked_seconds=0.25,
    seconds=PHASES,
    logical_bytes=3 << 29,
    new_bytes=312 << 20,
    reused_bytes=(3 << 29) - (312 << 20),
    tier="/data/ckpts",
    committed_at="2026-11-29T12:00:00.500Z",
    checkpoint="01M8N2YK4NN4P8VXBXFXM9XDP8-500-1",
)
FAILED = dataclasses.replace(
    COMMITTED,
    outcome="failed",
    error_kind="out-of-space",
    logical_bytes=0,
    new_bytes=0,
    reused_bytes=0,
    committed_at=None,
    checkpoint=None,
)
SKIPPED = dataclasses.replace(FAILED, outcome="skipped", error_kind=None, blocked_seconds=0.0, seconds={})
RESTORED = RestoreEvent(
    run="gpt",
    step=500,
    rank=0,
    outcome="restored",
    error_kind=None,
    seconds=2.0,
    bytes_read=1000,
    tier="/data/ckpts",
)
LOST = dataclasses.replace(
    RESTORED, step=None, outcome="failed", error_kind="chunk-damaged", seconds=0.5, bytes_read=0
)
EVENTS = (COMMITTED, FAILED, SKIPPED, RESTORED, LOST)

AWKWARD = 'a "quoted"\\name\nof two\\nlines, {x="y"} # é 漢 \u2028\r\x1b[0m'
