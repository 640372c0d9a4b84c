"""Later facts about a run's checkpoints: metrics, tags, validity, pins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ckptstore import refs
from ckptstore.arguments import check_metrics
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import BackendError, ConflictError, NotFoundError, UsageError, WrongStoreError
from ckptstore.model.ids import Attempt
from ckptstore.model.record import NoteKind
from ckptstore.run_view import RunView
from ckptstore.tier import intents, layout, notes
from ckptstore.tier.intents import Intent

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
                copy.tier.check_marker()
                notes.put_note(copy.tier, self.key, note)
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
        """
        checkpoint = self.find(which)
        attempt = str(Attempt(self._tier.environment.new_ulid(), checkpoint.step, 1))
        intents_made = []
        for copy in checkpoint.copies:
            pin = (self.key, copy.attempt)
            copy.tier.check_marker()
            intents_made.append(Intent.announce(copy.tier, "pin", attempt, self.name, [pin], reason))
            if copy.tier.exists(layout.doom_key(*pin)):
                for intent in intents_made:
                    intent.remove()
                raise ConflictError(f"run {self.name!r} step {checkpoint.step} is already being deleted")
        return attempt

    def unpin(self, which: int | str | Checkpoint) -> int:
        """Takes all pins of a checkpoint back; returns how many there were.

        Raises:
            NotFoundError: it is not pinned.
        """
        checkpoint = self.find(which)
        found: set[str] = set()
        for copy in checkpoint.copies:
            pin = (self.key, copy.attempt)
            for document in intents.list_intents(copy.tier):
                if document.kind == "pin" and pin in document.pins:
                    Intent(copy.tier, document).remove()
                    found.add(document.attempt)
        if not found:
            raise NotFoundError(f"run {self.name!r} step {checkpoint.step} is not pinned")
        return len(found)
