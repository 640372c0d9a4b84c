"""Runs with a past, written as documents: no training, no waiting, and times as a test wants them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ckptstore.model import values
from ckptstore.model.documents import encode_epoch, encode_record
from ckptstore.model.ids import Attempt, digest_of, ulid
from ckptstore.model.layout import Layout
from ckptstore.model.record import CommitRecord, EpochDoc, TableRef
from ckptstore.model.tables import KeyList, Locations, encode_digests
from ckptstore.store import Store
from ckptstore.tier import layout, runs

START = 1_795_953_600.0  # 2026-11-29T12:00:00Z
TWO_PHASE = {"capture": 5.0, "prepare": 1.0, "write": 10.0, "sync": 3.0}
SYNCHRONOUS = {"prepare": 1.0, "write": 50.0, "sync": 9.0}


@dataclasses.dataclass(frozen=True)
class Session:
    """Saves at `start` + n * `every` seconds, n = 1 and up, `steps` apart."""

    start: float = 0.0
    saves: int = 3
    every: float = 3600.0
    steps: int = 100
    timings: Mapping[str, float] = dataclasses.field(default_factory=lambda: TWO_PHASE)
    rewound: bool = False
    origin: str = "save"


def train(store: Store, name: str, sessions: Sequence[Session]) -> None:
    """Leaves in the store what such sessions would have left."""
    tier = store.tier
    key = runs.ensure_run(tier, name)
    before: str | None = None
    for number, session in enumerate(sessions, 1):
        identity = ulid(number, bytes(10))
        started = START + session.start
        epoch = EpochDoc(
            name, number, identity, "node", "boot", 7, started, before, session.rewound, session_key=""
        )
        tier.put_new(layout.epoch_key(key, number), encode_epoch(epoch))
        for count in range(1, session.saves + 1):
            attempt = str(Attempt(identity, session.steps * count, count))
            record = _record(name, attempt, epoch, count, session)
            tier.put_new(layout.commit_key(key, attempt), encode_record(record))
            before = attempt


def _record(name: str, attempt: str, epoch: EpochDoc, count: int, session: Session) -> CommitRecord:
    keys, none = KeyList.of({}), np.empty(0, np.int64)
    tables = {
        "layout": Layout((), (), 4096).encode(),
        "tree": values.encode({}),
        "digests": encode_digests([]),
        "locations": Locations(none, none, none, none.astype(np.uint8)).encode(),
        "keys": keys.encode(),
    }
    return CommitRecord(
        attempt=attempt,
        checkpoint=attempt,
        generation=0,
        run=name,
        step=session.steps * count,
        epoch=epoch.number,
        sequence=count,
        session=epoch.session,
        origin=session.origin,
        parents=(),
        created_at=epoch.started_at + count * session.every,
        world_size=1,
        host="node",
        writer="tests",
        chunk_bytes=4096,
        metrics={},
        metadata={},
        tags=(),
        not_captured=(),
        state_info={},
        timings=session.timings,
        components=(),
        tables={name: TableRef(digest_of(data), len(data), data) for name, data in tables.items()},
    )
