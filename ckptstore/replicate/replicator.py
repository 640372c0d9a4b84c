"""Keeping one tier up to date in the background of a training."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from ckptstore.errors import CkptstoreError
from ckptstore.replicate.debt import Owed, Wanted
from ckptstore.replicate.rounds import Report, Rounds, Sent, Source
from ckptstore.save.lane import step_back
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 1.0, 300.0


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
        wanted: Wanted | None = None,
        on_sent: Callable[[Sent], None] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(source, destination, wanted=wanted, on_sent=on_sent)
        self._jitter = jitter
        self._thread: threading.Thread | None = None
        self._asked = self._answered = self._seen = 0
        self._in_vain = 0
        self._is_hurried = False

    def wake(self) -> None:
        """Something was committed: copies it in a thread of its own, which is started if there is none."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._work, name=f"ckptstore-replicate-{self.destination.name}", daemon=True
                )
                self._thread.start()

    def wait_for(self, checkpoint: str, timeout: float | None = None) -> bool:
        """Waits until the tier has a checkpoint; False when the time is over or it is passed over.

        Copying begins, if it has not.
        """
        with self._changed:
            if checkpoint in self._done:
                return True
            self._passed_over.pop(checkpoint, None)  # it may be wanted by now: the next round tells
        self.wake()
        with self._changed:
            self._changed.wait_for(
                lambda: checkpoint in self._done or checkpoint in self._passed_over, timeout
            )
            return checkpoint in self._done

    def passed_over(self, checkpoint: str) -> Owed | None:
        """A checkpoint that is not copied, with the reason, as of the last round; None if it is."""
        with self._changed:
            return None if checkpoint in self._done else self._passed_over.get(checkpoint)

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is owed; False when two tries in a row are in vain, or the time is over.

        A tier that failed before gets one more try, at once: it may be back.
        """
        with self._changed:
            if self._thread is None:
                return True
            if self._in_vain > 1:
                self._in_vain, self._is_hurried = 1, True
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._in_vain > 1 or self._is_idle, timeout)
            return self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self._answered >= self._asked

    def stop(self) -> None:
        """Ends the thread after the objects that it is copying; what is owed stays owed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._changed:
            self._thread, self._stopping = None, False

    def _work(self) -> None:
        step_back()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not self._is_idle)
                if self._stopping:
                    return
                self._seen = self._asked
            report = self._try()
            with self._changed:
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

    def _try(self) -> Report | None:
        """One round; None when it could not even begin."""
        try:
            return self.run_once()
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
