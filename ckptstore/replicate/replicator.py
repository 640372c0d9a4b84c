"""Keeping one tier up to date in the background of a training."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Collection

from ckptstore.errors import BackendError, CkptstoreError
from ckptstore.replicate.debt import Owed, Wanted
from ckptstore.replicate.pace import Saves
from ckptstore.replicate.reports import Report, Sent
from ckptstore.replicate.rounds import Rounds
from ckptstore.replicate.source import Source
from ckptstore.save.lane import step_back, stop_at_exit
from ckptstore.tier.asking import answers
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 1.0, 300.0
FIRST_LOOK_SECONDS, MOST_LOOK_SECONDS = 0.02, 2.0
"""Who waits for another process's copy looks so often, at first and at last: a look is some listings."""
QUIET_SECONDS = 120.0
"""Copying during which nothing moved for so long is not waited for at the end of a run."""
STOP_SECONDS = 30.0
"""So long the end of a store waits for objects that are being copied."""


class Replicator(Rounds):
    """Rounds in a thread of their own, begun when something was committed; a failing tier is tried for ever.

    Nothing that happens there reaches training: failures are counted and logged.

    Args:
        jitter: gives numbers in [0, 1).
    """

    def __init__(
        self,
        source: Source,
        destination: Tier,
        *,
        wanted: Callable[[str], Wanted | None] | None = None,
        on_sent: Callable[[Sent], None] | None = None,
        saves: Saves | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(source, destination, wanted=wanted, on_sent=on_sent, saves=saves)
        self._jitter = jitter
        self._thread: threading.Thread | None = None
        self._asked = self._answered = self._seen = 0
        self._in_vain = 0
        self._is_hurried = False
        self._woken: set[str | None] = {None}  # runs, or (None) all: what was owed before is not known

    def wake(self, run: str | None = None) -> None:
        """Something was committed: copies it in a thread of its own, which is started if there is none.

        Args:
            run: of this run; the tiers need not be asked about others. None: of any.
        """
        with self._changed:
            self._asked += 1
            self._woken.add(run)
            self._changed.notify_all()
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._work, name=f"ckptstore-replicate-{self.destination.name}", daemon=True
                )
                self._thread.start()
                stop_at_exit(self)

    def wait_for(self, checkpoint: str, timeout: float | None = None, *, run: str | None = None) -> bool:
        """Waits until the tier has a checkpoint; False when the time is over or it is passed over.

        Copying begins, if it has not; a tier that failed before is tried at once, for it may be back.

        Args:
            timeout: seconds; None waits without end.
            run: whose it is; None looks through all.
        """
        with self._changed:
            if checkpoint in self._done:
                return True
            self._passed_over.pop(checkpoint, None)  # it may be wanted by now: the next round tells
            self._is_hurried = True
        self.wake(run)
        with self._changed:
            self._changed.wait_for(
                lambda: checkpoint in self._done or checkpoint in self._passed_over, timeout
            )
            return checkpoint in self._done

    def watch_for(self, checkpoint: str, timeout: float | None = None, *, run: str | None = None) -> bool:
        """As :meth:`wait_for`, where another process copies: looks, ever more seldom, and copies nothing."""
        clock, wait = self._environment.monotonic, FIRST_LOOK_SECONDS
        end = math.inf if timeout is None else clock() + timeout
        with self._changed:
            self._passed_over.pop(checkpoint, None)
        while True:
            try:
                self.owing(run)
            except BackendError as error:
                self.last_error = error
            with self._changed:
                if checkpoint in self._done or checkpoint in self._passed_over:
                    return checkpoint in self._done
            left = end - clock()
            if left <= 0:
                return False
            self._environment.sleep(min(wait * (0.5 + self._jitter()), left))
            wait = min(wait * 1.5, MOST_LOOK_SECONDS)

    def passed_over(self, checkpoint: str) -> Owed | None:
        """A checkpoint that is not copied, with the reason, as of the last round; None if it is."""
        with self._changed:
            return None if checkpoint in self._done else self._passed_over.get(checkpoint)

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is owed; False when two tries in a row are in vain, or the time is over.

        A tier that failed before gets one more try, at once: it may be back.

        Args:
            timeout: seconds in all; without it as long as something moves: until nothing has for
                :data:`QUIET_SECONDS`, as with a server that takes connections and never answers.
        """
        with self._changed:
            if self._thread is None:
                return True
            if self._in_vain > 1:
                self._in_vain, self._is_hurried = 1, True
                self._changed.notify_all()
            if timeout is not None:
                self._changed.wait_for(self._is_decided, timeout)
                return self._is_idle
            moved = self._moved()
            while not self._changed.wait_for(self._is_decided, QUIET_SECONDS) and moved != self._moved():
                moved = self._moved()
            return self._is_idle

    def _is_decided(self) -> bool:
        return self._in_vain > 1 or self._is_idle

    def _moved(self) -> tuple[float, ...]:
        """Changes while copying gets on: bytes, any answer of the tier, or a wait for its cap."""
        waits = self._environment.monotonic() if self._pace.is_waiting else 0.0
        return self.progress.done_bytes, answers(self.destination.backend), waits

    @property
    def _is_idle(self) -> bool:
        return self._answered >= self._asked

    def stop(self, timeout: float | None = STOP_SECONDS) -> bool:
        """Ends the thread after the objects that it is copying; what is owed stays owed.

        Args:
            timeout: seconds; None waits without end.

        Returns:
            False when it has not ended by then: it ends when the tier answers, or with the process, and this
            replicator copies nothing any more.
        """
        with self._changed:
            self._stopping = True
            self._pace.stop()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return False
        with self._changed:
            self._thread, self._stopping = None, False
            self._pace.go_on()
        return True

    def _work(self) -> None:
        step_back()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not self._is_idle)
                if self._stopping:
                    return
                self._seen = self._asked
                woken, self._woken = self._woken, set()
            report = self._try(woken)
            with self._changed:
                if report is None:
                    self._woken |= woken
                self._woken |= self._behind
                if report is not None and not report.owed:
                    self._answered, self._in_vain = self._seen, 0
                    self._changed.notify_all()
                    continue
                if report is not None and report.sent:
                    self._in_vain = 0
                if report is not None and report.is_cut_short:
                    continue
                self._in_vain += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping or self._is_hurried, self._wait_seconds())
                self._is_hurried = False

    def _note_sent(self, sent: Sent) -> None:
        with self._changed:
            self._in_vain = 0
        super()._note_sent(sent)

    def _has_news(self) -> bool:
        return self._asked != self._seen

    def _try(self, woken: Collection[str | None]) -> Report | None:
        """One round; None when it could not even begin."""
        # What the tier missed while it was away may be of any run.
        is_full = self._missed_notes or None in woken
        try:
            return self.run_once(None if is_full else [run for run in woken if run is not None])
        except CkptstoreError as error:
            self._note_failure(error, "what is owed")
        except Exception:
            log.exception("copying to tier %s failed by a fault of its own", self.destination.name)
            with self._changed:
                self.failures += 1
        return None

    def _wait_seconds(self) -> float:
        doubled = FIRST_WAIT_SECONDS * 2.0 ** min(self._in_vain - 1, 20)
        return min(doubled, MOST_WAIT_SECONDS) * (0.5 + self._jitter())
