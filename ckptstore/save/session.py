"""A session: one time that a run is trained, and what its saves may reuse."""

from __future__ import annotations

import os
import threading

from ckptstore.errors import DocumentError, SessionSupersededError
from ckptstore.model.ids import Attempt
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import EpochDoc
from ckptstore.tier import runs
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier


class Session:
    """Opened at the first save (or start, or rewind); counts calls and saves; belongs to one process.

    Attributes:
        epoch: the document that opened it.
        base: what the next save may reuse: the newest committed checkpoint of this session, else what it
            resumed from.
    """

    def __init__(self, tier: Tier, epoch: EpochDoc, base: Contents | None) -> None:
        self._tier = tier
        self.epoch = epoch
        self.run_key = run_key_of(epoch.run)
        self.base = base
        self._calls = 0
        self._shift = 0
        self._sequence = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def is_mine(self) -> bool:
        """False after a fork: counters are never inherited."""
        return self._pid == os.getpid()

    def next_attempt(self, step: int) -> Attempt:
        """The attempt id of this call of save; skipped and failed calls count too."""
        self._calls += 1
        return Attempt(self.epoch.session, step, self._calls)

    @property
    def shift(self) -> int:
        """By how much this rank's numbers differ from its count of calls."""
        return self._shift

    def shift_to(self, shift: int) -> None:
        """From the next call on, numbers differ from the count of calls by so much."""
        self._calls += shift - self._shift
        self._shift = shift

    def skip_to(self, number: int) -> None:
        """Counts on from `number`: rank 0's count is the one that all ranks follow."""
        self._calls = number

    def next_sequence(self) -> int:
        """The place of this save in the session."""
        with self._lock:  # saves through DCP may overlap
            self._sequence += 1
            return self._sequence

    def check_current(self) -> None:
        """That nobody has taken the run over; asked before a save begins and again before it commits.

        Raises:
            SessionSupersededError: names who did.
        """
        number = self.epoch.number + 1
        try:
            later = runs.read_epoch(self._tier, self.run_key, number)
            who = "" if later is None else f", process {later.pid} on {later.host}"
        except DocumentError as error:
            later, who = self.epoch, f" ({error.message})"  # it is there: that is what counts
        if later is not None:
            raise SessionSupersededError(
                f"run {self.epoch.run!r}: epoch {self.epoch.number} was taken over by epoch {number}{who}",
                hint="stop this process: its saves no longer count; or run.restore() and go on from there",
            )
