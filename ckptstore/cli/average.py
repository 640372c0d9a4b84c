"""``average``: the element-wise mean of checkpoints, saved as a checkpoint."""

from __future__ import annotations

import click

from ckptstore import refs
from ckptstore.cli import output
from ckptstore.cli.complete import complete_new_ref, complete_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import checkpoint_of, from_stdin, row_of
from ckptstore.cli.pairs import number_pair, once, pair
from ckptstore.cli.progress import Progress
from ckptstore.cli.rows import checkpoint_json
from ckptstore.cli.text import plural, shown, size
from ckptstore.errors import UsageError
from ckptstore.run_average import AVERAGE_KEY, INTEGERS, Integers


def parse_weights(text: str) -> tuple[float, ...]:
    """``0.5,0.3,0.2`` as numbers.

    Raises:
        click.BadParameter: says how it is written.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} cannot be used; write it like 0.5,0.3,0.2") from None


@command(
    "average",
    "ckptstore average gpt@8000 gpt@9000 gpt@10000 -o gpt-mean@10000 --only model",
    "ckptstore average gpt@8000 gpt@9000 -o gpt-mean@9000 --weights 0.25,0.75",
    "ckptstore average - -o soup@0 < refs.txt",
)
@click.argument("checkpoints", nargs=-1, required=True, metavar="(REF | -)...", shell_complete=complete_ref)
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    metavar="RUN@STEP",
    shell_complete=complete_new_ref,
    help="What to save the mean as.",
)
@click.option(
    "--weights",
    type=parse_weights,
    metavar="W,W,...",
    help="One for each REF, summing to 1. [default: equal ones]",
)
@click.option("--normalize", is_flag=True, help="Divide the weights by their sum.")
@click.option(
    "--only", multiple=True, metavar="GLOB", help='Only these names, like "model"; the rest is left out.'
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not these names.")
@click.option(
    "--integers",
    type=click.Choice(INTEGERS),
    default="newest",
    show_default=True,
    help="Integers and bools: those of the newest, or an error if they are not the same in all.",
)
@click.option("--metric", "metrics", multiple=True, type=number_pair, metavar="NAME=NUMBER", help="A metric.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="A tag.")
@click.option("--metadata", multiple=True, type=pair, metavar="NAME=TEXT", help="What else to note.")
def average(
    invocation: Invocation,
    *,
    checkpoints: tuple[str, ...],
    target: str,
    weights: tuple[float, ...] | None,
    normalize: bool,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    integers: Integers,
    metrics: tuple[tuple[str, int | float], ...],
    tags: tuple[str, ...],
    metadata: tuple[tuple[str, str], ...],
) -> None:
    """Saves the element-wise mean of checkpoints as the checkpoint of RUN at STEP: one like any other.

    Floating-point tensors are summed in float64 and rounded once, to their own type; all else comes from
    the newest REF. Names, types and shapes must agree, or nothing is written. Like every save this opens a
    session: a training of RUN that is under way elsewhere is superseded, so use a run of its own.
    """
    run_name, selector = refs.split(target)
    step = refs.as_step(selector)
    if run_name is None or step is None:
        raise UsageError(
            f"{target!r} does not say which run and step to save the mean as",
            hint="write RUN@STEP, as in gpt-mean@10000",
        )
    with invocation.open_store() as store:
        found = [checkpoint_of(store, name) for name in from_stdin(checkpoints)]
        with Progress(invocation, "average") as progress:
            made = store.run(run_name, rank=0, world_size=1).average(
                found,
                step=step,
                weights=weights,
                normalize=normalize,
                only=only or None,
                exclude=exclude or None,
                integers=integers,
                metrics=once(metrics, "--metric"),
                metadata=once(metadata, "--metadata"),
                tags=tags,
                progress=progress,
            )
        row = row_of(store, made)
    facts = made.record.metadata[AVERAGE_KEY]
    if invocation.as_json:
        output.emit_json({**checkpoint_json(row), "average": facts})
        return
    of = ", ".join(f"{shown(one['run'])}@{one['step']} ({one['weight']:.4g})" for one in facts["of"])
    output.say(
        f"averaged {of} as {shown(row.run)} step {row.step} ({row.checkpoint}): "
        f"{facts['tensors']} of {plural(row.tensors, 'tensor')}, {size(row.logical_bytes)}, "
        f"{size(row.new_bytes)} of it new"
    )
