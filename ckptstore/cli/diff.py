"""``diff``: what differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.progress import Progress
from ckptstore.cli.table import Column, table, terminal_width
from ckptstore.cli.text import number, plural, shape_text, shown, size

if TYPE_CHECKING:
    from ckptstore.inspect.diff import Diff, Side, TensorDiff, TensorInfo
    from ckptstore.inspect.plain import ValueChange

_MARKS = {"added": "+", "removed": "-", "changed": "~", "undetermined": "?"}


@command(
    "diff",
    "ckptstore diff gpt@1000 gpt@2000",
    'ckptstore diff gpt@latest tuned@latest --only "model.*" --values',
    "ckptstore diff gpt@latest gpt@paper --exit-code -q",
)
@click.argument("a", metavar="A", shell_complete=complete_ref)
@click.argument("b", metavar="B", shell_complete=complete_ref)
@click.option("--only", multiple=True, metavar="GLOB", help='Compare only these names, like "model.*".')
@click.option(
    "--values", "with_values", is_flag=True, help="Read the tensors that differ, and say by how much."
)
@click.option("--exit-code", is_flag=True, help="End with 1 when they differ.")
def diff(
    invocation: Invocation, a: str, b: str, only: tuple[str, ...], with_values: bool, exit_code: bool
) -> None:
    """Says which tensors and values of checkpoint B are not as in A.

    Tensors are compared by their digests: nothing is read, however large they are. Those marked ? were cut
    otherwise when they were saved (another number of ranks), and only --values can tell. With --quiet and
    --exit-code nothing is printed.
    """
    from ckptstore.inspect.diff import diff as compare

    with invocation.open_store() as store:
        old, new = store.checkpoint(a), store.checkpoint(b)
        with Progress(invocation, "diff") as progress:
            found = compare(old, new, only=only or None, values=with_values, progress=progress)
    if invocation.as_json:
        output.emit_json({"store": store.url, "identical": found.identical, **output.plain(found)})
    elif not (invocation.quiet and exit_code):
        for line in _lines(found, with_values):
            output.say(line)
    if exit_code and not found.identical:
        click.get_current_context().exit(1)


def _lines(found: Diff, with_values: bool) -> Iterator[str]:
    yield f"A  {_side(found.a)}"
    yield f"B  {_side(found.b)}"
    if found.tensors:
        yield ""
        yield from _tensor_table(found.tensors)
    measured = [item for item in found.tensors if item.values is not None]
    if measured:
        yield ""
        yield from _number_table(measured)
    if found.values:
        yield ""
        yield from _value_table(found.values)
        if found.value_changes > len(found.values):
            yield f"... and {found.value_changes - len(found.values)} more values"
    yield ""
    yield from _summary(found)
    if not with_values and found.of("undetermined"):
        yield "those marked ? are cut otherwise on both sides: --values reads them and can tell"


def _side(side: Side) -> str:
    state = "" if side.state == "ok" else f", {output.odd(side.state)}"
    return (
        f"{shown(side.run)} step {side.step} ({side.checkpoint}): "
        f"{plural(side.tensors, 'tensor')}, {size(side.logical_bytes)}{state}"
    )


def _summary(found: Diff) -> Iterator[str]:
    same = f"{found.unchanged} the same ({size(found.unchanged_bytes)})"
    if found.identical:
        yield f"identical: {plural(found.unchanged, 'tensor')}, {size(found.unchanged_bytes)}"
        return
    counts = {change: sum(item.change == change for item in found.tensors) for change in _MARKS}
    parts = [f"{count} {change}" for change, count in counts.items() if count]
    tied = sum(item.new is not None and item.new.alias_of is not None for item in found.tensors)
    if tied:
        parts[-1] += f" ({tied} of these tied to another)"
    if parts:
        yield f"tensors: {', '.join(parts)}, {same}; {size(found.changed_bytes)} of B are not in A"
    elif found.unchanged:
        yield f"tensors: {same}"
    if found.value_changes:
        yield f"values: {found.value_changes} not the same"


# --- tables ------------------------------------------------------------------------------------------


def _tensor_table(tensors: tuple[TensorDiff, ...]) -> list[str]:
    columns = (
        Column(""),
        Column("TENSOR", flexible=True),
        Column("CHANGE"),
        Column("DTYPE"),
        Column("SHAPE"),
        Column("SIZE", right=True),
        Column("CHANGED", right=True),
        Column("TIED TO", flexible=True),
    )
    return table(columns, [_tensor_cells(item) for item in tensors], limit=terminal_width())


def _tensor_cells(item: TensorDiff) -> tuple[str, ...]:
    old, new = item.old, item.new
    one = new or old
    assert one is not None
    return (
        _MARKS[item.change],
        shown(item.name),
        ", ".join(item.what) if item.what else item.change,
        _both(old, new, lambda info: info.dtype),
        _both(old, new, lambda info: shape_text(info.shape)),
        size(one.bytes),
        "" if item.change == "removed" else "?" if item.changed_bytes is None else size(item.changed_bytes),
        "" if one.alias_of is None else shown(one.alias_of),
    )


def _both(old: TensorInfo | None, new: TensorInfo | None, text: Any) -> str:
    """What they have, or from what to what."""
    texts = [text(info) for info in (old, new) if info is not None]
    return " > ".join(dict.fromkeys(texts))


def _number_table(tensors: list[TensorDiff]) -> list[str]:
    columns = (
        Column("TENSOR", flexible=True),
        *(
            Column(title, right=True)
            for title in ("DIFFERING", "OF", "MAX DIFF", "MEAN DIFF", "NORM A", "NORM B", "NAN", "INF")
        ),
    )
    cells = []
    for item in tensors:
        values = item.values
        assert values is not None
        old, new = values.old, values.new
        cells.append(
            (
                shown(item.name),
                "-" if values.differing is None else str(values.differing),
                str(values.elements),
                "-" if values.max_abs_diff is None else number(values.max_abs_diff),
                "-" if values.mean_abs_diff is None else number(values.mean_abs_diff),
                number(old.l2),
                number(new.l2),
                _counts(old.nan, new.nan),
                _counts(old.inf, new.inf),
            )
        )
    return table(columns, cells, limit=terminal_width())


def _counts(old: int, new: int) -> str:
    return "" if not old and not new else str(old) if old == new else f"{old} > {new}"


def _value_table(changes: tuple[ValueChange, ...]) -> list[str]:
    columns = (
        Column(""),
        Column("VALUE", flexible=True),
        Column("A", flexible=True, always=True),
        Column("B", flexible=True, always=True),
    )
    cells = [
        (_MARKS[item.change], shown(item.path), shown(item.old or ""), shown(item.new or ""))
        for item in changes
    ]
    return table(columns, cells, limit=terminal_width())
