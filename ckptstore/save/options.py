"""How a run saves: what callers say to :meth:`ckptstore.Store.run`."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from ckptstore.errors import UsageError
from ckptstore.model.policies import Policy
from ckptstore.ranks import RankOptions

CaptureMode = Literal["copy", "overlap"]
OnBusy = Literal["wait", "skip", "error"]
OnError = Literal["raise", "warn"]

_LEAST_CAPTURE_BYTES = 1 << 20

IN_FLIGHT = 2
"""So many saves may be captured and not yet ended; each has its own buffers."""


@dataclasses.dataclass(frozen=True, slots=True)
class SaveOptions:
    """See :meth:`ckptstore.Store.run`.

    Raises:
        UsageError: not one of the choices, or no number.
    """

    capture: CaptureMode = "copy"
    capture_bytes: int | None = None
    on_busy: OnBusy = "wait"
    on_error: OnError = "raise"
    max_failures: int = 3
    save_every: int | str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        choices = (("capture", CaptureMode), ("on_busy", OnBusy), ("on_error", OnError))
        for name, choice in choices:
            given, allowed = getattr(self, name), get_args(choice)
            if given not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {given!r}")
        for name, least in (("capture_bytes", _LEAST_CAPTURE_BYTES), ("max_failures", 1)):
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise UsageError(f"{name} must be an int of at least {least}, not {number!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class RunOptions:
    """All that a caller says of a run: who trains it, how it saves, and what is kept."""

    ranks: RankOptions = dataclasses.field(default_factory=RankOptions)
    saving: SaveOptions = dataclasses.field(default_factory=SaveOptions)
    retention: Policy | None = None
    auto_gc: bool = True
