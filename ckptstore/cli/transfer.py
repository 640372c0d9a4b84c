"""``export`` and ``import``: weights out of a store, and into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptstore import refs
from ckptstore.cli import output
from ckptstore.cli.complete import complete_new_ref, complete_ref
from ckptstore.cli.invocation import Invocation, command, complete_path
from ckptstore.cli.named import row_of
from ckptstore.cli.pairs import number_pair, once, pair
from ckptstore.cli.progress import Progress
from ckptstore.cli.rows import checkpoint_json
from ckptstore.cli.text import duration, listed, parse_size, plural, shown, size
from ckptstore.errors import UsageError

if TYPE_CHECKING:
    from ckptstore.transfer import ExportReport

FORMATS = ("safetensors", "torch", "npz", "dcp")

_format_option = click.option("--format", "form", type=click.Choice(FORMATS), help="Default: by the suffix.")
_only_option = click.option(
    "--only", multiple=True, metavar="GLOB", help='Only these names, like "model.layers.0.*".'
)
_exclude_option = click.option("--exclude", multiple=True, metavar="GLOB", help="Not these names.")
_prefix_option = click.option("--strip-prefix", metavar="P", help="Take P off names that begin with it.")
_rename_option = click.option(
    "--rename", multiple=True, type=pair, metavar="A=B", help="A name, or the beginning of names up to a dot."
)
_dtype_option = click.option(
    "--dtype", metavar="DTYPE", help="Convert floating-point tensors, to bfloat16 for example."
)


@command(
    "export",
    "ckptstore export gpt@latest model.safetensors --component model",
    "ckptstore export gpt@paper release/ --component model --dtype bfloat16 --max-shard-size 5GB",
    "ckptstore export gpt@latest state.pt",
    'ckptstore export gpt@1000 head.npz --only "model.head.*" --strip-prefix model.',
    "ckptstore export gpt@latest dcp/ --format dcp",
)
@click.argument("ref", shell_complete=complete_ref)
@click.argument("destination", type=click.Path(path_type=Path), metavar="DST", shell_complete=complete_path)
@_format_option
@click.option(
    "--component", metavar="NAME", help="Only this top-level key of the state; names are then within it."
)
@_only_option
@_exclude_option
@_prefix_option
@_rename_option
@_dtype_option
@click.option(
    "--max-shard-size",
    type=parse_size,
    metavar="SIZE",
    help="DST is a directory: safetensors files of at most SIZE, like 5GB, and their index.",
)
@click.option("--no-metadata", is_flag=True, help="Only tensors; tied ones are written once per name.")
@click.option("--overwrite", is_flag=True, help="Replace what is at DST.")
def export(
    invocation: Invocation,
    *,
    ref: str,
    destination: Path,
    form: str | None,
    component: str | None,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    strip_prefix: str | None,
    rename: tuple[tuple[str, str], ...],
    dtype: str | None,
    max_shard_size: int | None,
    no_metadata: bool,
    overwrite: bool,
) -> None:
    """Writes a checkpoint, or a part of it, as a file that other tools read.

    The suffix says which: .safetensors, .npz, or .pt, .pth, .bin, .ckpt for what torch.load reads. With
    --format dcp DST is a directory for torch.distributed.checkpoint: a new one, or an empty one. Every
    byte is verified on the way. DST appears when it is whole. What the format cannot hold is listed.
    """
    from ckptstore.transfer import export as write

    with invocation.open_store() as store:
        checkpoint = store.checkpoint(ref)
        with Progress(invocation, "export") as progress:
            report = write(
                checkpoint,
                destination,
                format=form,
                component=component,
                only=only or None,
                exclude=exclude or None,
                strip_prefix=strip_prefix,
                rename=once(rename, "--rename") or None,
                dtype=dtype,
                max_shard_bytes=max_shard_size,
                metadata=not no_metadata,
                overwrite=overwrite,
                progress=progress,
            )
    if invocation.as_json:
        source = {"run": checkpoint.run, "step": checkpoint.step, "id": checkpoint.id}
        output.emit_json({"store": store.url, **source, **output.plain(report)})
        return
    for line in _report_lines(report):
        output.say(line)


_NOT_HELD = {
    "safetensors": "values, and safetensors holds tensors only",
    "npz": "values, and npz holds tensors only",
    "dcp": "empty dicts, which dcp does not keep",
}


def _report_lines(report: ExportReport) -> Iterator[str]:
    rate = f", {size(int(report.file_bytes / report.seconds))}/s" if report.seconds > 0 else ""
    where = shown(str(report.paths[0]))
    if len(report.paths) > 1:
        where = f"{len(report.paths)} files in {shown(str(report.paths[0].parent))}"
    yield (
        f"wrote {where}: {plural(report.tensors, 'tensor')}, {size(report.file_bytes)} "
        f"in {duration(report.seconds)}{rate}"
    )
    tied = [f"{name} = {other}" for name, other in report.aliases]
    notes = (
        ("converted", report.cast),
        ("not converted, being no floating point", report.kept),
        ("numpy arrays written as torch tensors", report.converted),
        ("tied", tied),
        (f"left out: {_NOT_HELD.get(report.format)}", report.left_out),
        ("metadata left out", report.metadata_left_out),
    )
    for title, names in notes:
        if names:
            yield f"  {title}: {listed(names)}"
    if report.overflowed:
        yield f"  {output.bad('became inf or NaN by the conversion')}: {listed(report.overflowed)}"


@command(
    "import",
    "ckptstore import model.safetensors llama-8b-base@0",
    "ckptstore import model.safetensors.index.json llama-70b@0 --dtype bfloat16 --tag base",
    "ckptstore import old.pt gpt@12000 --no-component --metric loss=2.31",
    'ckptstore import old.pt gpt@12000 --only "model.*" --strip-prefix model.',
    "ckptstore import checkpoint-500/ gpt@500 --no-component",
)
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC", shell_complete=complete_path)
@click.argument("target", metavar="RUN@STEP", shell_complete=complete_new_ref)
@_format_option
@click.option(
    "--component",
    metavar="NAME",
    help="The top-level key of the state that it becomes. [default: model]",
)
@click.option("--no-component", is_flag=True, help="The file's own top-level keys are the components.")
@_only_option
@_exclude_option
@_prefix_option
@_rename_option
@_dtype_option
@click.option(
    "--allow-pickle", is_flag=True, help="Let a torch file run code as it is loaded: only if you trust it."
)
@click.option("--metric", "metrics", multiple=True, type=number_pair, metavar="NAME=NUMBER", help="A metric.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="A tag.")
@click.option("--metadata", multiple=True, type=pair, metavar="NAME=TEXT", help="What else to note.")
def import_(
    invocation: Invocation,
    *,
    source: Path,
    target: str,
    form: str | None,
    component: str | None,
    no_component: bool,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    strip_prefix: str | None,
    rename: tuple[tuple[str, str], ...],
    dtype: str | None,
    allow_pickle: bool,
    metrics: tuple[tuple[str, int | float], ...],
    tags: tuple[str, ...],
    metadata: tuple[tuple[str, str], ...],
) -> None:
    """Saves what a file holds as the checkpoint of RUN at STEP: one like any other.

    SRC is a file, an index of safetensors files or a directory with one, or a directory that
    torch.distributed.checkpoint wrote. Like every save this opens a session: a training of RUN that is
    under way elsewhere is superseded, so import into a run of its own.
    """
    if no_component and component is not None:
        raise UsageError("--component and --no-component contradict each other", hint="leave out either")
    run_name, step = _target(target)
    from ckptstore.transfer import import_ as save

    with invocation.open_store() as store:
        with Progress(invocation, "import") as progress:
            made = save(
                store.run(run_name),
                source,
                step=step,
                format=form,
                component=None if no_component else "model" if component is None else component,
                only=only or None,
                exclude=exclude or None,
                strip_prefix=strip_prefix,
                rename=once(rename, "--rename") or None,
                dtype=dtype,
                allow_pickle=allow_pickle,
                metrics=once(metrics, "--metric"),
                metadata=once(metadata, "--metadata"),
                tags=tags,
                progress=progress,
            )
        row = row_of(store, made)
    if invocation.as_json:
        output.emit_json({**checkpoint_json(row), "import": made.record.metadata["import"]})
        return
    output.say(
        f"imported {shown(str(source))} as {shown(row.run)} step {row.step} ({row.checkpoint}): "
        f"{plural(row.tensors, 'tensor')}, {size(row.logical_bytes)}, {size(row.new_bytes)} of it new"
    )


def _target(text: str) -> tuple[str, int]:
    run, selector = refs.split(text)
    step = refs.as_step(selector)
    if run is None or step is None:
        raise UsageError(
            f"{text!r} does not say which run and step to import as",
            hint="write RUN@STEP, as in llama-8b-base@0",
        )
    return run, step
