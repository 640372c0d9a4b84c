"""Commands that copy checkpoints between the tiers of a store: ``replicate``, ``fetch``, ``repair``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_ref, complete_run
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import checkpoint_of, from_stdin
from ckptstore.cli.progress import Progress
from ckptstore.cli.signals import terminated_like_interrupted
from ckptstore.cli.text import duration, plural, shown, size
from ckptstore.errors import CkptstoreError, UsageError
from ckptstore.model.durations import seconds_of

if TYPE_CHECKING:
    from ckptstore.replicate.repair import Repair, RepairReport
    from ckptstore.replicate.reports import Passed, Report, Sent
    from ckptstore.save.work import Progress as BytesDone
    from ckptstore.store import Store
    from ckptstore.tier.tier import Tier

EXIT_PARTLY = 3


def _seconds(_context: click.Context, _parameter: click.Parameter, text: str) -> float:
    return seconds_of(text, "--every")


# --- replicate -------------------------------------------------------------------------------------


@command(
    "replicate",
    "ckptstore replicate                          once, as a cron job",
    "ckptstore replicate --to s3 --run gpt",
    "ckptstore replicate --watch --every 30s      beside a training",
    "ckptstore replicate --dry-run",
)
@click.option("--to", "name", metavar="TIER", help="Only to this tier. Default: all that require copies.")
@click.option("--run", metavar="RUN", shell_complete=complete_run, help="Only checkpoints of this run.")
@click.option("--watch", is_flag=True, help="Go on until interrupted.")
@click.option(
    "--every",
    metavar="TIME",
    default="30s",
    show_default=True,
    callback=_seconds,
    help="With --watch: the pause between rounds.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be copied.")
def replicate(
    invocation: Invocation, name: str | None, run: str | None, watch: bool, every: float, dry_run: bool
) -> None:
    """Copies checkpoints to the colder tiers that lack them, the newest first.

    Only chunks that a tier does not hold travel, each verified before it is put. It may be killed at any
    time: nothing partial is ever seen, and the next call goes on where it stopped. With --watch and --json it
    prints one JSON document a line and round. Ends with 3 when something is still owed, with 4 when a
    checkpoint is too damaged to be copied.
    """
    if watch and dry_run:
        raise UsageError("--watch and --dry-run contradict each other", hint="leave one out")
    with invocation.open_store() as store, terminated_like_interrupted():
        if run is not None:
            store.checkpoint(f"{run}@latest")  # its error names similar runs
        tiers = _destinations(store, name)
        if dry_run:
            _say_owed(invocation, store, tiers, run)
            return
        while True:
            code = _round(invocation, store, tiers, run, watch)
            if not watch:
                break
            time.sleep(every)
    click.get_current_context().exit(code)


def _destinations(store: Store, name: str | None) -> list[Tier]:
    if name is not None:
        tier = store.tier_named(name)
        store.replication.to(tier)  # refuses the first tier
        return [tier]
    tiers = store.replication.required
    if not tiers and not store.unreachable:
        raise UsageError(
            f"no tier of {store.url} requires copies",
            hint='name one with --to, or write replicate = "async" in ckptstore.toml',
        )
    return tiers


def _round(invocation: Invocation, store: Store, tiers: Sequence[Tier], run: str | None, watch: bool) -> int:
    """One round to each tier; the exit code."""
    reports: list[Report] = []
    errors: dict[str, CkptstoreError] = dict(store.unreachable)
    for tier in tiers:
        try:
            reports.append(_copy_to(invocation, store, tier, run))
        except CkptstoreError as error:
            errors[tier.name] = error
    if invocation.as_json:
        document = {
            "store": store.url,
            "tiers": [output.plain(report) for report in reports],
            "errors": {name: reason.message for name, reason in errors.items()},
        }
        _emit(document, one_line=watch)
    else:
        for report in reports:
            if not watch or report.sent or report.failed:
                _print(report)
        for name, reason in errors.items():
            output.say(f"{output.bad('not reached')}: tier {shown(name)}: {shown(reason.message)}")
    output.flush()
    passed = [one for report in reports for one in (*report.failed, *report.skipped)]
    codes = {one.exit_code for one in passed} | {reason.exit_code for reason in errors.values()}
    if not codes - {0} and any(report.owed for report in reports):
        return EXIT_PARTLY  # another process is copying the rest
    return _exit_code(codes - {0}, any(report.sent for report in reports) or len(tiers) > len(errors))


def _copy_to(invocation: Invocation, store: Store, tier: Tier, run: str | None) -> Report:
    copier = store.replication.to(tier)
    with Progress(invocation, f"to {tier.name}") as progress:
        copier.new_progress = lambda: _told(progress)
        return copier.run_once(run)


def _exit_code(codes: set[int], done: bool) -> int:
    """The errors' own when they are of one kind and it is damage, or nothing was done; else "partly done"."""
    if not codes:
        return 0
    (first, *others) = sorted(codes)
    return first if not others and (not done or first == 4) else EXIT_PARTLY


