"""What crashed and ended attempts left: objects here, documents and files in :mod:`ckptstore.gc.leftovers`.

An object belongs to the attempt in its key. What that attempt reads at its commit key says what becomes of
it: with a record it stays; with VOID or GONE it goes, unless a live record names it, too.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping

from ckptstore.errors import BackendError, ObjectExistsError
from ckptstore.gc import deleting, listing
from ckptstore.gc.deleting import Pace
from ckptstore.gc.documents import KEYS_PER_PLAN, PlanDoc, plan_key, put_plan
from ckptstore.gc.holders import is_silent
from ckptstore.gc.leftovers import Leftovers
from ckptstore.gc.listing import SAVERS, Announced
from ckptstore.gc.named import named_of
from ckptstore.gc.standing import Standing
from ckptstore.model.documents import encode_end
from ckptstore.model.ids import ObjectName
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.tier import layout
from ckptstore.tier.intents import SILENT_SECONDS, Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """An attempt that nobody can be asked about: its objects are left alone.

    Attributes:
        why: what keeps it from being cleared.
        objects, size_bytes: of chunks, packs and tables.
    """

    attempt: str
    why: str
    objects: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cleared:
    """What a round cleared; of a dry run, what it would.

    Attributes:
        objects, object_bytes: of attempts that never committed, or whose record is collected.
        unfreed_bytes: of these, what a bucket keeps as versions.
        intents: of attempts that are decided, and of readers that have been silent.
        parts: documents of ranks.
        temporaries: files of interrupted writes, and uploads.
        fenced: attempts without an intent that were ended: the next round clears what they left.
        left: attempts that were left alone.
        failures: (key, error) of objects that could not be deleted.
        is_cut_short: time was up.
    """

    objects: int = 0
    object_bytes: int = 0
    unfreed_bytes: int = 0
    intents: int = 0
    parts: int = 0
    temporaries: int = 0
    fenced: tuple[str, ...] = ()
    left: tuple[Left, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    is_cut_short: bool = False


class Strays:
    """Clears a tier.

    Args:
        standing: intents and commit keys, just now.
        known: records that were read; further ones are read only if something may go.
        sessions: ULID -> run key.
        now: seconds since the epoch, by the tier's own clock.
        given_up: attempts that a person gave up: with nothing at their commit key they count as ended.
        run_keys: only what attempts of these runs left is cleared; None: all, and temporary files.
        passed_over: keys that could not be deleted just now.
        dry_run: nothing is written.
    """

    def __init__(
        self,
        tier: Tier,
        standing: Standing,
        known: dict[Pin, CommitRecord],
        sessions: Mapping[str, str],
        now: float,
        *,
        given_up: Collection[str] = (),
        run_keys: Collection[str] | None = None,
        passed_over: Collection[str] = (),
        pace: Pace = deleting.STEADY,
        dry_run: bool = False,
    ) -> None:
        self._tier = tier
        self._standing = standing
        self._known = known
        self._sessions = sessions
        self._now = now
        self._given_up = frozenset(given_up)
        self._run_keys = run_keys
        self._passed_over = frozenset(passed_over)
        self._pace = pace
        self._dry_run = dry_run
        self._has_record = {attempt: is_record for (_, attempt), is_record in standing.keys.items()}
        self._of_run = {attempt: run_key for run_key, attempt in standing.keys}
        self._announced = {one.document.attempt: one for one in standing.intents}
        # What a round in earnest would end.
        self._to_fence = {
            one.document.attempt: one.commit[0] for one in standing.intents if dry_run and self._ends(one)
        }

    def _ends(self, announced: Announced) -> bool:
        return (
            announced.document.kind in SAVERS
            and announced.document.attempt not in self._has_record
            and is_silent(announced, self._now)
            and self._tier.backend.capabilities.create_if_absent
        )

    def clear(self) -> Cleared:
        """Clears what can be.

        Raises:
            DamageError: a key list cannot be read; nothing was deleted.
            BackendError: the tier failed.
        """
        cleared, unknown = self._objects()
        fenced, left = self._unknown(unknown)
        leftovers = Leftovers(
            self._tier,
            self._standing,
            self._is_over,
            self._now,
            run_keys=self._run_keys,
            dry_run=self._dry_run,
        )
        return dataclasses.replace(
            cleared,
            intents=leftovers.intents(),
            parts=leftovers.parts(),
            temporaries=leftovers.temporaries(),
            fenced=tuple(fenced),
            left=tuple(left),
        )

    # --- objects ------------------------------------------------------------------------------

    def _is_over(self, attempt: str) -> bool:
        """Whether it reads VOID or GONE, and is to be cleared."""
        if self._run_keys is not None:
            run_key = self._of_run.get(attempt) or self._to_fence.get(attempt)
            if run_key not in self._run_keys:
                return False
        there = self._has_record.get(attempt)
        if there is None:
            return attempt in self._given_up or attempt in self._to_fence
        return not there

    def _objects(self) -> tuple[Cleared, dict[str, _Unknown]]:
        """Goes through all objects, as they are listed; what is to go is deleted in parts."""
        fate: dict[str, bool | None] = {}  # attempt -> goes, stays, or not known
        unknown: dict[str, _Unknown] = {}
        named: set[str] | None = None
        batch: dict[str, int] = {}
        done = Cleared()
        for prefix in ("chunks/", "packs/"):
            for info in self._tier.listing(prefix):
                key = info.key
                _, _, rest = key.partition(".")
                attempt, _, _ = rest.rpartition(".")
                if attempt not in fate:
                    fate[attempt] = self._fate_of(attempt)
                goes = fate[attempt]
                if goes:
                    if named is None:
                        named = self._named()
                    if key not in named and key not in self._passed_over and _is_object(key):
                        batch[key] = info.size_bytes
                        if len(batch) >= KEYS_PER_PLAN:
                            done = self._delete(batch, done)
                            batch = {}
                            if done.is_cut_short:
                                return done, {}
                elif goes is None:
                    unknown.setdefault(attempt, _Unknown()).add(info.size_bytes, info.modified)
        return (self._delete(batch, done) if batch else done), unknown

    def _fate_of(self, attempt: str) -> bool | None:
        if self._is_over(attempt):
            return True
        if attempt in self._has_record or attempt in self._to_fence or not listing.is_attempt(attempt):
            return False
        if self._run_keys is not None:
            return False
        announced = self._announced.get(attempt)
        return False if announced is not None and not is_silent(announced, self._now) else None

    def _named(self) -> set[str]:
        """Keys of objects of attempts that are over, which live records name."""
        records = listing.read_records(self._tier, self._standing.keys, self._known)
        found: set[str] = set()

        def read(record: CommitRecord) -> None:
            keys = named_of(self._tier, record, self._is_over)
            found.update(key for key in keys if self._is_over(key.split(".")[1]))

        listing.for_all(self._tier, list(records.values()), read)
        return found

    def _delete(self, batch: Mapping[str, int], done: Cleared) -> Cleared:
        if self._dry_run:
            return dataclasses.replace(
                done,
                objects=done.objects + len(batch),
                object_bytes=done.object_bytes + sum(batch.values()),
            )
        environment = self._tier.environment
        self._tier.check_marker()
        plan = PlanDoc(
            environment.new_ulid(),
            "planned",
            environment.now(),
            environment.author,
            "objects of attempts that have ended",
            keys=tuple(sorted(batch)),
        )
        put_plan(self._tier, plan)
        self._tier.backend.sync()
        deleted = deleting.delete(self._tier, plan.keys, self._pace)
        if not deleted.failures and not deleted.is_cut_short:
            deleting.tidy(self._tier, [plan_key(plan.name)])
        return dataclasses.replace(
            done,
            objects=done.objects + len(deleted.gone),
            object_bytes=done.object_bytes + sum(batch[key] for key in deleted.gone),
            unfreed_bytes=done.unfreed_bytes + sum(batch[key] for key in deleted.unfreed),
            failures=(*done.failures, *deleted.failures),
            is_cut_short=deleted.is_cut_short,
        )

    # --- attempts of which nothing is known -----------------------------------------------------

    def _unknown(self, unknown: Mapping[str, _Unknown]) -> tuple[list[str], list[Left]]:
        fenced, left = [], []
        for attempt, of in sorted(unknown.items()):
            why = self._why_left(attempt, of)
            if why is None:
                fenced.append(attempt)
            else:
                left.append(Left(attempt, why, of.objects, of.size_bytes))
        return fenced, left

    def _why_left(self, attempt: str, of: _Unknown) -> str | None:
        """None where it has been ended now."""
        run_key = self._sessions.get(attempt.partition("-")[0])
        if attempt in self._announced:
            return "silent, and not to be fenced here: this place cannot create exclusively"
        if self._now - of.newest <= SILENT_SECONDS:
            return "it was written to not long ago"
        if run_key is None:
            return "its run is not known"
        if not self._tier.backend.capabilities.create_if_absent:
            return "not to be fenced here: this place cannot create exclusively"
        if not self._dry_run:
            end = encode_end(CommitEnd(attempt, "void", "no intent: fenced by gc"))
            try:
                self._tier.backend.put(layout.commit_key(run_key, attempt), [end], if_absent=True)
            except ObjectExistsError:
                return "it was decided just now"
            except BackendError as error:
                return f"it could not be fenced: {error.message}"
            log.warning("attempt %s has left objects and no intent, and is fenced", attempt)
        return None


def _is_object(key: str) -> bool:
    try:
        ObjectName.parse(key)
    except ValueError:
        return False  # somebody's own file
    return True


@dataclasses.dataclass(slots=True)
class _Unknown:
    """What an attempt of which nothing is known has left; `newest` by the tier's clock."""

    objects: int = 0
    size_bytes: int = 0
    newest: float = 0.0

    def add(self, size_bytes: int, modified: float) -> None:
        self.objects += 1
        self.size_bytes += size_bytes
        self.newest = max(self.newest, modified)
