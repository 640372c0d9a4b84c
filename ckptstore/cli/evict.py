"""``evict``: frees space in a hot tier, of what a colder one is proven to have."""

from __future__ import annotations

import re

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run_or_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import from_stdin
from ckptstore.cli.text import plural, shown, size
from ckptstore.gc.collect import Report
from ckptstore.gc.evict import KEPT, EvictPlan

PARTLY = 3
"""Exit code when something was asked for and stays."""


def parse_keep(text: str) -> int:
    """``last=N`` as N.

    Raises:
        click.BadParameter: says how it is written.
    """
    found = re.fullmatch(r"last=([0-9]{1,9})", text)
    if found is None or not int(found[1]):
        raise click.BadParameter(f"{text!r} cannot be used; write it like last=3")
    return int(found[1])


@command(
    "evict",
    "ckptstore evict gpt --keep last=2            all but the newest two, off the hottest tier",
    "ckptstore evict gpt@12000 gpt@14000 --dry-run",
    "ckptstore evict gpt@12000 --tier nvme",
)
@click.argument(
    "what", nargs=-1, required=True, metavar="(RUN | REF | -)...", shell_complete=complete_run_or_ref
)
@click.option("--tier", metavar="NAME", help="Off this tier; the hottest unless given.")
@click.option("--keep", type=parse_keep, metavar="last=N", help="The newest N of each run stay.")
@click.option("--dry-run", is_flag=True, help="Say what would go and why the rest stays; delete nothing.")
def evict(
    invocation: Invocation, what: tuple[str, ...], tier: str | None, keep: int | None, dry_run: bool
) -> None:
    """Removes checkpoints from a hot tier, where a colder one has them whole at this moment.

    The colder tier is asked for every object first, and held until the hot copy is gone. The last copy never
    goes, nor what is pinned or being read. Ends with 3 when something that was named stays, --keep apart.
    """
    names = from_stdin(what)
    with invocation.open_store() as store:
        plan = store.plan_evict(names, tier=tier, keep_last=keep)
        report = None if dry_run or not any(one.goes for one in plan.evictions) else store.evict(plan)
        if invocation.as_json:
            output.emit_json(
                {
                    "store": store.url,
                    **output.plain(plan),
                    "report": None if report is None else output.plain(report),
                }
            )
        else:
            _print(plan, report)
    if any(not one.goes and one.why != KEPT for one in plan.evictions) or (report and _failed(report)):
        click.get_current_context().exit(PARTLY)


def _failed(report: Report) -> bool:
    return bool(report.stays or report.failures)


def _print(plan: EvictPlan, report: Report | None) -> None:
    lost = {} if report is None else {(one.run_key, one.attempt): one.reason for one in report.stays}
    for one in plan.evictions:
        why = lost.get((one.run_key, one.attempt), one.why)
        name = f"{shown(one.run)}@{one.step}"
        if why or one.proof is None:
            output.say(f"keep    {name}: {shown(why)}")
        else:
            did = "would go" if report is None else "evicted"
            output.say(f"{did:<7} {name}: {size(one.size_bytes)}, whole in tier {shown(one.proof[0])}")
    if not plan.evictions:
        output.say(f"nothing of that is in tier {shown(plan.tier)}")
        return
    if report is None:
        going = sum(one.goes for one in plan.evictions)
        output.say(
            f"{plural(going, 'checkpoint')} would go from tier {shown(plan.tier)}; nothing was deleted"
        )
        return
    for key, error in report.failures:
        output.say(f"{output.bad('not deleted')}: {key}: {shown(error)}")
    output.say(
        f"{plural(len(report.collected), 'checkpoint')} evicted from tier {shown(plan.tier)}: "
        f"{plural(report.deleted_objects, 'object')}, {size(report.freed_bytes)} freed; "
        f"{plural(report.shared_objects, 'object')} shared with others stay"
    )
