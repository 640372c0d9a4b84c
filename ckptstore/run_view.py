"""Looking at a run: its checkpoints in order, the latest, the best, by step, tag or id."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckptstore import refs
from ckptstore.catalog import similar
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    CkptstoreError,
    ConflictError,
    DamageError,
    NotFoundError,
    NothingRestorableError,
    UsageError,
)
from ckptstore.model import history
from ckptstore.model.history import Entry
from ckptstore.model.ids import Attempt, check_name, check_step
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import EpochDoc
from ckptstore.tier import layout

if TYPE_CHECKING:
    from ckptstore.store import Store


class RunView:
    """What can be asked of a run; changes nothing.

    Attributes:
        name: as given.
        key: the path segment that stands for the name in the store.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._tier = store.tier
        self.name = check_name("a run's name", name)
        self.key = run_key_of(name)

    def __repr__(self) -> str:
        return f"<Run {self.name!r} in {self._store.url}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Opened anew where it is unpickled: a session belongs to one process.
        return (type(self), (self._store, self.name))

    @property
    def exists(self) -> bool:
        """Whether it was ever started here."""
        return any(tier.exists(layout.run_document(self.key)) for tier in self._store.tiers)

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, damaged and invalid ones included, in the run's order (oldest first)."""
        entries, epochs = self._history()
        return [self._checkpoint(entry) for entry in history.effective_order(entries, epochs)]

    @property
    def latest(self) -> Checkpoint | None:
        """The newest restorable checkpoint; None when there is none.

        Raises:
            DamageError: a record that cannot be read may be newer.
        """
        entries, epochs = self._history()
        found = history.latest(entries, epochs)
        unreadable = self._unreadable_after(found, epochs)
        if unreadable:
            raise self._newest_is_unreadable(*unreadable[0])
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
        if not which:
            raise UsageError(
                "an empty text names no checkpoint", hint="give a step, tag, id prefix or 'latest'"
            )
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
        entries = catalog.history(self.key)
        if not entries:
            self._tier.check_marker()  # an empty mount point is not a run without checkpoints
        return entries, catalog.ask(lambda manifest: manifest.sessions(self.key))

    def _unreadable_after(
        self, newest: Entry | None, epochs: list[EpochDoc]
    ) -> list[tuple[Attempt, CkptstoreError]]:
        """Commit records that are there, cannot be read, and may be newer than `newest`.

        Their names tell session and call, so what is surely older is left out.
        """
        number_of = {epoch.session: epoch.number for epoch in epochs}
        found = []
        for text, error in self._store.catalog.unreadable.get(self.key, {}).items():
            attempt = Attempt.parse(text)
            place = (number_of.get(attempt.session, math.inf), attempt.number)
            if newest is None or place >= newest.order:
                found.append((attempt, error))
        return found

    def _newest_is_unreadable(self, attempt: Attempt, error: CkptstoreError) -> DamageError:
        return DamageError(
            f"run {self.name!r}: the record of step {attempt.step}, perhaps the newest, cannot be read: "
            f"{error.message}",
            hint="restore(fallback=True) takes the one before; `ckptstore verify` names all damage",
        )

    def _checkpoint(self, entry: Entry) -> Checkpoint:
        return Checkpoint(self._store, self._store.tier_of(entry), self.name, entry)

    def _steps_near(self, step: int) -> str:
        steps = sorted({entry.step for entry in self._history()[0]}, key=lambda s: abs(s - step))[:5]
        return (
            f"the nearest are {', '.join(map(str, sorted(steps)))}" if steps else "it has no checkpoints yet"
        )

    def _nothing(self, what: str) -> NotFoundError:
        entries, _ = self._history()
        if not entries:
            if not self.exists:
                self._store.catalog.refresh()
                names = self._store.catalog.ask(lambda manifest: manifest.find_runs_like(self.name))
                return NotFoundError(
                    f"there is no run {self.name!r} in {self._store.url}", hint=similar(names)
                )
            return NotFoundError(f"run {self.name!r} has no checkpoints yet")
        known = sorted({name for entry in entries for name in entry.facts.metrics})
        return NothingRestorableError(
            f"run {self.name!r} has {len(entries)} checkpoints, but none answers to {what!r}: "
            f"{states(entries)}",
            hint=f"its metrics are {', '.join(known) or 'none'}; `ckptstore ls {self.name}` shows the states",
        )


def states(entries: list[Entry]) -> str:
    """The states of the newest few, for messages."""
    shown = [f"step {entry.step} is {entry.facts.state}" for entry in entries[-5:]]
    return "; ".join(shown) if shown else "there are none"
