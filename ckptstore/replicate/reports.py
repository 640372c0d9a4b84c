"""What copying to a tier has done, and how it goes: plain data for logs, commands and scripts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A checkpoint that was copied."""

    run: str
    step: int
    checkpoint: str
    new_bytes: int
    sent_bytes: int
    reused_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """A checkpoint that was not copied, and why.

    Attributes:
        exit_code: of the error, as a command ends with it; 0 where nothing is wrong.
    """

    run: str
    step: int
    checkpoint: str
    reason: str
    exit_code: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What one round did.

    Attributes:
        sent: copied, in this order.
        skipped: not wanted there, damaged, or being copied by another process.
        failed: tried in vain.
        owed: checkpoints still to be copied.
        is_cut_short: it ended before all were tried: something newer came, or it was stopped.
    """

    tier: str
    sent: tuple[Sent, ...]
    skipped: tuple[Passed, ...]
    failed: tuple[Passed, ...]
    owed: int
    seconds: float
    is_cut_short: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """How copying to a tier goes in this process.

    Attributes:
        owed: checkpoints still to be copied, as last counted; None before the first round.
        copying: the checkpoint under way.
        done_bytes, total_bytes: of its chunks.
        bytes_per_second: of it, so far; 0 before the first.
        seconds_left: for it, at that rate; None when that cannot be said.
        failures: in a row.
        last_error: what the last of them was.
    """

    owed: int | None
    copying: str | None
    done_bytes: int
    total_bytes: int
    bytes_per_second: float
    seconds_left: float | None
    failures: int
    last_error: str | None
