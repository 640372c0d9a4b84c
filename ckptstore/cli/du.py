"""``du``: what takes the space."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run_or_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import divided, from_stdin
from ckptstore.cli.progress import Progress
from ckptstore.cli.table import Column, table, terminal_width
from ckptstore.cli.text import plural, shown, size

if TYPE_CHECKING:
    from ckptstore.inspect.scan import Scan
    from ckptstore.inspect.usage import ComponentUsage, Sizes, Usage


@command(
    "du",
    "ckptstore du                  every run",
    "ckptstore du gpt              its checkpoints and components",
    "ckptstore du gpt@latest",
    "ckptstore du --scan           also what no checkpoint needs",
)
@click.argument("what", nargs=-1, metavar="[RUN | REF | -]...", shell_complete=complete_run_or_ref)
@click.option("--scan", is_flag=True, help="List every object, and tell what no checkpoint needs.")
def du(invocation: Invocation, what: tuple[str, ...], scan: bool) -> None:
    """Says what takes the space: of all runs, or of each RUN or REF by component.

    LOGICAL is the size of all tensors. STORED is that of the objects they need, each counted once: it is
    UNIQUE, what would be freed if this alone were gone, and SHARED, what something else needs, too.
    """
    from ckptstore.inspect.usage import usage

    names = from_stdin(what)
    with invocation.open_store() as store:
        runs, checkpoints = divided(store, names)
        with Progress(invocation, "du", unit="record") as progress:
            found = usage(store, scan=scan, progress=progress)
    if what:
        ids = {checkpoint.id for checkpoint in checkpoints}
        found = dataclasses.replace(
            found,
            runs=tuple(item for item in found.runs if item.run in runs),
            checkpoints=tuple(
                item for item in found.checkpoints if item.run in runs or item.checkpoint in ids
            ),
        )
    if invocation.as_json:
        output.emit_json(found)
        return
    for line in _lines(found, runs) if what else _overview(found):
        output.say(line)
    for line in _rest(found):
        output.say(line)


_SIZES = ("LOGICAL", "STORED", "UNIQUE", "SHARED")


def _columns(*first: Column) -> tuple[Column, ...]:
    return (*first, *(Column(title, right=True) for title in _SIZES))


def _cells(sizes: Sizes) -> tuple[str, ...]:
    numbers = (sizes.logical_bytes, sizes.stored_bytes, sizes.unique_bytes, sizes.shared_bytes)
    return tuple(size(nbytes) for nbytes in numbers)


def _overview(found: Usage) -> Iterator[str]:
    if not found.runs:
        yield f"no checkpoints yet in {shown(found.store)}"
        return
    rows = [(shown(item.run), str(item.checkpoints), *_cells(item.sizes)) for item in found.runs]
    total = found.total
    count = sum(item.checkpoints for item in found.runs)
    rows.append(("(all)", str(count), size(total.logical_bytes), size(total.stored_bytes), "", ""))
    columns = _columns(Column("RUN", flexible=True), Column("CHECKPOINTS", right=True))
    yield from table(columns, rows, limit=terminal_width())


def _lines(found: Usage, runs: list[str]) -> Iterator[str]:
    """Each run with its checkpoints and components; then each checkpoint that was named by itself."""
    columns = _columns(Column("STEP", right=True), Column("STATE", paint=_paint))
    id_column = Column("ID", droppable=True)
    lead = ""
    for item in found.runs:
        title = output.strong(shown(item.run))
        yield f"{lead}{title}: {plural(item.checkpoints, 'checkpoint')}, {_text(item.sizes)}"
        yield ""
        rows = [
            (str(one.step), one.state, *_cells(one.sizes), one.checkpoint)
            for one in found.checkpoints
            if one.run == item.run
        ]
        yield from table((*columns, id_column), rows, limit=terminal_width())
        yield ""
        yield from _components(item.components)
        lead = "\n"
    for one in found.checkpoints:
        if one.run not in runs:
            title = output.strong(f"{shown(one.run)} step {one.step}")
            yield f"{lead}{title} ({one.checkpoint}): {_text(one.sizes)}"
            yield ""
            yield from _components(one.components)
            lead = "\n"


def _paint(text: str) -> str:
    return text if text == "ok" else output.odd(text)


def _text(sizes: Sizes) -> str:
    return (
        f"{size(sizes.logical_bytes)} in {size(sizes.stored_bytes)} stored, "
        f"{size(sizes.unique_bytes)} of it unique"
    )


def _components(parts: tuple[ComponentUsage, ...]) -> list[str]:
    columns = _columns(Column("COMPONENT", flexible=True))
    rows = [
        ("(its tables)" if part.component is None else shown(part.component), *_cells(part.sizes))
        for part in parts
    ]
    return table(columns, rows, limit=terminal_width()) if rows else []


def _rest(found: Usage) -> Iterator[str]:
    if found.record_bytes:
        yield ""
        yield f"commit records: {size(found.record_bytes)}"
    for reason in found.unreadable:
        yield f"{output.bad('unreadable')}: {shown(reason)}"
    if found.scan is not None:
        yield from _scan(found.scan)


def _scan(scan: Scan) -> Iterator[str]:
    yield f"listed: {plural(scan.objects, 'object')}, {size(scan.bytes)}"
    if scan.unaccounted:
        yield (
            f"{output.odd('in no checkpoint')}: {plural(scan.unaccounted, 'object')}, "
            f"{size(scan.unaccounted_bytes)} (a save under way, or what failed or killed saves left)"
        )
        for item in scan.listed:
            yield f"  {shown(item.key)}  {size(item.bytes)}"
        if scan.unaccounted > len(scan.listed):
            yield f"  ... and {scan.unaccounted - len(scan.listed)} more"
    if scan.unfinished:
        yield (
            f"{output.odd('unfinished')}: {plural(scan.unfinished, 'temporary file')}, "
            f"{size(scan.unfinished_bytes)}"
        )
    if scan.missing:
        yield (
            f"{output.bad('missing')}: {plural(scan.missing, 'object')}, {size(scan.missing_bytes)}: "
            "`ckptstore verify` tells whose they are"
        )
    if not (scan.unaccounted or scan.unfinished or scan.missing):
        yield "every object is needed by a checkpoint, and none is missing"
