"""Killing a training in the middle of a save, and proving from the store that it was the middle."""

from __future__ import annotations

import dataclasses
import time

from ckptstore.demo.program import Process, Say, Training
from ckptstore.errors import CkptstoreError
from ckptstore.model.ids import Attempt, ObjectName
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.store import Store
from ckptstore.tier import commits, intents
from ckptstore.tier.tier import Tier

_POLL_SECONDS = 0.001
_DATA = ("chunks/", "packs/")


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A save that was killed in its middle.

    Attributes:
        attempt: it announced itself by its intent, which is still there; it has no commit record.
        objects, bytes: what it had put by then; nothing names them.
        unfinished: files that it was writing.
        starts: processes it took: a kill that came after the commit is tried again at the next save.
    """

    attempt: str
    step: int
    objects: int
    bytes: int
    unfinished: int
    starts: int


def kill_in_a_save(training: Training, store: Store, from_step: int, say: Say) -> Cut:
    """Starts the training, and kills it with SIGKILL inside its first save at or after a step.

    Raises:
        CkptstoreError: it ended before it could be killed.
    """
    run_key = run_key_of(training.run)
    starts = 0
    while True:
        starts += 1
        with training.start(say) as process:
            attempt = _wait_for_data(process, store.tier, training.run, from_step)
            process.kill()
        if attempt is None:
            raise CkptstoreError(
                "the training ended before it could be killed in a save", hint="run the demo again"
            )
        step = Attempt.parse(attempt).step
        announced = any(document.attempt == attempt for document in intents.list_intents(store.tier))
        if announced and commits.read_commit(store.tier, run_key, attempt) is None:
            sizes = [
                info.size_bytes
                for prefix in _DATA
                for info in store.tier.listing(prefix)
                if _is_of(info.key, attempt)
            ]
            unfinished = sum(attempt in info.key for info in store.tier.backend.list_temporaries(""))
            return Cut(attempt, step, len(sizes), sum(sizes), unfinished, starts)
        say(f"the save of step {step} was faster than the kill: again, in the next save")
        from_step = step + 1


def _wait_for_data(process: Process, tier: Tier, run: str, from_step: int) -> str | None:
    """The attempt of a save that has put its first object; None when the process ended before."""
    while process.is_running:
        for document in intents.list_intents(tier):
            attempt = document.attempt
            if document.kind != "save" or document.run != run or Attempt.parse(attempt).step < from_step:
                continue
            if _has_data(tier, attempt):
                return attempt
        time.sleep(_POLL_SECONDS)
    return None


def _has_data(tier: Tier, attempt: str) -> bool:
    return any(_is_of(info.key, attempt) for prefix in _DATA for info in tier.listing(prefix))


def _is_of(key: str, attempt: str) -> bool:
    try:
        return ObjectName.parse(key).attempt == attempt
    except ValueError:
        return False