def _print(report: Report) -> None:
    for sent in report.sent:
        _print_sent("copied", sent)
    _print_passed("skipped", report.skipped)
    _print_passed(output.bad("failed"), report.failed)
    total = sum(sent.sent_bytes for sent in report.sent)
    rate = f", {size(int(total / report.seconds))}/s" if total and report.seconds > 0 else ""
    owed = f"; {plural(report.owed, 'checkpoint')} still owed" if report.owed else ""
    output.say(
        f"tier {shown(report.tier)}: {plural(len(report.sent), 'checkpoint')} copied, {size(total)} "
        f"in {duration(report.seconds)}{rate}{owed}"
    )


def _print_sent(what: str, sent: Sent) -> None:
    output.say(
        f"{what} {shown(sent.run)} step {sent.step}: {size(sent.sent_bytes)} sent, "
        f"{size(sent.reused_bytes)} were there"
    )


def _print_passed(what: str, passed: Sequence[Passed]) -> None:
    for one in passed:
        output.say(f"{what} {shown(one.run)} step {one.step}: {shown(one.reason)}")


def _say_owed(invocation: Invocation, store: Store, tiers: Sequence[Tier], run: str | None) -> None:
    names = {tier.uuid: tier.name for tier in store.tiers}
    documents: list[dict[str, Any]] = []
    for tier in tiers:
        for name, _, owed in store.replication.to(tier).owing(run):
            entry = owed.entry
            documents.append(
                {
                    "tier": tier.name,
                    "run": name,
                    "step": entry.step,
                    "id": entry.checkpoint,
                    "from": names[owed.source],
                    "skipped": owed.why or None,
                }
            )
    if invocation.as_json:
        output.emit_json({"store": store.url, "owed": documents})
        return
    for owes in documents:
        what = f"skips, {shown(owes['skipped'])}:" if owes["skipped"] else "would copy"
        output.say(f"{what} {shown(owes['run'])} step {owes['step']} from {owes['from']} to {owes['tier']}")
    due = sum(not owes["skipped"] for owes in documents)
    output.say(f"{plural(due, 'checkpoint')} owed")


# --- fetch -----------------------------------------------------------------------------------------


@command(
    "fetch",
    "ckptstore fetch gpt@latest           to the first tier, for a restore that is near",
    "ckptstore fetch gpt@12000 gpt@min:loss",
)
@click.argument("refs", nargs=-1, required=True, metavar="[REF | -]...", shell_complete=complete_ref)
def fetch(invocation: Invocation, refs: tuple[str, ...]) -> None:
    """Copies checkpoints to the first tier, the hottest, from a colder one.

    One that is there already, and good, is left as it is; a damaged one is replaced. Each chunk is read once,
    and verified.
    """
    from ckptstore.replicate import fetch as fetching

    documents = []
    with invocation.open_store() as store:
        _ = store.hottest  # not to the next one, if it is missing
        found = [checkpoint_of(store, ref) for ref in from_stdin(refs)]
        for checkpoint in found:
            with Progress(invocation, f"fetch {checkpoint.run} step {checkpoint.step}") as progress:
                key = store.run(checkpoint.run).key
                copied = fetching.fetch(store, key, checkpoint.entry, _told(progress))
            documents.append(
                {
                    "run": checkpoint.run,
                    "step": checkpoint.step,
                    "id": checkpoint.id,
                    "fetched": copied is not None,
                    "sent_bytes": 0 if copied is None else copied.sent_bytes,
                    "reused_bytes": 0 if copied is None else copied.reused_bytes,
                    "seconds": 0.0 if copied is None else copied.seconds,
                }
            )
            if invocation.as_json:
                continue
            name = f"{shown(checkpoint.run)} step {checkpoint.step}"
            if copied is None:
                output.say(f"{name} is in tier {store.tier.name} already")
            else:
                output.say(
                    f"fetched {name} to tier {store.tier.name}: {size(copied.sent_bytes)} "
                    f"in {duration(copied.seconds)}, {size(copied.reused_bytes)} were there"
                )
        if invocation.as_json:
            output.emit_json({"store": store.url, "tier": store.tier.name, "checkpoints": documents})


