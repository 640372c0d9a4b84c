"""``ls``: the runs of a store, or the checkpoints of some of them. Reads the manifest only."""

from __future__ import annotations

import dataclasses

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run_or_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import from_stdin
from ckptstore.cli.rows import checkpoint_json, run_json
from ckptstore.cli.table import Column, table, terminal_width
from ckptstore.cli.text import ago, metrics, plural, shown, size
from ckptstore.errors import NotFoundError, UsageError
from ckptstore.manifest import CheckpointRow, Manifest, RunRow
from ckptstore.model.ids import Attempt
from ckptstore.store import Store


@dataclasses.dataclass(frozen=True, slots=True)
class Unreadable:
    """A commit record that is there and cannot be read."""

    run: str
    step: int
    attempt: str
    reason: str


@command(
    "ls",
    "ckptstore ls                     the runs",
    "ckptstore ls gpt                 the checkpoints of run gpt",
    "ckptstore ls gpt -n 5            its newest five",
    "ckptstore ls gpt@latest --json   one checkpoint, for programs",
)
@click.argument("what", nargs=-1, metavar="[RUN | REF | -]...", shell_complete=complete_run_or_ref)
@click.option("-a", "--all", "everything", is_flag=True, help="The checkpoints of all runs.")
@click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N", help="The newest N of each run.")
@click.option("-l", "--long", is_flag=True, help="All columns, however narrow the terminal is.")
def ls(
    invocation: Invocation, what: tuple[str, ...], everything: bool, limit: int | None, long: bool
) -> None:
    """Lists the runs of a store, or the checkpoints of each RUN, newest last.

    The latest checkpoint, which `restore` would take, is marked with *. NEW is what the save wrote; the rest
    of SIZE was there before and is shared. Damaged and invalid checkpoints say why.
    """
    if everything and what:
        raise UsageError("--all takes no names", hint="leave out either")
    names = from_stdin(what) if what else None
    with invocation.open_store() as store:
        if not what and not everything:
            rows = store.runs()
            if invocation.as_json:
                output.emit_json({"store": store.url, "runs": [run_json(row) for row in rows]})
                return
            lines = run_lines(store, rows, long=long)
        elif invocation.as_json:
            found, unreadable = _checkpoints(store, names, limit)
            checkpoints = [checkpoint_json(row) for row in found]
            output.emit_json({"store": store.url, "checkpoints": checkpoints, "unreadable": unreadable})
            return
        else:
            lines = checkpoint_lines(store, names, limit=limit, long=long)
        for line in lines:
            output.say(line)


# --- which ---------------------------------------------------------------------------------------------


def _checkpoints(
    store: Store, what: tuple[str, ...] | None, limit: int | None
) -> tuple[list[CheckpointRow], list[Unreadable]]:
    known = {row.run: row for row in store.runs()}
    rows: list[CheckpointRow] = []
    unreadable: list[Unreadable] = []
    for name in sorted(known) if what is None else what:
        if name not in known:
            rows.append(_one(store, name))
            continue
        key = known[name].run_key

        def newest(manifest: Manifest, key: str = key) -> list[CheckpointRow]:
            return manifest.checkpoints(key, newest_first=True, limit=limit)

        rows += reversed(store.catalog.ask(newest))
        for attempt, error in store.catalog.unreadable.get(key, {}).items():
            unreadable.append(Unreadable(name, Attempt.parse(attempt).step, attempt, error.message))
    return rows, unreadable


def _one(store: Store, ref: str) -> CheckpointRow:
    """The row of a REF."""
    if "@" not in ref:
        try:
            found = store.checkpoint(ref)
        except NotFoundError:
            store.run(ref).find("latest")  # its error names similar runs
            raise
    else:
        found = store.checkpoint(ref)
    key = store.run(found.run).key
    return store.catalog.ask(lambda m: m.checkpoints(key, checkpoint=found.id))[0]


# --- runs ----------------------------------------------------------------------------------------------

