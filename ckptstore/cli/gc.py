"""``gc``: deletes what retention does not keep, and what crashed attempts left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command, complete_path
from ckptstore.cli.text import duration, plural, shown, size
from ckptstore.errors import CkptstoreError, UsageError

if TYPE_CHECKING:
    from ckptstore.gc.rounds import RoundReport
    from ckptstore.gc.strays import Cleared
    from ckptstore.store import Store

PARTLY = 3
"""Exit code when something could not be deleted, or time was up."""

ALL = "all"


@command(
    "gc",
    "ckptstore gc --dry-run                        what would go, and why the rest stays",
    "ckptstore gc                                  for cron: quiet when all is well",
    "ckptstore gc --grace 2d --max-delete 30%      nothing at once, and never too much",
    "ckptstore gc --tier s3 --time-budget 10m -v",
    "ckptstore gc --give-up 01ARZ3NDEKTSV4RRFFQ69G5FAV-12000-1",
)
@click.option("--tier", default=ALL, metavar="NAME|all", help="On this tier; on all unless given.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and why the rest stays; write nothing.")
@click.option(
    "--max-delete",
    metavar="30%|BYTES",
    help="Delete nothing if more than this of what all checkpoints of a tier need would go.",
)
@click.option("--time-budget", metavar="10min", help="Stop deleting after this; the next round goes on.")
@click.option("--grace", metavar="2d", default="0", help="Mark as expiring first, and delete after this.")
@click.option("--run", "runs", multiple=True, metavar="PATTERN", help="Of these runs only. Repeatable.")
@click.option(
    "--give-up",
    multiple=True,
    metavar="ATTEMPT",
    help="Nobody waits for this attempt any more: end it, or an unreadable record. Repeatable.",
)
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path),
    metavar="FILE.prom",
    shell_complete=complete_path,
    help="Replace this file, for node_exporter's textfile collector, also after a failure.",
)
def gc(
    invocation: Invocation,
    *,
    tier: str,
    dry_run: bool,
    max_delete: str | None,
    time_budget: str | None,
    grace: str,
    runs: tuple[str, ...],
    give_up: tuple[str, ...],
    metrics_file: Path | None,
) -> None:
    """Deletes what no retention rule keeps, and what crashed attempts left. Safe beside trainings.

    Prints nothing when all is well; with -v a line per tier. What it cannot read, or is listed short, ends
    it before anything is deleted. Ends with 3 when some objects could not be deleted or time was up, with
    11 when it runs already, with 17 when a guard refuses.
    """
    from ckptstore.metrics.textfile import check_path

    target = None if metrics_file is None else check_path(metrics_file)
    reports: dict[str, RoundReport] = {}
    errors: dict[str, CkptstoreError] = {}
    with invocation.open_store() as store:
        names = [each.name for each in store.tiers] + list(store.unreachable) if tier == ALL else [tier]
        if give_up and len(names) > 1:
            raise UsageError("an attempt is given up in one tier", hint="say in which: --tier NAME")
        for name in names:
            try:
                (reports[name],) = store.gc(
                    name,
                    runs=runs,
                    grace=_spelled(grace),
                    max_delete=max_delete,
                    time_budget=None if time_budget is None else _spelled(time_budget),
                    give_up=give_up,
                    dry_run=dry_run,
                )
            except CkptstoreError as error:
                errors[name] = error
        if target is not None:
            _write_metrics(target, reports, errors)
        if len(names) == 1 and errors:
            raise errors[names[0]]
        _tell(invocation, store, reports, errors)
    code = next((error.exit_code for error in errors.values()), 0)
    code = code or (PARTLY if any(map(_is_partial, reports.values())) else 0)
    if code:
        click.get_current_context().exit(code)


def _spelled(text: str) -> str:
    """A length of time as the library takes it: there "m" alone could also be months."""
    return f"{text}in" if text[:-1].isdecimal() and text.endswith("m") else text


def _is_partial(report: RoundReport) -> bool:
    cleared = report.cleared
    return bool(report.failures or cleared.failures or report.is_cut_short or cleared.is_cut_short)


def _write_metrics(
    path: Path, reports: Mapping[str, RoundReport], errors: Mapping[str, CkptstoreError]
) -> None:
    from ckptstore.metrics.exposition import exposition
    from ckptstore.metrics.rounds import families
    from ckptstore.metrics.textfile import write_textfile

    codes = {name: PARTLY if _is_partial(report) else 0 for name, report in reports.items()}
    codes |= {name: error.exit_code for name, error in errors.items()}
    write_textfile(path, exposition(families(reports, codes, time.time())))


def _tell(
    invocation: Invocation,
    store: Store,
    reports: Mapping[str, RoundReport],
    errors: Mapping[str, CkptstoreError],
) -> None:
    if invocation.as_json:
        failed = {
            name: {"kind": error.kind, "message": error.message, "hint": error.hint}
            for name, error in errors.items()
        }
        output.emit_json(
            {"store": store.url, "rounds": [output.plain(r) for r in reports.values()], "errors": failed}
        )
        return
    for report in reports.values():
        if report.dry_run:
            _say_fates(report)
        for key, why in (*report.failures, *report.cleared.failures):
            output.say(f"{output.bad('not deleted')}: {key}: {shown(why)}")
        if report.dry_run or invocation.verbosity:
            output.say(_line(report))
    for name, error in errors.items():
        output.complain(f"tier {name}: {error.message}", error.hint)


def _say_fates(report: RoundReport) -> None:
    for fate in report.fates:
        name = f"{shown(fate.run)}@{fate.step}"
        word = {"keep": "keep", "expire": "later", "delete": "delete"}[fate.outcome]
        alone = f", {size(fate.alone_bytes)} alone" if fate.alone_bytes is not None else ""
        output.say(f"{word:<7} {name}{alone}: {shown('; '.join(fate.reasons))}")
    for trim in report.trims:
        lost = f"{', '.join(map(shown, trim.components))}, {size(trim.size_bytes)}"
        output.say(f"trim    {shown(trim.run)}@{trim.step}, {lost}: not kept by {shown(trim.reason)}")
    for left in report.cleared.left:
        what = f"{plural(left.objects, 'object')}, {size(left.size_bytes)}"
        output.say(f"left    attempt {left.attempt}, {what}: {shown(left.why)}")


def _line(report: RoundReport) -> str:
    """All of a round on one line."""
    if report.dry_run:
        going = sum(fate.outcome == "delete" for fate in report.fates)
        of_all = f"of {plural(len(report.fates), 'checkpoint')} {going} would be deleted"
        parts = [f"{of_all}, {size(report.freed_bytes)} freed"]
    else:
        trimmed = {(trim.run_key, trim.attempt) for trim in report.trims}  # their former records went
        count = len(set(report.collected) - trimmed)
        what = f"{plural(count, 'checkpoint')}, {plural(report.deleted_objects, 'object')}"
        parts = [f"{what} deleted, {size(report.freed_bytes)} freed"]
    unfreed = report.unfreed_bytes + report.cleared.unfreed_bytes
    parts += [f"{size(unfreed)} not freed: the bucket keeps versions"] if unfreed else []
    parts += [f"{plural(len(report.trims), 'checkpoint')} trimmed"] if report.trims else []
    expiring = sum(fate.outcome == "expire" for fate in report.fates)
    parts += [f"{expiring} expiring"] if expiring else []
    parts += [f"{len(report.stays)} held"] if report.stays else []
    parts += _of_attempts(report.cleared)
    parts += ["time was up"] if report.is_cut_short or report.cleared.is_cut_short else []
    parts += ["no run has a retention policy"] if report.runs and not report.runs_with_policy else []
    parts += ["nothing was written"] if report.dry_run else [f"in {duration(report.seconds)}"]
    return f"tier {shown(report.tier)}: {'; '.join(parts)}"


def _of_attempts(cleared: Cleared) -> list[str]:
    """What ended attempts had left, where there was something."""
    parts = []
    if cleared.objects:
        what = plural(cleared.objects, "object")
        parts.append(f"{what} ({size(cleared.object_bytes)}) of attempts that had ended")
    documents = cleared.intents + cleared.parts + cleared.temporaries
    if documents:
        parts.append(f"{plural(documents, 'document')} and files of theirs")
    if cleared.left:
        parts.append(f"{plural(len(cleared.left), 'attempt')} left alone")
    return parts
