"""``verify``: re-reads and re-hashes what is stored."""

from __future__ import annotations

import re

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run_or_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import from_stdin
from ckptstore.cli.progress import Progress
from ckptstore.cli.text import duration, parse_size, plural, shown, size
from ckptstore.errors import DamageError
from ckptstore.verify import VerifyReport


def parse_share(text: str) -> tuple[int, int]:
    """``n/t``, the n-th of t parts, as (n, t).

    Raises:
        click.BadParameter: says how a share is written.
    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{text!r} is not a share; write it like 3/30, with 1 <= n <= t")
    return int(found[1]), int(found[2])


@command(
    "verify",
    "ckptstore verify                     everything",
    "ckptstore verify gpt                 one run",
    "ckptstore verify --share 3/30        a thirtieth a day: all of it in a month",
    "ckptstore verify --max-bytes 100GiB",
    "ckptstore verify --tier s3           what lies there, instead of the first tier",
)
@click.argument("what", nargs=-1, metavar="[RUN | REF | -]...", shell_complete=complete_run_or_ref)
@click.option("--share", type=parse_share, metavar="N/T", help="Only the N-th of T equal parts of the data.")
@click.option(
    "--max-bytes", type=parse_size, metavar="SIZE", help="Read about that much; the longest unverified first."
)
@click.option("--tier", metavar="NAME", help="Read this tier; the hottest unless given.")
def verify(
    invocation: Invocation,
    what: tuple[str, ...],
    share: tuple[int, int] | None,
    max_bytes: int | None,
    tier: str | None,
) -> None:
    """Reads checkpoints back and compares every byte with its hash. All of the store, without names.

    Each checkpoint that holds something bad is marked damaged and is then never restored unasked; the others
    are marked verified. Ends with 4 when damage was found.
    """
    names = from_stdin(what)
    with invocation.open_store() as store:
        known = {row.run for row in store.runs()} if names else set()
        with Progress(invocation, "verify") as progress:
            if what and not names:
                report = VerifyReport(0, 0, 0, 0, 0, 0.0, (), True)  # nothing came on stdin: not everything
            else:
                report = store.verify(
                    runs=[name for name in names if name in known],
                    refs=[name for name in names if name not in known],
                    tier=tier,
                    share=share,
                    max_bytes=max_bytes,
                    progress=progress,
                )
        if invocation.as_json:
            output.emit_json({"store": store.url, "clean": not report.problems, **output.plain(report)})
        else:
            _print(report)
    if report.problems:
        click.get_current_context().exit(DamageError.exit_code)


def _print(report: VerifyReport) -> None:
    for problem in report.problems:
        output.say(
            f"{output.bad('damaged')}: run {shown(problem.run)} step {problem.step}: "
            f"{shown(problem.key)}: {shown(problem.reason)}"
        )
    rate = f", {size(int(report.bytes / report.seconds))}/s" if report.seconds > 0 else ""
    output.say(
        f"{plural(report.checkpoints, 'checkpoint')}, {plural(report.objects, 'object')}, "
        f"{size(report.bytes)} in {duration(report.seconds)}{rate}"
    )
    if report.problems:
        hurt = len({(problem.run, problem.checkpoint) for problem in report.problems})
        marks = "marked damaged" if report.marked else "not marked, for lack of write access"
        output.say(f"{output.bad('damage found')} in {plural(hurt, 'checkpoint')}, {marks}")
        return
    partly = report.checkpoints - report.complete
    rest = f"; {plural(partly, 'checkpoint')} read in part only" if partly else ""
    output.say(f"clean: {plural(report.complete, 'checkpoint')} verified in full{rest}")
