"""A run: one training by name, its history of checkpoints, and saving to it."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ckptstore import refs
from ckptstore.catalog import similar
from ckptstore.checkpoint import Checkpoint, RestoreReport
from ckptstore.errors import (
    CkptstoreError,
    ConflictError,
    DamageError,
    NotFoundError,
    NothingRestorableError,
    PartlyRestoredError,
    UsageError,
)
from ckptstore.load.select import Globs, Rename
from ckptstore.model import history, values
from ckptstore.model.history import Entry
from ckptstore.model.ids import Attempt, check_name, check_step
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import EpochDoc, NoteKind
from ckptstore.pending import PendingSave
from ckptstore.save.commit import Saved, SaveRequest
from ckptstore.save.flatten import FlatState, flatten_state
from ckptstore.save.saver import fork, save
from ckptstore.save.session import Session
from ckptstore.tier import intents, layout, notes, runs
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Intent

if TYPE_CHECKING:
    from ckptstore.store import Store

log = logging.getLogger("ckptstore")

Resume = Literal["auto", "must", "never"]

_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_MAX_METADATA_BYTES = 4 << 20


class Run:
    """One training in a store; made by ``store.run(name)``, which touches nothing.

    A session opens at the first :meth:`save`, or by :meth:`start` or :meth:`rewind`: reading and
    restoring never disturb a training that goes on elsewhere.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._tier = store.tier
        self.name = check_name("a run's name", name)
        self.key = run_key_of(name)
        self._session: Session | None = None
        self._resume_point: Checkpoint | None = None
        self._pending: PendingSave | None = None
        self.restored: RestoreReport | None = None

    def __repr__(self) -> str:
        return f"<Run {self.name!r} in {self._store.url}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Opened anew where it is unpickled: a session belongs to one process.
        return (_reopen, (self._store, self.name))

    # --- looking ------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether it was ever started here."""
        return self._tier.exists(layout.run_document(self.key))

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, damaged and invalid ones included, in the run's order (oldest first)."""
        entries, epochs = self._history()
        return [self._checkpoint(entry) for entry in history.effective_order(entries, epochs)]

    @property
    def latest(self) -> Checkpoint | None:
        """The newest restorable checkpoint; None when there is none."""
        found = history.latest(*self._history())
        return None if found is None else self._checkpoint(found)

    def best(self, metric: str, mode: str) -> Checkpoint | None:
        """The restorable checkpoint with the smallest ("min") or largest ("max") metric.

        NaN never wins; ties go to the newer; None when no checkpoint has the metric.
        """
        found = history.best(self._history()[0], metric, mode)
        return None if found is None else self._checkpoint(found)

    def __getitem__(self, step: int) -> Checkpoint:
        """The last checkpoint with that step in the run's order, restorable ones first.

        Raises:
            NotFoundError: names the nearest steps.
        """
        number = check_step(step)
        entries, epochs = self._history()
        found = history.at_step(entries, epochs, number)
        if found is None:
            raise NotFoundError(
                f"run {self.name!r} has no checkpoint at step {number}", hint=self._steps_near(number)
            )
        return self._checkpoint(found)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and any(entry.step == step for entry in self._history()[0])

    def find(self, which: int | str | Checkpoint) -> Checkpoint:
        """A checkpoint of this run by step, tag, id prefix, "latest", "min:loss" or "max:acc".

        Raises:
            NotFoundError: there is none.
        """
        if isinstance(which, Checkpoint):
            if which.run != self.name:
                raise UsageError(f"{which!r} is of run {which.run!r}, not {self.name!r}")
            return which
        if not isinstance(which, str):
            return self[which]
        step = refs.as_step(which)
        if step is not None:
            return self[step]
        best = refs.as_best(which)
        if which == "latest" or best is not None:
            found = self.latest if best is None else self.best(best[1], best[0])
            if found is None:
                raise self._nothing(which)
            return found
        return self._by_tag_or_id(which)

    def _by_tag_or_id(self, which: str) -> Checkpoint:
        entries, epochs = self._history()
        ordered = history.effective_order(entries, epochs)
        tagged = [entry for entry in ordered if which in entry.facts.tags]
        found = tagged[-1:] or [entry for entry in ordered if entry.checkpoint.startswith(which.upper())]
        if len(found) > 1:
            raise ConflictError(
                f"{which!r} fits {len(found)} checkpoints of run {self.name!r}", hint="write more of the id"
            )
        if not found:
            tags = sorted({tag for entry in entries for tag in entry.facts.tags})
            raise NotFoundError(
                f"run {self.name!r} has no tag or checkpoint {which!r}",
                hint=f"its tags are {', '.join(tags)}" if tags else "it has no tags",
            )
        return self._checkpoint(found[0])

    def sessions(self) -> list[EpochDoc]:
        """Each time the run was trained, in order."""
        return self._history()[1]

    def _history(self) -> tuple[list[Entry], list[EpochDoc]]:
        catalog = self._store.catalog
        catalog.refresh(self.key)
        return (
            catalog.ask(lambda manifest: manifest.history(self.key)),
            catalog.ask(lambda manifest: manifest.sessions(self.key)),
        )

    def _checkpoint(self, entry: Entry) -> Checkpoint:
        return Checkpoint(self._store, self._tier, self.name, entry)

    def _steps_near(self, step: int) -> str:
        steps = sorted({entry.step for entry in self._history()[0]}, key=lambda s: abs(s - step))[:5]
        return (
            f"the nearest are {', '.join(map(str, sorted(steps)))}" if steps else "it has no checkpoints yet"
        )

    def _nothing(self, what: str) -> NotFoundError:
        entries, _ = self._history()
        if not entries:
            if not self.exists:
                names = self._store.catalog.ask(lambda manifest: manifest.find_runs_like(self.name))
                return NotFoundError(
                    f"there is no run {self.name!r} in {self._store.url}", hint=similar(names)
                )
            return NotFoundError(f"run {self.name!r} has no checkpoints yet")
        known = sorted({name for entry in entries for name in entry.facts.metrics})
        return NothingRestorableError(
            f"run {self.name!r} has {len(entries)} checkpoints, but none answers to {what!r}: "
            f"{_states(entries)}",
            hint=f"its metrics are {', '.join(known) or 'none'}; `ckptstore ls {self.name}` shows the states",
        )

    # --- restoring ----------------------------------------------------------------------------

    def restore(
        self,
        state: Any,
        *,
        resume: Resume = "auto",
        before_step: int | None = None,
        fallback: bool = False,
        strict: bool = True,
        only: Globs = None,
        exclude: Globs = None,
        rename: Rename = None,
        cast: Globs | bool = None,
        skip_samples: int = 0,
        allow_pickle: bool = False,
    ) -> int | None:
        """Fills `state` from the newest restorable checkpoint; the run's next save continues from it.

        Args:
            state: a TrainState, or a dict as in :meth:`Checkpoint.restore`.
            resume: "auto": None when nothing was ever committed, unless the launcher says that this is a
                restart and the run is absent; "must": that is an error always; "never": do nothing.
            before_step: take the newest one with a smaller step; the next save opens a new session.
            fallback: if it cannot be read, take the next older one, loudly.
            strict, only, exclude, rename, cast, skip_samples, allow_pickle: as in
                :meth:`Checkpoint.restore`.

        Returns:
            The step, or None when there is no checkpoint yet (never when there are some that cannot be
            restored: that raises).

        Raises:
            NothingRestorableError: there are checkpoints, but none can be restored.
            NotFoundError: `resume` demands a checkpoint, or the run, and it is not there.
            StateMismatchError: it does not fit; `state` is as it was.
            DamageError, PartlyRestoredError: it cannot be read; with ``fallback=True`` all were tried.
        """
        if resume not in ("auto", "must", "never"):
            raise UsageError(f"resume must be 'auto', 'must' or 'never', not {resume!r}")
        self.restored = None
        if resume == "never":
            return None
        entries, epochs = self._history()
        if not entries and not self._store.catalog.unreadable.get(self.key):
            self._check_may_be_new(resume)
            return None
        ordered = history.effective_order(entries, epochs)
        if before_step is not None:
            limit = check_step(before_step)
            ordered = [entry for entry in ordered if entry.step < limit]
        candidates = [entry for entry in reversed(ordered) if entry.facts.restorable]
        passed_over = self._passed_over(ordered, epochs, candidates, fallback=fallback)
        if not candidates:
            limit_text = "" if before_step is None else f" before step {before_step}"
            raise NothingRestorableError(
                f"run {self.name!r} has checkpoints{limit_text}, but none can be restored: "
                f"{_states(ordered)}",
                hint="`ckptstore ls` shows why; `verify` and `invalidate --undo` bring good ones back",
            )
        for entry in candidates:
            checkpoint = self._checkpoint(entry)
            try:
                report = checkpoint.restore(
                    state,
                    strict=strict,
                    only=only,
                    exclude=exclude,
                    rename=rename,
                    cast=cast,
                    skip_samples=skip_samples,
                    allow_pickle=allow_pickle,
                )
            except CkptstoreError as error:
                cause = error.__cause__ if isinstance(error, PartlyRestoredError) else error
                if not fallback or not isinstance(cause, (DamageError, NotFoundError)):
                    raise
                log.error("step %d of run %r cannot be restored: %s", entry.step, self.name, error.message)
                passed_over.append(f"step {entry.step}: {error.message}")
                if entry is candidates[-1]:
                    raise
                continue
            self._resume_point = checkpoint
            self.restored = _with_passed_over(report, passed_over)
            for line in passed_over:
                log.warning("run %r: restored step %d; passed over %s", self.name, entry.step, line)
            return entry.step
        raise AssertionError("the last candidate returns or raises")

    def _check_may_be_new(self, resume: Resume) -> None:
        """That "there is nothing yet" is believable: after a restart an absent run is a mistake."""
        restarts = [
            name for name in _RESTART_COUNTS if (os.environ.get(name) or "0").strip() not in ("", "0")
        ]
        if resume == "must" or (restarts and not self.exists):
            error = self._nothing("latest")
            why = "resume='must'" if resume == "must" else f"{restarts[0]} says that this is a restart"
            raise NotFoundError(f"{error.message}, but {why}", hint=error.hint)

    def _passed_over(
        self, ordered: list[Entry], epochs: list[EpochDoc], candidates: list[Entry], *, fallback: bool
    ) -> list[str]:
        """Newer checkpoints than the candidate, with reasons; an unreadable newer record is an error."""
        newest = candidates[0] if candidates else None
        lines = []
        for entry in reversed(ordered):
            if entry is newest:
                break
            facts = entry.facts
            reason = facts.damaged_reason or facts.invalid_reason or ""
            lines.append(f"step {entry.step}: {facts.state}" + (f" ({reason})" if reason else ""))
        number_of = {epoch.session: epoch.number for epoch in epochs}
        for attempt, error in self._store.catalog.unreadable.get(self.key, {}).items():
            parsed = Attempt.parse(attempt)
            place = (number_of.get(parsed.session, math.inf), parsed.number)
            if newest is not None and place < newest.order:
                continue
            if not fallback:
                raise DamageError(
                    f"run {self.name!r}: the record of step {parsed.step}, the newest, cannot be read: "
                    f"{error}",
                    hint="restore(fallback=True) takes the one before; `ckptstore verify` names all damage",
                )
            lines.append(f"step {parsed.step}: its record cannot be read")
        return lines

    # --- saving -------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, int | float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        bases: Iterable[Checkpoint] = (),
        allow_pickle: bool = False,
    ) -> PendingSave:
        """Saves `state` as a checkpoint at `step`.

        Args:
            step: an int. Saving a step again makes a second checkpoint of that step, the later of both.
            state: a TrainState, or a dict of components: nested containers of tensors, arrays, values and
                objects with ``state_dict``.
            metrics: numbers by name, for :meth:`best` and retention.
            metadata: any plain values, up to 4 MiB.
            tags: names for it within the run.
            bases: further checkpoints, of any run of the store, whose stored chunks may be reused. What
                this session saved or resumed from is reused anyway.
            allow_pickle: pickle values of unknown types instead of refusing them.

        Returns:
            A handle; its error, if the save fails, is raised by it, by the next save, or by close.

        Raises:
            UnsupportedValueError, UsageError: an argument or a value in the state; nothing was written.
            SaveFailedError, SessionSupersededError: of the *previous* save, if nobody was told yet.

        Example:
            >>> run.save(500, {"model": model, "optimizer": optimizer}, metrics={"loss": 2.1})
        """
        self._raise_untold()
        started = self._tier.environment.monotonic()
        number = check_step(step)
        request, flat = self._prepare(number, state, metrics, metadata, tags, allow_pickle)
        pending = PendingSave(self.name, number)
        self._pending = pending
        try:
            session = self._current_session()
            base = [session.base] if session.base is not None else []
            others = [checkpoint.contents for checkpoint in bases]
            saved = save(self._tier, session, request, flat, [*base, *others])
        except BaseException as error:
            pending.fail(error)
            if not isinstance(error, CkptstoreError):
                raise
        else:
            self._finish(pending, session, saved)
        pending.blocked_seconds = self._tier.environment.monotonic() - started
        return pending

    def _prepare(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, int | float] | None,
        metadata: Mapping[str, Any] | None,
        tags: Iterable[str],
        allow_pickle: bool,
    ) -> tuple[SaveRequest, FlatState]:
        """Everything that can be refused is refused here, before anything is written."""
        not_captured: tuple[str, ...] = ()
        if callable(getattr(state, "capture_state", None)):
            state, not_captured = state.capture_state(step)
        flat = flatten_state(state, self._tier.marker.chunk_bytes, allow_pickle=allow_pickle)
        plain = dict(metadata or {})
        check_metadata(plain)
        request = SaveRequest(
            step=step,
            metrics=check_metrics(metrics or {}),
            metadata=plain,
            tags=tuple(sorted({refs.check_tag(tag) for tag in tags})),
            parents=(self._resume_point.id,) if self._resume_point is not None else (),
            not_captured=not_captured,
        )
        return request, flat

    def _finish(self, pending: PendingSave, session: Session, saved: Saved) -> None:
        self._store.catalog.put_saved(self.key, session.epoch, saved)
        record = saved.record
        facts = history.derive(record.attempt, record.metrics, record.tags, (), doomed=False)
        checkpoint = self._checkpoint(history.entry_of(record, facts))
        self._resume_point = checkpoint
        pending.finish(saved, checkpoint)

    def _raise_untold(self) -> None:
        if self._pending is not None and self._pending.has_untold_error:
            self._pending.raise_error()

    # --- sessions -----------------------------------------------------------------------------

    def start(self, *, exclusive: bool = False) -> EpochDoc:
        """Opens a session now, instead of at the first save.

        Args:
            exclusive: refuse while the former holder is seen alive on this host.

        Raises:
            BusyError: `exclusive`, and it is.
        """
        return self._open_session(self._resume_point, rewound=False, exclusive=exclusive).epoch

    def rewind(self, which: int | str | Checkpoint) -> Checkpoint:
        """Goes back: from now on `which` is the latest, until the next save, which continues from it.

        Opens a session at once, so that a training still running elsewhere is superseded.

        Raises:
            NotFoundError: no such checkpoint.
            ConflictError: it cannot be restored.
        """
        checkpoint = self.find(which)
        if not checkpoint.restorable:
            raise ConflictError(
                f"run {self.name!r} step {checkpoint.step} is {checkpoint.state} and cannot be gone back to",
                hint="choose a restorable one; `ckptstore ls` shows them",
            )
        self._open_session(checkpoint, rewound=True)
        return checkpoint

    def fork_from(self, source: Checkpoint) -> Checkpoint:
        """Begins this run with another run's checkpoint; no chunk is copied.

        Raises:
            ConflictError: this run has checkpoints already.
            SaveFailedError: the source is being deleted or is damaged.
        """
        if self._history()[0]:
            raise ConflictError(
                f"run {self.name!r} has checkpoints already; a fork begins a new run",
                hint="choose another name",
            )
        session = self._open_session(source, rewound=False)
        record = source.record
        request = SaveRequest(
            step=source.step,
            metrics=dict(source.metrics),
            metadata=dict(record.metadata),
            parents=(source.id,),
            origin="fork",
            not_captured=record.not_captured,
            state_info=record.state_info,
        )
        saved = fork(self._tier, session, request, source.contents)
        pending = PendingSave(self.name, source.step)
        self._finish(pending, session, saved)
        self._resume_point = pending.result()
        return self._resume_point

    def _current_session(self) -> Session:
        """The session to save in: the open one, or a new one where the last does not go on."""
        session = self._session
        if session is None or not session.is_mine:
            return self._open_session(self._resume_point, rewound=False)
        base = session.base.record.checkpoint if session.base is not None else None
        if self._resume_point is not None and self._resume_point.id != base:
            # Restored from elsewhere since the last save: what follows continues from there.
            return self._open_session(self._resume_point, rewound=False)
        return session

    def _open_session(
        self, resumed_from: Checkpoint | None, *, rewound: bool, exclusive: bool = False
    ) -> Session:
        self._tier.check_marker()
        epoch = runs.open_epoch(
            self._tier,
            self.name,
            resumed_from=None if resumed_from is None else resumed_from.id,
            rewound=rewound,
            exclusive=exclusive,
        )
        base: Contents | None = None if resumed_from is None else resumed_from.contents
        self._session = Session(self._tier, epoch, base)
        self._resume_point = resumed_from
        return self._session

    # --- notes, tags, pins --------------------------------------------------------------------

    def annotate(self, which: int | str | Checkpoint, *, metrics: Mapping[str, int | float]) -> None:
        """Adds metrics to a committed checkpoint, or corrects them."""
        self._note(self.find(which), "metrics", {"metrics": check_metrics(metrics)})

    def tag(self, which: int | str | Checkpoint, tag: str, *, move: bool = False) -> None:
        """Gives a checkpoint a name within the run.

        Args:
            move: take the tag from the checkpoint that has it.

        Raises:
            ConflictError: another checkpoint has it, and `move` is not set.
        """
        refs.check_tag(tag)
        checkpoint = self.find(which)
        holders = [other for other in self.checkpoints() if tag in other.tags and other.id != checkpoint.id]
        if holders and not move:
            raise ConflictError(
                f"tag {tag!r} is at step {holders[-1].step} of run {self.name!r}",
                hint="pass move=True (--move)",
            )
        if tag not in checkpoint.tags:
            self._note(checkpoint, "tag", {"tag": tag})
        for holder in holders:
            self._note(holder, "untag", {"tag": tag})

    def untag(self, which: int | str | Checkpoint, tag: str) -> None:
        """Takes a tag away.

        Raises:
            NotFoundError: the checkpoint does not have it.
        """
        checkpoint = self.find(which)
        if tag not in checkpoint.tags:
            raise NotFoundError(
                f"run {self.name!r} step {checkpoint.step} has no tag {tag!r}",
                hint=f"its tags are {', '.join(checkpoint.tags) or 'none'}",
            )
        self._note(checkpoint, "untag", {"tag": tag})

    def invalidate(self, which: int | str | Checkpoint, reason: str) -> None:
        """Marks a checkpoint as not to be restored (a diverged training, bad data); nothing is deleted."""
        text: object = reason
        if not (isinstance(text, str) and text.strip()):
            raise UsageError("invalidate wants a reason: whoever finds this later will ask")
        self._note(self.find(which), "invalid", {"reason": reason})

    def revalidate(self, which: int | str | Checkpoint) -> None:
        """Takes :meth:`invalidate` back."""
        self._note(self.find(which), "valid", {})

    def _note(self, checkpoint: Checkpoint, kind: NoteKind, data: Mapping[str, Any]) -> None:
        notes.add_note(self._tier, self.name, self.key, checkpoint.id, kind, data)

    def pin(self, which: int | str | Checkpoint, reason: str = "") -> str:
        """Promises garbage collection that this checkpoint is needed; ends only by :meth:`unpin`.

        Returns:
            The pin's id.
        """
        checkpoint = self.find(which)
        attempt = str(Attempt(self._tier.environment.new_ulid(), checkpoint.step, 1))
        pin = (self.key, checkpoint.record.attempt)
        self._tier.check_marker()
        intent = Intent.announce(self._tier, "pin", attempt, self.name, [pin], reason)
        if self._tier.exists(layout.doom_key(*pin)):
            intent.remove()
            raise ConflictError(f"run {self.name!r} step {checkpoint.step} is already being deleted")
        return attempt

    def unpin(self, which: int | str | Checkpoint) -> int:
        """Takes all pins of a checkpoint back; returns how many there were.

        Raises:
            NotFoundError: it is not pinned.
        """
        checkpoint = self.find(which)
        pin = (self.key, checkpoint.record.attempt)
        found = [doc for doc in intents.list_intents(self._tier) if doc.kind == "pin" and pin in doc.pins]
        if not found:
            raise NotFoundError(f"run {self.name!r} step {checkpoint.step} is not pinned")
        for document in found:
            Intent(self._tier, document).remove()
        return len(found)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for what is under way; raises what failed and was not told yet."""
        self._raise_untold()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._pending is not None and self._pending.has_untold_error:
            log.error("run %r: its last save had failed, too", self.name)


def _reopen(store: Store, name: str) -> Run:
    return Run(store, name)


def _states(entries: list[Entry]) -> str:
    shown = [f"step {entry.step} is {entry.facts.state}" for entry in entries[-5:]]
    return "; ".join(shown) if shown else "there are none"


def _with_passed_over(report: RestoreReport, lines: list[str]) -> RestoreReport:
    return dataclasses.replace(report, passed_over=tuple(lines))


def check_metrics(metrics: Mapping[str, int | float]) -> dict[str, int | float]:
    """Metrics as plain numbers by name.

    Raises:
        UsageError: names the metric that is not a real number.
    """
    given: object = metrics
    if not isinstance(given, Mapping):
        raise UsageError(f"metrics must map names to numbers, not be a {type(given).__name__}")
    return {check_name("a metric's name", name): _number(name, value) for name, value in given.items()}


def _number(name: str, value: Any) -> int | float:
    """A metric as a plain int or float; a tensor or array of one element counts as its number."""
    item = getattr(value, "item", None)
    number = item() if callable(item) and getattr(value, "ndim", 0) == 0 else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise UsageError(
            f"metric {name!r} must be a number, not {type(value).__name__}", hint="pass float(value)"
        )
    if isinstance(number, float):
        return float(number)
    if not -(2**63) <= number < 2**63:
        raise UsageError(f"metric {name!r} does not fit in 64 bits", hint="pass float(value)")
    return int(number)


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """That metadata can be stored.

    Raises:
        UnsupportedValueError, UsageError: names what cannot.
    """
    for name in metadata:
        if not isinstance(name, str):
            raise UsageError(f"metadata keys must be str, not {type(name).__name__} ({name!r})")
    size = len(values.encode(dict(metadata), "metadata"))
    if size > _MAX_METADATA_BYTES:
        raise UsageError(
            f"metadata takes {size} bytes, more than {_MAX_METADATA_BYTES}", hint="put it into the state"
        )