# --- repair ----------------------------------------------------------------------------------------


@command(
    "repair",
    "ckptstore repair --all               whatever is marked damaged, in every tier",
    "ckptstore repair gpt@12000 --tier s3",
    "ckptstore repair --all --dry-run",
)
@click.argument("refs", nargs=-1, metavar="[REF | -]...", shell_complete=complete_ref)
@click.option("--all", "everything", is_flag=True, help="All that is marked damaged.")
@click.option("--tier", "name", metavar="TIER", help="Only in this tier.")
@click.option("--dry-run", is_flag=True, help="Only say what would be repaired, and from where.")
def repair(
    invocation: Invocation, refs: tuple[str, ...], everything: bool, name: str | None, dry_run: bool
) -> None:
    """Makes damaged checkpoints good again, from their copies in other tiers or equal chunks in the same one.

    `ckptstore verify` finds and marks damage. A repaired checkpoint gets a new record; what was bad is never
    used again, and nothing is deleted. Ends with 4 when something could not be repaired.
    """
    if everything == bool(refs):
        raise UsageError("repair wants REFs, or --all", hint="`ckptstore ls` shows what is damaged")
    code = 0
    documents: list[dict[str, Any]] = []
    with invocation.open_store() as store:
        ids = None if everything else {checkpoint_of(store, ref).id for ref in from_stdin(refs)}
        for tier in store.tiers if name is None else [store.tier_named(name)]:
            if dry_run:
                plans = store.replication.plan_repairs(tier, ids)
                documents += [_plan_json(tier, plan) for plan in plans]
                if not invocation.as_json:
                    _print_plans(tier, plans)
                continue
            with Progress(invocation, f"repair {tier.name}") as progress:
                new_progress = lambda progress=progress: _told(progress)  # noqa: E731
                report = store.replication.repair(tier, ids, new_progress)
            codes = {one.exit_code for one in report.failed}
            code = max(code, _exit_code(codes, bool(report.repaired)))
            documents.append(output.plain(report))
            if not invocation.as_json:
                _print_repairs(report)
        if invocation.as_json:
            output.emit_json({"store": store.url, "plan" if dry_run else "tiers": documents})
    click.get_current_context().exit(code)


def _plan_json(tier: Tier, plan: Repair) -> dict[str, Any]:
    return {
        "tier": tier.name,
        "run": plan.run,
        "step": plan.step,
        "id": plan.checkpoint,
        "reason": plan.reason,
        "from": [copy.tier.name for copy in plan.sources],
    }


def _print_plans(tier: Tier, plans: Sequence[Repair]) -> None:
    for plan in plans:
        names = ", ".join(copy.tier.name for copy in plan.sources[:-1]) or "what is good in this tier"
        output.say(
            f"tier {tier.name}: would repair {shown(plan.run)} step {plan.step} from {names}: "
            f"{shown(plan.reason)}"
        )
    if not plans:
        output.say(f"tier {tier.name}: nothing is marked damaged")


def _print_repairs(report: RepairReport) -> None:
    for sent in report.repaired:
        _print_sent("repaired", sent)
    _print_passed(output.bad("not repaired"), report.failed)
    more = f"; {plural(report.marked, 'more checkpoint')} shared what was bad" if report.marked else ""
    output.say(
        f"tier {report.tier}: {plural(len(report.repaired), 'checkpoint')} repaired, "
        f"{len(report.failed)} not{more}"
    )


# --- helpers ---------------------------------------------------------------------------------------


def _told(progress: Progress) -> BytesDone:
    """Counts bytes, and draws them."""
    from ckptstore.save.work import Progress as BytesDone

    class Told(BytesDone):
        def add(self, nbytes: int) -> None:
            super().add(nbytes)
            progress(self.done_bytes, self.total_bytes)

    return Told()


def _emit(document: dict[str, Any], *, one_line: bool) -> None:
    if one_line:
        output.say_json_text(json.dumps(output.plain(document), allow_nan=False))
    else:
        output.emit_json(document)
