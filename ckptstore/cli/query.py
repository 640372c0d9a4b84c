"""``query``: any question to the manifest, in SQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import click

from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import STDIN, stdin_text
from ckptstore.cli.pairs import guessed_pair, once, pair
from ckptstore.cli.table import Column, table, terminal_width
from ckptstore.errors import UsageError

FORMATS = ("table", "json", "csv", "nl")


@command(
    "query",
    'ckptstore query "select run, step, metrics from v_checkpoints where is_latest"',
    'ckptstore query "select step, digest from v_tensors where run = :run and tensor = :t" \\',
    "                --param run=gpt --param t=model.head.weight --csv",
    "ckptstore query - < question.sql",
    'ckptstore query "select checkpoint from v_checkpoints where verified_at is null" \\',
    "                --csv --no-header | ckptstore verify -",
)
@click.argument("sql")
@click.option(
    "-p",
    "--param",
    "params",
    multiple=True,
    type=guessed_pair,
    metavar="NAME=VALUE",
    help="For :NAME in the query. A value written as a number is passed as one.",
)
@click.option(
    "--text-param",
    "texts",
    multiple=True,
    type=pair,
    metavar="NAME=VALUE",
    help="As --param, but always passed as text.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="How rows are written; nl is JSON, an object per line. [default: table, with --json json]",
)
@click.option("--nl", "as_nl", is_flag=True, help="The same as --format nl.")
@click.option("--csv", "as_csv", is_flag=True, help="The same as --format csv.")
@click.option("--no-header", is_flag=True, help="Leave out the heading of a table or of CSV.")
@click.option("-l", "--long", is_flag=True, help="Whole values, however narrow the terminal is.")
@click.option(
    "--limit-seconds",
    type=click.IntRange(1, 3600),
    default=8,
    show_default=True,
    metavar="N",
    help="Stop after that. While a query runs no save can update the manifest.",
)
def query(
    invocation: Invocation,
    *,
    sql: str,
    params: tuple[tuple[str, str | int | float], ...],
    texts: tuple[tuple[str, str], ...],
    form: str | None,
    as_nl: bool,
    as_csv: bool,
    no_header: bool,
    long: bool,
    limit_seconds: int,
) -> None:
    """Asks the manifest a question in SQL; with - the question comes on stdin. It can only read.

    Begin with the views: v_checkpoints, v_tensors, v_reuse, v_metrics, v_tiers, v_retention.
    `ckptstore query "pragma table_info(v_checkpoints)"` names the columns of one; docs/manifest.md describes
    them all, and docs/questions.md has worked questions.
    """
    from ckptstore.inspect.formats import Format, lines
    from ckptstore.inspect.query import query as ask

    assert set(FORMATS) == set(get_args(Format))
    chosen = _format(invocation, form, as_nl, as_csv)
    if sql == STDIN:
        sql = stdin_text()
    values = once([*params, *texts], "--param")
    with invocation.open_store() as store:
        result = ask(store, sql, values, seconds=limit_seconds)
    match chosen:
        case "table":
            cells = _table(result.columns, result.rows, long)
            for line in cells[1:] if no_header else cells:
                output.say(line)
        case "csv":
            found = lines(result, "csv")
            if no_header:
                next(found)
            for line in found:
                output.say(line)
        case "json":
            for line in lines(result, "json"):
                output.say_json_text(line)
        case _:
            for line in lines(result, "nl"):
                output.say_json_text(line)


def _format(invocation: Invocation, form: str | None, as_nl: bool, as_csv: bool) -> str:
    wanted = {form} if form is not None else set()
    wanted |= {"nl"} if as_nl else set()
    wanted |= {"csv"} if as_csv else set()
    if invocation.as_json and not as_nl and form != "nl":
        wanted |= {"json"}
    if len(wanted) > 1:
        raise UsageError(f"the rows are wanted as {' and as '.join(sorted(wanted))}", hint="choose one")
    return wanted.pop() if wanted else "table"


def _table(columns: tuple[str, ...], rows: Iterator[tuple[object, ...]], long: bool) -> list[str]:
    from ckptstore.inspect.formats import cell

    kept = list(rows)
    shape = [
        Column(cell(name), right=_is_numbers(kept, index), flexible=True, always=True)
        for index, name in enumerate(columns)
    ]
    cells = [[cell(value) for value in row] for row in kept]
    return table(shape, cells, limit=None if long else terminal_width())


def _is_numbers(rows: list[tuple[object, ...]], index: int) -> bool:
    return any(row[index] is not None for row in rows) and all(
        row[index] is None or isinstance(row[index], (int, float)) for row in rows
    )
