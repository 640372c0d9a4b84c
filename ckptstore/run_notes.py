"""Later facts about a run's checkpoints: metrics, tags, validity, pins."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ckptstore import refs
from ckptstore.arguments import check_metrics
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    BackendError,
    CkptstoreError,
    ConflictError,
    NotFoundError,
    UsageError,
    WrongStoreError,
)
from ckptstore.model.ids import Attempt
from ckptstore.model.record import Note, NoteKind
from ckptstore.run_view import RunView
from ckptstore.tier import intents, layout, notes
from ckptstore.tier.asking import ask
from ckptstore.tier.intents import Intent
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


class RunNotes(RunView):
    """Annotating a run's checkpoints. Needs no session: a training that goes on is not disturbed.

    `which` is a step, a tag, an id prefix, "latest", "min:loss", "max:acc" or a Checkpoint; every method
    raises NotFoundError when there is none.
    """

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
        """Writes a note in the checkpoint's tier, and the same one in the others that have it."""
        note = notes.add_note(checkpoint.tier, self.name, self.key, checkpoint.id, kind, data)
        for copy in checkpoint.copies:
            if copy.tier.uuid == checkpoint.tier.uuid:
                continue
            try:
                ask(
                    copy.tier.backend, copy.tier.name, functools.partial(_put_note, copy.tier, self.key, note)
                )
            except (BackendError, WrongStoreError) as error:
                log.warning(
                    "tier %s does not know that step %d was given %r: replication brings it: %s",
                    copy.tier.name,
                    checkpoint.step,
                    kind,
                    error.message,
                )

    def pin(self, which: int | str | Checkpoint, reason: str = "") -> str:
        """Promises garbage collection that this checkpoint is needed, in every tier that has it.

        It ends only by :meth:`unpin`.

        Returns:
            The pin's id.

        Raises:
            ConflictError: it is already being deleted.
            BackendError, WrongStoreError: a tier does not answer. No tier has the pin then, or the error
                names those in which it may be left.
        """
        checkpoint = self.find(which)
        attempt = str(Attempt(self._tier.environment.new_ulid(), checkpoint.step, 1))
        begun: list[Tier] = []
        try:
            # After a repair there may be two records of it in one tier.
            for tier in dict.fromkeys(copy.tier for copy in checkpoint.copies):
                tier.check_marker()
                begun.append(tier)
                pins = [(self.key, copy.attempt) for copy in checkpoint.copies if copy.tier is tier]
                Intent.announce(tier, "pin", attempt, self.name, pins, reason)
                if all(tier.exists(layout.doom_key(*pin)) for pin in pins):
                    raise ConflictError(f"run {self.name!r} step {checkpoint.step} is already being deleted")
        except BaseException as error:
            left = self._take_back(attempt, begun)
            if left and isinstance(error, CkptstoreError):
                raise _pin_left(checkpoint, left, error.message) from error
            raise
        return attempt

    def _take_back(self, attempt: str, tiers: Iterable[Tier]) -> list[str]:
        """Removes a pin; the tiers in which it may be left."""
        left = []
        for tier in tiers:
            try:
                intents.take_back(tier, attempt)
            except CkptstoreError as error:
                log.warning("pin %s may be left in tier %s: %s", attempt, tier.name, error.message)
                left.append(tier.name)
        return left

    def unpin(self, which: int | str | Checkpoint) -> int:
        """Takes all pins of a checkpoint back; returns how many there were.

        Raises:
            NotFoundError: it is not pinned.
            BackendError: names the tiers in which a pin may be left.
        """
        checkpoint = self.find(which)
        found: set[str] = set()
        left: list[str] = []
        for copy in checkpoint.copies:
            pin = (self.key, copy.attempt)
            for document in list(intents.list_intents(copy.tier)):
                if document.kind == "pin" and pin in document.pins:
                    left += self._take_back(document.attempt, [copy.tier])
                    found.add(document.attempt)
        if left:
            raise _pin_left(checkpoint, sorted(set(left)), "it could not be removed")
        if not found:
            raise NotFoundError(f"run {self.name!r} step {checkpoint.step} is not pinned")
        return len(found)


def _pin_left(checkpoint: Checkpoint, tiers: Iterable[str], why: str) -> BackendError:
    return BackendError(
        f"run {checkpoint.run!r} step {checkpoint.step}: a pin may be left in tier {', '.join(tiers)}: {why}",
        hint=f"`ckptstore unpin {checkpoint.id}` removes it",
    )


def _put_note(tier: Tier, run_key: str, note: Note) -> None:
    tier.check_marker()
    notes.put_note(tier, run_key, note)