_RUN_COLUMNS = (
    Column("RUN", flexible=True),
    Column("CHECKPOINTS", right=True),
    Column("LATEST", right=True),
    Column("SAVED", right=True),
    Column("SIZE", right=True),
    Column("STORED", right=True),
    Column("SESSIONS", right=True, droppable=True),
    Column("STATE", paint=lambda text: text if text == "ok" else output.odd(text)),
)


def run_lines(store: Store, rows: list[RunRow], *, long: bool = False) -> list[str]:
    """The table of runs."""
    if not rows:
        return [f"no runs yet in {shown(store.url)}"]
    now = store.tier.environment.now()
    unread = store.catalog.unreadable
    cells = [_run_cells(row, len(unread.get(row.run_key, {})), now) for row in rows]
    return table(_RUN_COLUMNS, cells, limit=None if long else terminal_width())


def _run_cells(row: RunRow, unreadable: int, now: float) -> tuple[str, ...]:
    state = "ok"
    lost = row.checkpoints - row.restorable
    if row.checkpoints == 0 and not unreadable:
        state = "no checkpoints yet"
    elif row.restorable == 0:
        state = "none can be restored"
    elif lost or unreadable:
        state = f"{lost + unreadable} of {row.checkpoints + unreadable} cannot be restored"
    return (
        shown(row.run),
        str(row.checkpoints),
        "-" if row.latest_step is None else f"step {row.latest_step}",
        ago(row.latest_created_at, now),
        size(row.latest_logical_bytes),
        size(row.new_bytes),
        str(row.sessions),
        state,
    )


# --- checkpoints ---------------------------------------------------------------------------------------


def _paint_state(text: str) -> str:
    if text in ("damaged", "unreadable"):
        return output.bad(text)
    return text if text == "ok" else output.odd(text)


_COLUMNS = (
    Column(""),
    Column("RUN", flexible=True),
    Column("STEP", right=True),
    Column("SAVED", right=True),
    Column("STATE", paint=_paint_state),
    Column("SIZE", right=True),
    Column("NEW", right=True),
    Column("METRICS", flexible=True),
    Column("TAGS", flexible=True),
    Column("PINS", right=True),
    Column("VERIFIED", right=True, droppable=True),
    Column("ID", droppable=True),
    Column("REASON", flexible=True),
)


def checkpoint_lines(
    store: Store, what: tuple[str, ...] | None, *, limit: int | None = None, long: bool = False
) -> list[str]:
    """The table of checkpoints of runs and REFs; None: of all runs."""
    rows, unreadable = _checkpoints(store, what, limit)
    now = store.tier.environment.now()
    if not rows and not unreadable:
        return [] if what == () else ["no checkpoints yet"]
    runs = {row.run for row in rows} | {item.run for item in unreadable}
    cells = [_cells(row, now, with_run=len(runs) > 1) for row in rows]
    for item in unreadable:
        run = shown(item.run) if len(runs) > 1 else ""
        cells.append(
            (
                "",
                run,
                str(item.step),
                "",
                "unreadable",
                "",
                "",
                "",
                "",
                "",
                "",
                item.attempt,
                shown(item.reason),
            )
        )
    lines = table(_COLUMNS, cells, limit=None if long else terminal_width())
    logical, new = sum(row.logical_bytes for row in rows), sum(row.new_bytes for row in rows)
    if len(rows) > 1:
        lines.append(
            f"{plural(len(rows), 'checkpoint')}: {size(logical)} in {size(new)} of new data, "
            f"{size(logical - new)} reused"
        )
    return lines


def _cells(row: CheckpointRow, now: float, *, with_run: bool) -> tuple[str, ...]:
    reason = row.damaged_reason or row.invalid_reason or ""
    return (
        "*" if row.is_latest else "",
        shown(row.run) if with_run else "",
        str(row.step),
        ago(row.created_at, now),
        row.state,
        size(row.logical_bytes),
        size(row.new_bytes),
        metrics(row.metrics),
        " ".join(shown(tag) for tag in row.tags),
        str(row.pins) if row.pins else "",
        "" if row.verified_at is None else ago(row.verified_at, now),
        row.checkpoint,
        shown(reason),
    )
