"""The manifest: a copy of what the tiers' documents say, for questions."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from ckptstore.errors import NotFoundError
from ckptstore.manifest import answers, connect, facts, ingest
from ckptstore.manifest.database import BUSY_SECONDS, Database, empty_file
from ckptstore.manifest.errors import ManifestUnusable
from ckptstore.manifest.rows import (
    BoxRow,
    CheckpointRow,
    LayoutRow,
    LayoutRows,
    PinRow,
    RunRow,
    TensorAt,
    TensorRow,
    TensorRows,
    TierRow,
)
from ckptstore.manifest.schema import drop_statements, table_statements
from ckptstore.manifest.text import iso
from ckptstore.manifest.views import view_statements
from ckptstore.model.history import Entry
from ckptstore.model.record import CommitEnd, CommitRecord, EpochDoc, IntentDoc, Note


class Manifest(Database):
    """The SQLite manifest of one store. It decides nothing: what it says can be read from the tiers again.

    Any method may raise :class:`ManifestUnusable` (make it anew with :meth:`reset`, then put everything
    again), BusyError (another process held the file for `busy_seconds`), OutOfSpaceError,
    PermissionDeniedError, BackendError or FormatTooNewError. After any of them the file holds the last
    committed state.

    Example:
        >>> with Manifest.open(None, store_uuid="u") as manifest:
        ...     manifest.runs()
        []
    """

    def __init__(self, path: Path | None, store_uuid: str, *, read_only: bool, busy_seconds: float) -> None:
        super().__init__(path, store_uuid, read_only=read_only, busy_seconds=busy_seconds)
        # Checkpoints whose facts the open transaction has put in doubt; None: all of the run.
        self._dirty: dict[str, set[str] | None] = {}

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        store_uuid: str,
        read_only: bool = False,
        busy_seconds: float = BUSY_SECONDS,
    ) -> Manifest:
        """Opens the file; unless `read_only`, makes it (also where a full disk left 0 bytes) or migrates it.

        Args:
            path: None for one in memory, which nobody else sees.
            store_uuid: the store that it must belong to.
            read_only: needs no write access, and makes no file beside it.
            busy_seconds: how long to wait for a lock.

        Raises:
            ManifestUnusable: it is of another store, no database, damaged, a copy, or absent and `read_only`.
            FormatTooNewError: a newer release made it.
        """
        where = None if path is None else Path(path).absolute()
        manifest = cls(
            where, store_uuid, read_only=read_only and where is not None, busy_seconds=busy_seconds
        )
        manifest.open_now()
        return manifest

    @classmethod
    def reset(cls, path: Path, *, store_uuid: str, busy_seconds: float = BUSY_SECONDS) -> Manifest:
        """Empties the file, whatever it holds, and opens it as a new manifest. Other processes notice."""
        empty_file(Path(path).absolute(), busy_seconds=busy_seconds)
        return cls.open(path, store_uuid=store_uuid, busy_seconds=busy_seconds)

    def __enter__(self) -> Manifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def copy_to_memory(self) -> Manifest:
        """A private, writable copy; what does not fit in memory goes to a temporary file."""
        copy = Manifest(None, self.store_uuid, read_only=False, busy_seconds=self._busy_seconds)
        target = connect.private()
        with connect.closing_on_error(target):
            self.copy(target)
        copy.adopt(target)
        return copy

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. The facts of every checkpoint touched are brought up to date before the commit."""
        with self.write():
            yield

    def clear(self) -> None:
        """Removes everything but the schema and the row that says whose manifest it is."""
        with self.write() as connection:
            for statement in (*drop_statements(), *table_statements(), *view_statements()):
                connection.execute(statement)
            self._dirty.clear()

    def check(self) -> None:
        """Reads the whole file and checks its structure; raises ManifestUnusable."""
        first = self.read(lambda c: c.execute("PRAGMA quick_check(1)").fetchone()[0])
        if first != "ok":
            raise ManifestUnusable(f"manifest {str(self.path)!r}: {first}", reason="damaged")

    # --- what is already in ------------------------------------------------------------------

    def known_attempts(self, tier_uuid: str, run_key: str) -> dict[str, str]:
        """Attempt -> "record", "void" or "gone", of every commit key that was put."""
        return self.read(lambda c: {row[0]: row[1] for row in _of(c, _KNOWN_ATTEMPTS, tier_uuid, run_key)})

    def record_sizes(self, tier_uuid: str, run_key: str) -> dict[str, int]:
        """Attempt -> bytes of its commit record, as it was put: another size now means another content."""
        return self.read(
            lambda c: dict(c.execute(_RECORD_SIZES, {"tier": tier_uuid, "run": run_key}).fetchall())
        )

    def known_notes(self, tier_uuid: str, run_key: str) -> set[str]:
        """Keys of the notes that were put."""
        return self.read(lambda c: {row[0] for row in _of(c, _KNOWN_NOTES, tier_uuid, run_key)})

    def known_epochs(self, run_key: str) -> set[int]:
        """Numbers of the sessions that were put."""
        sql = "SELECT epoch FROM sessions JOIN runs USING (run_id) WHERE run_key = ?"
        return self.read(lambda c: {row[0] for row in c.execute(sql, (run_key,))})

    def known_dooms(self, tier_uuid: str, run_key: str) -> set[str]:
        """Attempts that are doomed in this tier."""
        return self.read(lambda c: {row[0] for row in _of(c, _KNOWN_DOOMS, tier_uuid, run_key)})

    def has_layout(self, digest: str) -> bool:
        """Is the layout in, so that :meth:`put_record` may be given its digest alone?"""
        sql = "SELECT EXISTS (SELECT 1 FROM layouts WHERE layout_digest = ?)"
        return bool(self.read(lambda c: c.execute(sql, (digest,)).fetchone()[0]))

    # --- ingest -----------------------------------------------------------------------------
    # Each is a transaction of its own outside of transaction().

    def put_tier(self, tier_uuid: str, ordinal: int, name: str, url: str) -> None:
        """A tier, or its new name, order or URL. `url` is shown to people: leave credentials out."""
        with self.write() as connection:
            old = connection.execute(
                "SELECT tier_order FROM tiers WHERE tier_uuid = ?", (tier_uuid,)
            ).fetchone()
            connection.execute(
                "INSERT INTO tiers (tier_uuid, tier_order, name, url) VALUES (?, ?, ?, ?) ON CONFLICT"
                " (tier_uuid)"
                " DO UPDATE SET tier_order = excluded.tier_order, name = excluded.name, url = excluded.url",
                (tier_uuid, ordinal, name, url),
            )
            if old is not None and old[0] != ordinal:
                self._doubt_all(connection)

    def drop_tier(self, tier_uuid: str) -> None:
        """Forgets a tier and all that was read from it."""
        with self.write() as connection:
            self._doubt_all(connection)
            connection.execute("DELETE FROM tiers WHERE tier_uuid = ?", (tier_uuid,))
            connection.execute("DELETE FROM layouts WHERE layout_id NOT IN (SELECT layout_id FROM replicas)")

    def put_run(self, run: str, run_key: str, created_at: float) -> None:
        """A run; the first document stays."""
        with self.write() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO runs (run, run_key, created_at, created_unix) VALUES (?, ?, ?, ?)",
                (run, run_key, iso(created_at), created_at),
            )

    def drop_run(self, run_key: str) -> None:
        """Forgets a run and everything of it."""
        with self.write() as connection:
            connection.execute("DELETE FROM runs WHERE run_key = ?", (run_key,))
            connection.execute("DELETE FROM layouts WHERE layout_id NOT IN (SELECT layout_id FROM replicas)")
            self._dirty.pop(run_key, None)

    def put_epoch(self, run_key: str, epoch: EpochDoc) -> None:
        """A session of the run."""
        with self.write() as connection:
            ingest.put_epoch(connection, ingest.run_id(connection, run_key), epoch)
            if epoch.resumed_from is not None:
                self._doubt(run_key, epoch.resumed_from)

    def put_record(
        self,
        tier_uuid: str,
        run_key: str,
        record: CommitRecord,
        layout: LayoutRows | str,
        tensors: TensorRows,
        record_bytes: int,
    ) -> bool:
        """A commit record. Nothing happens when it is in, or when VOID or GONE was put for its attempt.

        Args:
            tier_uuid, run_key: both put before.
            record: as read.
            layout: its tensors and boxes, or the digest of a layout for which :meth:`has_layout` is true.
            tensors: one row per tensor of the layout, in its order.
            record_bytes: size of the document.

        Returns:
            Whether it was put.
        """
        with self.write() as connection:
            tier, run = ingest.tier_id(connection, tier_uuid), ingest.run_id(connection, run_key)
            done = ingest.put_record(connection, tier, run, record, layout, tensors, record_bytes)
            if done:
                self._doubt(run_key, record.checkpoint)
            return done

    def put_end(self, tier_uuid: str, run_key: str, end: CommitEnd) -> None:
        """VOID or GONE stands at a commit key: a record that was there is taken out with its tensors."""
        with self.write() as connection:
            tier, run = ingest.tier_id(connection, tier_uuid), ingest.run_id(connection, run_key)
            self._doubt(run_key, ingest.put_end(connection, tier, run, end))

    def drop_attempts(self, tier_uuid: str, run_key: str, attempts: Collection[str]) -> None:
        """These commit keys are not in the tier's listing any more: a restored backup, a key reaped."""
        with self.write() as connection:
            tier, run = ingest.tier_id(connection, tier_uuid), ingest.run_id(connection, run_key)
            for attempt in attempts:
                self._doubt(run_key, ingest.drop_record(connection, tier, run, attempt))
                connection.execute(
                    "DELETE FROM ends WHERE (tier_id, run_id, attempt) = (?, ?, ?)", (tier, run, attempt)
                )

    def put_note(self, tier_uuid: str, run_key: str, key: str, note: Note) -> None:
        """A note, by its document key."""
        with self.write() as connection:
            tier, run = ingest.tier_id(connection, tier_uuid), ingest.run_id(connection, run_key)
            ingest.put_note(connection, tier, run, key, note)
            self._doubt(run_key, note.checkpoint)

    def drop_notes(self, tier_uuid: str, run_key: str, keys: Collection[str]) -> None:
        """These notes are not in the tier's listing any more."""
        with self.write() as connection:
            tier, run = ingest.tier_id(connection, tier_uuid), ingest.run_id(connection, run_key)
            for key in keys:
                where = (tier, run, key)
                for row in connection.execute(
                    "DELETE FROM notes WHERE (tier_id, run_id, note_key) = (?, ?, ?) RETURNING checkpoint",
                    where,
                ).fetchall():
                    self._doubt(run_key, row[0])

    def set_dooms(self, tier_uuid: str, run_key: str, attempts: set[str]) -> None:
        """The doomed attempts of the run in this tier, all of them."""
        with self.write() as connection:
            tier, run = ingest.tier_id(connection, tier_uuid), ingest.run_id(connection, run_key)
            old = {row[0] for row in _of(connection, _KNOWN_DOOMS, tier_uuid, run_key)}
            connection.executemany(
                "DELETE FROM dooms WHERE (tier_id, run_id, attempt) = (?, ?, ?)",
                ((tier, run, attempt) for attempt in old - attempts),
            )
            connection.executemany(
                "INSERT INTO dooms VALUES (?, ?, ?)", ((tier, run, attempt) for attempt in attempts - old)
            )
            for attempt in old ^ attempts:
                row = connection.execute(
                    "SELECT checkpoint FROM replicas AS r JOIN checkpoints USING (checkpoint_id)"
                    " WHERE (r.tier_id, r.run_id, r.attempt) = (?, ?, ?)",
                    (tier, run, attempt),
                ).fetchone()
                self._doubt(run_key, row and row[0])

    def set_pins(self, tier_uuid: str, intents: Iterable[IntentDoc]) -> None:
        """What the tier's intents pin, for people to see; earlier ones of the tier are forgotten."""
        with self.write() as connection:
            ingest.set_pins(connection, ingest.tier_id(connection, tier_uuid), intents)

    def refresh_facts(self, run_key: str, *, everything: bool = False) -> None:
        """Brings the facts of the run's touched checkpoints (or all) up to date, as every commit does."""
        with self.write() as connection:
            if everything:
                self._dirty[run_key] = None
            self._refresh(connection, run_key)

    # --- answers ----------------------------------------------------------------------------

    def tiers(self) -> list[TierRow]:
        """The tiers, hottest first."""
        return self.read(answers.tiers)

    def runs(self) -> list[RunRow]:
        """The runs by name, with totals."""
        return self.read(answers.runs)

    def find_runs_like(self, name: str, *, limit: int = 5) -> list[str]:
        """Names similar to `name`, for "did you mean"."""
        return self.read(lambda c: answers.find_runs_like(c, name, limit))

    def sessions(self, run_key: str) -> list[EpochDoc]:
        """The run's sessions in order."""
        return self.read(lambda c: answers.sessions(c, run_key))

    def history(self, run_key: str, *, tier_uuid: str | None = None) -> list[Entry]:
        """One entry per checkpoint, by (epoch, sequence).

        Over several tiers a checkpoint's entry is the first tier's counting record that can be restored,
        else the first tier's. With `tier_uuid`, that tier's alone.
        """
        if tier_uuid is None:
            return self.read(lambda c: answers.history(c, run_key))

        def of_tier(connection: sqlite3.Connection) -> list[Entry]:
            ingest.tier_id(connection, tier_uuid)  # raises if there is no such tier
            everywhere = {row.tier_uuid for row in answers.tiers(connection)}
            return _history_in(connection, ingest.run_id(connection, run_key), {tier_uuid}, everywhere)

        return self.read(of_tier)

    def history_in(self, run_key: str, tier_uuids: Collection[str]) -> list[Entry]:
        """As :meth:`history`, as if there were only these tiers."""

        def among(connection: sqlite3.Connection) -> list[Entry]:
            run = connection.execute("SELECT run_id FROM runs WHERE run_key = ?", (run_key,)).fetchone()
            return [] if run is None else _history_in(connection, run[0], tier_uuids, tier_uuids)

        return self.read(among)

    def latest(self, run_key: str) -> Entry | None:
        """The run's newest restorable checkpoint, as ``model.history.latest`` says of :meth:`history`."""
        found = self.read(lambda c: answers.history(c, run_key, only_latest=True))
        return found[0] if found else None

    def checkpoints(
        self,
        run_key: str | None = None,
        *,
        restorable: bool | None = None,
        newest_first: bool = False,
        limit: int | None = None,
        checkpoint: str | None = None,
    ) -> list[CheckpointRow]:
        """Checkpoints of one run or all, by run and then in the order that stands now (after rewinds).

        With `checkpoint`, only the one of that id, if it is there.
        """
        return self.read(
            lambda c: answers.checkpoints(c, run_key, restorable, newest_first, limit, checkpoint)
        )

    def checkpoint_by_prefix(self, prefix: str) -> list[tuple[str, str]]:
        """(run key, checkpoint id) for every id that begins with `prefix`."""
        return self.read(lambda c: answers.checkpoint_by_prefix(c, prefix))

    def tensors(self, checkpoint: str, *, run_key: str | None = None) -> list[TensorRow]:
        """The checkpoint's tensors in the layout's order; raises NotFoundError."""
        return self.read(lambda c: answers.tensors(c, _replica(c, checkpoint, run_key)))

    def layout(self, checkpoint: str, *, run_key: str | None = None) -> LayoutRow:
        """The checkpoint's layout; says whether :meth:`boxes` knows its boxes."""
        return self.read(lambda c: answers.layout(c, _replica(c, checkpoint, run_key)))

    def boxes(
        self, checkpoint: str, tensor: str | None = None, *, run_key: str | None = None
    ) -> list[BoxRow]:
        """The boxes of one tensor, or all; empty where the layout's are not expanded."""
        return self.read(lambda c: answers.boxes(c, _replica(c, checkpoint, run_key), tensor))

    def tensor_history(self, run_key: str, tensor: str) -> list[TensorAt]:
        """The tensor in each checkpoint that has it, and where its content changed."""
        return self.read(lambda c: answers.tensor_history(c, run_key, tensor))

    def pins(self) -> list[PinRow]:
        """The pins last seen."""
        return self.read(answers.pins)

    # --- facts ------------------------------------------------------------------------------

    def _doubt(self, run_key: str, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        doubted = self._dirty.setdefault(run_key, set())
        if doubted is not None:
            doubted.add(checkpoint)

    def _doubt_all(self, connection: sqlite3.Connection) -> None:
        for (run_key,) in connection.execute("SELECT run_key FROM runs").fetchall():
            self._dirty[run_key] = None

    def _refresh(self, connection: sqlite3.Connection, run_key: str) -> None:
        if run_key not in self._dirty:
            return
        doubted = self._dirty.pop(run_key)
        run = ingest.run_id(connection, run_key)
        if doubted is None:
            doubted = {
                r[0]
                for r in connection.execute("SELECT checkpoint FROM checkpoints WHERE run_id = ?", (run,))
            }
        facts.refresh(connection, run, sorted(doubted))

    def _before_commit(self, connection: sqlite3.Connection) -> None:
        for run_key in list(self._dirty):
            self._refresh(connection, run_key)

    def _after_roll_back(self) -> None:
        self._dirty.clear()


_OF = "JOIN tiers USING (tier_id) JOIN runs USING (run_id) WHERE tier_uuid = :tier AND run_key = :run"
_KNOWN_ATTEMPTS = (
    f"SELECT attempt, 'record' FROM replicas {_OF} UNION ALL SELECT attempt, kind FROM ends {_OF}"
)
_RECORD_SIZES = f"SELECT attempt, record_bytes FROM replicas {_OF}"
_KNOWN_NOTES = f"SELECT note_key FROM notes {_OF}"
_KNOWN_DOOMS = f"SELECT attempt FROM dooms {_OF}"


def _of(connection: sqlite3.Connection, sql: str, tier_uuid: str, run_key: str) -> list[tuple[str, ...]]:
    return connection.execute(sql, {"tier": tier_uuid, "run": run_key}).fetchall()


def _replica(connection: sqlite3.Connection, checkpoint: str, run_key: str | None) -> int:
    found = answers.replica_id(connection, checkpoint, run_key)
    if found is None:
        raise NotFoundError(f"there is no checkpoint {checkpoint}")
    return found


def _history_in(
    connection: sqlite3.Connection, run: int, own: Collection[str], copies: Collection[str]
) -> list[Entry]:
    """One entry per checkpoint that a tier of `own` has, with its live records in those of `copies`."""
    uuid_of = dict(connection.execute("SELECT tier_id, tier_uuid FROM tiers").fetchall())
    names = connection.execute("SELECT checkpoint FROM checkpoints WHERE run_id = ?", (run,)).fetchall()
    found = []
    for (name,) in names:
        replicas = facts.replicas_of(connection, run, name)
        mine = [replica for replica in replicas if uuid_of[replica.tier_id] in own]
        if mine:
            chosen = facts.choose(mine)
            live = _live([replica for replica in replicas if uuid_of[replica.tier_id] in copies], uuid_of)
            found.append(dataclasses.replace(chosen.entry, tier=uuid_of[chosen.tier_id], copies=live))
    return sorted(found, key=lambda entry: (entry.order, entry.checkpoint))


def _live(replicas: list[facts.Replica], uuid_of: Mapping[int, str]) -> tuple[tuple[str, str], ...]:
    """(tier uuid, attempt) of live records of one checkpoint, hottest tier first, damaged ones last."""
    live = sorted((r for r in replicas if not r.entry.facts.doomed), key=lambda r: r.entry.facts.damaged)
    return tuple((uuid_of[replica.tier_id], replica.entry.attempt) for replica in live)
