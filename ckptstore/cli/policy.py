"""``policy``: which checkpoints are kept; shows it, sets it, and tries it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.table import Column, table, terminal_width
from ckptstore.cli.text import plural, shown, size
from ckptstore.errors import UsageError
from ckptstore.gc.fates import Fate
from ckptstore.gc.rounds import RoundReport
from ckptstore.manifest.text import iso
from ckptstore.model.policies import Policy, PolicyDoc
from ckptstore.model.retention import Keep

if TYPE_CHECKING:
    from ckptstore.store import Store

Action = Literal["show", "set", "test"]
ACTIONS: tuple[Action, ...] = ("show", "set", "test")

_RULES = ("last", "every", "within", "hourly", "daily", "weekly", "tags")


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """The options; what none of them says is None or empty."""

    keep: Keep | None
    component: str | None
    tier: str | None
    clear: bool


def parse_best(text: str) -> tuple[int, str, str]:
    """``N:METRIC:MODE``; a metric may have colons.

    Raises:
        click.BadParameter: says how it is written.
    """
    count, _, rest = text.partition(":")
    metric, _, mode = rest.rpartition(":")
    if not count.isascii() or not count.isdecimal() or not metric or mode not in ("min", "max"):
        raise click.BadParameter(f"{text!r} cannot be used; write it like 2:val_loss:min")
    return int(count), metric, mode


@command(
    "policy",
    "ckptstore policy show                         the default, and each run's own",
    "ckptstore policy set --last 3 --every 1000    of all runs that have none of their own",
    "ckptstore policy set gpt --last 5 --best 2:val_loss:min --wait 6h",
    "ckptstore policy set gpt --component optimizer --last 2",
    "ckptstore policy test gpt --last 3            what would go, and why the rest stays",
    "ckptstore policy set gpt --clear",
)
@click.argument("action", type=click.Choice(ACTIONS), metavar="(show | set | test)")
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--last", type=int, metavar="N", help="Keep the newest N.")
@click.option(
    "--every",
    type=int,
    multiple=True,
    metavar="STEPS",
    help="Keep one of each so many steps: an exact multiple, else the lowest step. May be given repeatedly.",
)
@click.option("--within", metavar="TIME", help='Keep what is at most so much older than the newest: "7d".')
@click.option("--hourly", type=int, metavar="N", help="Keep the newest of each of N hours that have one.")
@click.option("--daily", type=int, metavar="N", help="Likewise of N days (UTC).")
@click.option("--weekly", type=int, metavar="N", help="Likewise of N weeks (from Monday).")
@click.option(
    "--tags",
    multiple=True,
    metavar="PATTERN",
    help="Keep only these tags (* any text). Unless given, every tag keeps its checkpoint.",
)
@click.option(
    "--best",
    type=parse_best,
    multiple=True,
    metavar="N:METRIC:MODE",
    help="Keep the best N by a metric, min or max. May be given repeatedly.",
)
@click.option(
    "--wait", metavar="TIME", help="With --best: keep what has no such metric yet for so long (6h)."
)
@click.option("--component", metavar="NAME", help="The rules say where this component is kept, too.")
@click.option(
    "--tier", metavar="NAME", help="The rules hold in this tier only; of test and show: look there."
)
@click.option("--clear", is_flag=True, help="Of set: take the policy back, or its part for NAME.")
def policy(invocation: Invocation, /, action: Action, run: str | None, **options: Any) -> None:
    """Shows, sets or tries out which checkpoints are kept: of RUN, or of runs without a policy of their own.

    A checkpoint stays if any rule keeps it; the newest restorable one always does. Rules count within a run,
    never over several. `set` replaces the rules; those for components and tiers stay unless they are named.
    It holds from the next `ckptstore gc` or commit on. `test` prints every checkpoint with what would become
    of it, and why; without rules, by the policy that holds now.
    """
    asked = _Asked(_keep(options), options["component"], options["tier"], options["clear"])
    _check(action, asked)
    with invocation.open_store() as store:
        if asked.tier is not None:
            store.tier_named(asked.tier)
        if action == "test":
            _test(invocation, store, run, asked)
            return
        if action == "set":
            document = store.policies.set(run, _changed(store, run, asked))
            if document.policy is None and not invocation.as_json:
                output.say("taken back")
        _show(invocation, store, run)


def _keep(options: Mapping[str, Any]) -> Keep | None:
    best, wait = options["best"], options["wait"]
    fields = {name: list(options[name]) if name in ("every", "tags") else options[name] for name in _RULES}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value not in (None, [])}
    if wait is not None and not best:
        raise UsageError("--wait is for --best", hint="add --best 2:val_loss:min")
    if best:
        extra = {} if wait is None else {"wait": wait}
        given["best"] = [{"n": n, "metric": metric, "mode": mode, **extra} for n, metric, mode in best]
    return Keep.from_map(given) if given else None


def _check(action: Action, asked: _Asked) -> None:
    if action == "set" and asked.clear == (asked.keep is not None):
        raise UsageError("policy set wants either rules or --clear", hint="for instance: --last 3")
    if action != "set" and asked.clear:
        raise UsageError("--clear is for `policy set`")
    if action == "show" and (asked.keep is not None or asked.component is not None or asked.tier is not None):
        raise UsageError("policy show takes no rules", hint="`ckptstore policy test` tries them out")
    if asked.keep is None and action == "test" and asked.component is not None:
        raise UsageError("--component wants rules", hint="for instance: --last 3")
    if asked.component is not None and asked.tier is not None and action == "set":
        raise UsageError("--component and --tier cannot be combined: set one after the other")


def _changed(store: Store, run: str | None, asked: _Asked) -> Policy | None:
    """What is to be recorded: the policy as it is, but for what was asked for."""
    if asked.clear and asked.component is None and asked.tier is None:
        return None
    newest = store.policies.own(run)
    before = None if newest is None else newest.policy
    if before is None and run is not None:  # a part of one's own must not lose what the default says
        before = store.policies.of(run)
        before = None if before is None else _of_run(before)
    keep, components, tiers = (
        (None, {}, {}) if before is None else (before.keep, dict(before.components), dict(before.tiers))
    )
    if asked.component is not None:
        _put(components, asked.component, asked.keep)
    elif asked.tier is not None:
        _put(tiers, asked.tier, asked.keep)
    else:
        keep = asked.keep
    return Policy(keep, components, tiers) if keep is not None or components or tiers else None


def _of_run(policy: Policy) -> Policy | None:
    """Without what it says of tiers: the default's word on them holds anyway."""
    return Policy(policy.keep, policy.components) if policy.keep or policy.components else None


