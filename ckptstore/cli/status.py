"""``status``: which checkpoint is in which tier, and what each tier is owed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.table import Column, table, terminal_width
from ckptstore.cli.text import ago, plural, shown, size
from ckptstore.manifest.text import iso

if TYPE_CHECKING:
    from ckptstore.inspect.status import CheckpointStatus, InTier, Status, TierStatus


@command(
    "status",
    "ckptstore status              every tier, and the runs in it",
    "ckptstore status gpt          each checkpoint of run gpt, tier by tier",
    "ckptstore status --json",
)
@click.argument("run", required=False, shell_complete=complete_run)
def status(invocation: Invocation, run: str | None) -> None:
    """Says what is where: for each tier what it holds and is owed, and where each checkpoint of RUN is.

    A tier is OWED the checkpoints of hotter tiers that it must have (replicate = "async" or "commit") and
    lacks; OLDEST is when the first of them was saved. VERIFIED counts the checkpoints found good there when
    they were last read back, and how long ago the longest unread of them was.
    """
    from ckptstore.inspect.status import status as gather

    with invocation.open_store() as store:
        found = gather(store, run)
        now = store.tier.environment.now()
    if invocation.as_json:
        output.emit_json(_json(found))
        return
    for line in _lines(found, now):
        output.say(line)


def _lines(found: Status, now: float) -> Iterator[str]:
    yield from table(_TIER_COLUMNS, [_tier_cells(tier, now) for tier in found.tiers], limit=terminal_width())
    for tier in found.tiers:
        if tier.reason is not None:
            yield f"{output.bad(tier.name)} does not answer: {shown(tier.reason)}"
    yield ""
    if not found.checkpoints:
        yield "no checkpoints yet"
    elif found.run is None:
        yield from _runs(found, now)
    else:
        yield from _checkpoints(found, now)


# --- tiers ---------------------------------------------------------------------------------------------


def _paint(text: str) -> str:
    return text if text in ("0", "-", "yes") else output.odd(text)


def _paint_bad(text: str) -> str:
    return text if text in ("0", "-") else output.bad(text)


_TIER_COLUMNS = (
    Column("TIER"),
    Column("REPLICATE"),
    Column("ANSWERS", paint=_paint),
    Column("CHECKPOINTS", right=True),
    Column("DAMAGED", right=True, paint=_paint_bad),
    Column("OWED", right=True, paint=_paint),
    Column("OLDEST", right=True),
    Column("VERIFIED", right=True),
    Column("URL", flexible=True, droppable=True),
)


def _tier_cells(tier: TierStatus, now: float) -> tuple[str, ...]:
    verified = "-"
    if tier.verified:
        verified = f"{tier.verified} of {tier.checkpoints}, {ago(tier.verified_at, now)}"
    elif tier.checkpoints:
        verified = "never"
    owed, oldest = "-", "-"
    if tier.debt is not None:
        owed = "0"
        if tier.debt.checkpoints:
            owed, oldest = f"{tier.debt.checkpoints}, {size(tier.debt.bytes)}", ago(tier.debt.oldest_at, now)
    return (
        tier.name,
        tier.requirement or "?",
        "yes" if tier.reachable else "no",
        "-" if tier.checkpoints is None else str(tier.checkpoints),
        "-" if tier.damaged is None else str(tier.damaged),
        owed,
        oldest,
        verified,
        shown(tier.url or ""),
    )


# --- runs and checkpoints ------------------------------------------------------------------------------

_HERE = {"ok", "invalid", "expiring"}


def _names(found: Status) -> list[str]:
    return [tier.name for tier in found.tiers if tier.reachable]


def _runs(found: Status, now: float) -> list[str]:
    """How many checkpoints of each run each tier has."""
    by_run: dict[str, list[CheckpointStatus]] = {}
    for checkpoint in found.checkpoints:
        by_run.setdefault(checkpoint.run, []).append(checkpoint)
    columns = (
        Column("RUN", flexible=True),
        Column("CHECKPOINTS", right=True),
        Column("SAVED", right=True),
        *(Column(name, right=True, paint=_paint_count) for name in _names(found)),
    )
    rows = []
    for run, checkpoints in by_run.items():
        newest = max(checkpoint.saved_at for checkpoint in checkpoints)
        cells = [
            _counted([checkpoint.tiers[number] for checkpoint in checkpoints])
            for number in range(len(_names(found)))
        ]
        rows.append((shown(run), str(len(checkpoints)), ago(newest, now), *cells))
    return table(columns, rows, limit=terminal_width())


def _paint_count(text: str) -> str:
    return output.bad(text) if "damaged" in text else output.odd(text) if "owed" in text else text


def _counted(places: list[InTier]) -> str:
    """Like ``all``, ``11 + 1 owed`` and ``2 owed``."""
    counts = collections.Counter[str](place.presence for place in places)
    here = sum(counts[presence] for presence in _HERE)
    others = [f"{counts[word]} {word}" for word in ("damaged", "owed") if counts[word]]
    if here or not others:
        others.insert(0, "all" if here == len(places) else str(here))
    return " + ".join(others)


def _checkpoints(found: Status, now: float) -> Iterator[str]:
    """Where each checkpoint is, and when it was verified there."""
    columns = (
        Column("STEP", right=True),
        Column("SAVED", right=True),
        Column("SIZE", right=True),
        *(Column(name, paint=_paint_place) for name in _names(found)),
        Column("ID", droppable=True),
        Column("REASON", flexible=True),
    )
    rows = []
    for checkpoint in found.checkpoints:
        reasons = {place.reason: None for place in checkpoint.tiers if place.reason is not None}
        rows.append(
            (
                str(checkpoint.step),
                ago(checkpoint.saved_at, now),
                size(checkpoint.bytes),
                *(_place(place, now) for place in checkpoint.tiers),
                checkpoint.id,
                "; ".join(map(shown, reasons)),
            )
        )
    yield from table(columns, rows, limit=terminal_width())
    yield plural(len(rows), "checkpoint")


def _place(place: InTier, now: float) -> str:
    if place.presence == "absent":
        return "-"
    text = "here" if place.presence == "ok" else place.presence
    return text if place.verified_at is None else f"{text}, verified {ago(place.verified_at, now)}"


def _paint_place(text: str) -> str:
    if text.startswith("damaged"):
        return output.bad(text)
    return text if text.startswith(("here", "-", "passed over")) else output.odd(text)


# --- JSON ----------------------------------------------------------------------------------------------


def _json(found: Status) -> dict[str, Any]:
    tiers = []
    for tier in found.tiers:
        document = dataclasses.asdict(tier) | {"verified_at": iso(tier.verified_at)}
        if tier.debt is not None:
            document["debt"] |= {"oldest_at": iso(tier.debt.oldest_at)}
        tiers.append(document)
    checkpoints = [
        dataclasses.asdict(checkpoint)
        | {
            "saved_at": iso(checkpoint.saved_at),
            "tiers": [
                dataclasses.asdict(place) | {"verified_at": iso(place.verified_at)}
                for place in checkpoint.tiers
            ],
        }
        for checkpoint in found.checkpoints
    ]
    return {"store": found.store, "run": found.run, "tiers": tiers, "checkpoints": checkpoints}
