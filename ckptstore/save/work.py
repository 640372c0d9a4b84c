"""What one rank has to store in one save, on its way from training to the tier."""

from __future__ import annotations

import dataclasses
import threading

from ckptstore.model.ids import Attempt
from ckptstore.save.capture import Waves
from ckptstore.save.cut import Bools, Share, cut
from ckptstore.save.flatten import FlatState


class Progress:
    """How many bytes of a save have been stored, or found stored; written by several threads."""

    def __init__(self, total_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self._done = 0
        self._lock = threading.Lock()

    @property
    def done_bytes(self) -> int:
        """So many so far."""
        return self._done

    def add(self, nbytes: int) -> None:
        """So many more."""
        with self._lock:
            self._done += nbytes


@dataclasses.dataclass(slots=True)
class Work:
    """One rank's share of one attempt.

    Attributes:
        flat: what it holds; its live arrays only if it is to be written from where it lies.
        share: what of that it writes and compares.
        waves: the chunks in the share, in one go or in several.
        plan: the number of the plan that the share follows; 0: none.
        trainable: bool, (tensors,): what gradients are computed for; None where that is not known.
        is_sure: that is so in this save, and was not only found in an earlier one.
        has_doubts: nothing of it has changed; whether that is still what is trained must be looked at anew.
        in_background: the threads that write give way to training.
    """

    attempt: Attempt
    flat: FlatState
    share: Share
    waves: Waves
    plan: int = 0
    in_background: bool = False
    progress: Progress = dataclasses.field(default_factory=Progress)
    trainable: Bools | None = None
    is_sure: bool = True
    has_doubts: bool = False
    _captured: threading.Event = dataclasses.field(default_factory=threading.Event, init=False)
    _captured_seconds: float = dataclasses.field(default=0.0, init=False)

    @property
    def captured_seconds(self) -> float:
        """How long training was kept waiting; a save may be written before that is over, so this waits."""
        if self.in_background:
            self._captured.wait()
        return self._captured_seconds

    def captured(self, seconds: float) -> None:
        """Training was kept waiting so long, and goes on."""
        self._captured_seconds = seconds
        self._captured.set()

    @classmethod
    def live(cls, attempt: Attempt, flat: FlatState, share: Share | None = None, *, plan: int = 0) -> Work:
        """Of a state that stays as it is until the save has ended; everything unless `share` is given."""
        share = share or Share.everything(flat.layout)
        pieces = list(cut(flat.layout, flat.sources, share, flat.views))
        progress = Progress(sum(piece.nbytes for piece in pieces))
        return cls(attempt, flat, share, Waves.live(pieces), plan, progress=progress)