def _put(parts: dict[str, Keep], name: str, keep: Keep | None) -> None:
    if keep is not None:
        parts[name] = keep
    elif parts.pop(name, None) is None:
        raise UsageError(f"the policy says nothing of {name!r}")


# --- show -----------------------------------------------------------------------------------------


def _show(invocation: Invocation, store: Store, run: str | None) -> None:
    default = store.policies.own(None)
    own = [(run, store.policies.own(run))] if run is not None else store.policies.own_of_runs()
    holds = None if run is None else store.policies.of(run)
    if invocation.as_json:
        output.emit_json(
            {
                "store": store.url,
                "run": run,
                "holds": None if holds is None else output.plain(holds.as_map()),
                "default": _document(None, default),
                "runs": [_document(name, found) for name, found in own if found is not None],
            }
        )
        return
    for name, found in [(None, default), *own]:
        output.say(_line(name, found))
    if run is not None:
        for tier in store.tiers:
            keep = None if holds is None else holds.for_tier(tier.name)
            output.say(f"in tier {shown(tier.name)} run {shown(run)} keeps: {_shown_keep(keep)}")
        for name, keep in () if holds is None else holds.components.items():
            output.say(f"of those, component {shown(name)} is kept in: {shown(str(keep))}")


def _shown_keep(keep: Keep | None) -> str:
    return "everything" if keep is None else shown(str(keep))


def _line(run: str | None, found: PolicyDoc | None) -> str:
    name = "default" if run is None else f"run {shown(run)}"
    if found is None or found.policy is None:
        return f"{name}: {'everything is kept' if run is None else 'as the default says'}"
    return f"{name}: {shown(str(found.policy))}  ({found.origin}, {shown(found.author)}, {iso(found.at)})"


def _document(run: str | None, found: PolicyDoc | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "run": run,
        "number": found.number,
        "at": iso(found.at),
        "author": found.author,
        "origin": found.origin,
        "policy": None if found.policy is None else output.plain(found.policy.as_map()),
    }


# --- test -----------------------------------------------------------------------------------------


def _test(invocation: Invocation, store: Store, run: str | None, asked: _Asked) -> None:
    tried = None
    if asked.keep is not None:
        tried = _changed(store, run, asked)
    reports = store.try_policy(tried, run=run, tier=asked.tier)
    if invocation.as_json:
        tiers = [_tier_document(report) for report in reports]
        output.emit_json({"store": store.url, "run": run, "tiers": tiers})
        return
    for report in reports:
        for line in _tier_lines(report):
            output.say(line)


def _lost(report: RoundReport) -> dict[tuple[str, str], list[str]]:
    """(run key, checkpoint) -> the components that it would lose."""
    return {(trim.run_key, trim.checkpoint): list(trim.components) for trim in report.trims}


def _tier_document(report: RoundReport) -> dict[str, Any]:
    lost = _lost(report)
    return {
        "tier": report.tier,
        "checkpoints": [
            {
                "run": fate.run,
                "step": fate.step,
                "id": fate.checkpoint,
                "keep": _stays(fate),
                "reasons": list(fate.reasons),
                "loses": lost.get((fate.run_key, fate.checkpoint), []),
                "bytes": fate.size_bytes,
                "alone_bytes": fate.alone_bytes,
            }
            for fate in report.fates
        ],
        "deleted": sum(not _stays(fate) for fate in report.fates),
        "freed_bytes": report.freed_bytes,
    }


def _stays(fate: Fate) -> bool:
    return fate.outcome == "keep"


_COLUMNS = (
    Column("RUN", flexible=True, droppable=True),
    Column("STEP", right=True, always=True),
    Column("SIZE", right=True),
    Column("ALONE", right=True, droppable=True),
    Column("", always=True, paint=lambda text: output.odd(text) if text == "delete" else text),
    Column("WHY", flexible=True),
)


def _tier_lines(report: RoundReport) -> Iterator[str]:
    lost = {place: [f"without {', '.join(names)}"] for place, names in _lost(report).items()}
    rows = [
        (
            shown(fate.run),
            str(fate.step),
            size(fate.size_bytes),
            size(fate.alone_bytes),
            "keep" if _stays(fate) else "delete",
            "; ".join(map(shown, (*fate.reasons, *lost.get((fate.run_key, fate.checkpoint), ())))),
        )
        for fate in report.fates
    ]
    going = sum(not _stays(fate) for fate in report.fates)
    yield f"tier {shown(report.tier)}, counted per run:"
    if rows:
        yield from table(_COLUMNS, rows, limit=terminal_width())
    yield (
        f"{going} of {plural(len(rows), 'checkpoint')} would go, {len(lost)} would lose components: "
        f"{size(report.freed_bytes)} would be freed; nothing was deleted"
    )
