"""The handle of a save: what has become of it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Literal, NoReturn, overload

from ckptstore.errors import CkptstoreError, DeadlineError, UsageError
from ckptstore.model.record import CommitRecord
from ckptstore.save.capture import Capturing
from ckptstore.save.work import Progress

if TYPE_CHECKING:
    from ckptstore.checkpoint import Checkpoint

Level = Literal["capturing", "captured", "committed", "failed", "skipped"]
LEVELS = ("captured", "committed", "replicated")


class PendingSave:
    """A save under way: ``captured`` when training may change all, ``committed`` when it cannot be lost.

    Before that, with ``capture="overlap"``, it is ``capturing``; it may end as ``failed`` or ``skipped``.

    An error of the save is raised by :meth:`result`, :meth:`wait`, the run's next ``save`` and ``close``:
    by the first of them that is called.

    Attributes:
        capturing: the copying of the state.
        progress: bytes stored or found stored so far, of how many.
        blocked_seconds: how long the caller of ``save`` was kept.
    """

    def __init__(self, run: str, step: int) -> None:
        self.run = run
        self.step = step
        self._done = threading.Event()
        self._pid = os.getpid()
        self._record: CommitRecord | None = None
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None
        self._was_raised = False
        self._was_skipped = False
        self.capturing = Capturing(deferred=False)
        self.progress = Progress()
        self.blocked_seconds = 0.0

    @property
    def level(self) -> Level:
        """How far it has come."""
        if not self._done.is_set():
            return "captured" if self.capturing.done else "capturing"
        if self._was_skipped:
            return "skipped"
        return "committed" if self._error is None else "failed"

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._done.is_set()

    @property
    def new_bytes(self) -> int:
        """Tensor bytes that this save wrote; 0 until committed."""
        return self._record.new_bytes if self._record else 0

    @property
    def reused_bytes(self) -> int:
        """Tensor bytes that it did not write: stored before, or equal to others of it; 0 until committed."""
        return self._record.reused_bytes if self._record else 0

    @overload
    def wait(
        self,
        level: Literal["committed", "replicated"] = "committed",
        timeout: float | None = None,
        *,
        tier: str | None = None,
    ) -> Checkpoint: ...

    @overload
    def wait(
        self, level: str, timeout: float | None = None, *, tier: str | None = None
    ) -> Checkpoint | None: ...

    def wait(
        self, level: str = "committed", timeout: float | None = None, *, tier: str | None = None
    ) -> Checkpoint | None:
        """Waits until the save has reached a level.

        Args:
            level: "captured", "committed" or "replicated".
            timeout: seconds; None waits without end.
            tier: name of the tier in which it must be "replicated"; all that require it unless given.

        Returns:
            The checkpoint; None when it is captured and not committed yet, and no more was asked for.

        Raises:
            DeadlineError: not yet; the save goes on.
            BusyError: it was skipped.
            SaveFailedError, SessionSupersededError, ...: what ended the save.
            UsageError: no such level; or the save is another process's, that this one was forked from.
        """
        if level not in LEVELS:
            raise UsageError(f"no such level: {level!r}", hint=f"levels are {', '.join(LEVELS)}")
        if os.getpid() != self._pid and not self._done.is_set():
            raise UsageError(
                f"save of run {self.run!r} step {self.step} goes on in the process that forked this one",
                hint="wait for it there",
            )
        reached = self.capturing.wait(timeout) if level == "captured" else self._done.wait(timeout)
        if not reached:
            raise DeadlineError(
                f"save of run {self.run!r} step {self.step} is {self.level}, not {level}, after {timeout} s"
            )
        if not self._done.is_set():
            return None
        self.raise_error()
        assert self._checkpoint is not None
        if level == "replicated":
            self._checkpoint.wait_replicated(tier, timeout)
        return self._checkpoint

    def result(self) -> Checkpoint:
        """The committed checkpoint; raises what failed."""
        return self.wait()

    def wait_done(self) -> None:
        """Waits for the outcome, whatever it is."""
        self._done.wait()

    def raise_error(self) -> None:
        """Raises the save's error, if it failed; it then counts as told."""
        if self._error is not None:
            self._was_raised = True
            raise self._error

    @property
    def has_untold_error(self) -> bool:
        """Failed, and nobody has been told yet."""
        return self._error is not None and not self._was_raised

    def finish(self, record: CommitRecord, checkpoint: Checkpoint) -> None:
        """The saver's word that it is committed."""
        self._record, self._checkpoint = record, checkpoint
        self._done.set()

    def fail(self, error: BaseException, *, told: bool = False) -> None:
        """The saver's word that it has failed.

        Args:
            told: only who asks this handle is told.
        """
        self._error, self._was_raised = error, self._was_raised or told
        self._done.set()

    def skip(self, error: CkptstoreError) -> None:
        """It was not begun, as the run's ``on_busy`` says; only who asks this handle is told."""
        self._was_skipped = True
        self.fail(error, told=True)

    def tell(self) -> None:
        """The error, also one that is yet to come, counts as told."""
        self._was_raised = True

    def __repr__(self) -> str:
        return f"<PendingSave {self.run!r} step {self.step}: {self.level}>"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a pending save belongs to the process that saves; it cannot be pickled",
            hint="send its step, and look it up there: run[step]",
        )
