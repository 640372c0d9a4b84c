"""``demo``: a real training, killed in the middle of a save, and resumed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

import ckptstore
from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.ls import checkpoint_lines, run_lines
from ckptstore.cli.signals import terminated_like_interrupted
from ckptstore.cli.text import duration, plural, shown, size
from ckptstore.demo.demo import RUN, TUNED_RUN, Reporter, Result, Settings, demonstrate
from ckptstore.manifest import place


@command(
    "demo",
    "ckptstore demo",
    "ckptstore demo --dir /tmp/look && ckptstore -s /tmp/look/killed ls",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A new or empty folder to work in, which then stays. Default: a temporary one.",
)
@click.option("--keep", is_flag=True, help="Keep the temporary folder, to look around in.")
@click.option("--steps", type=click.IntRange(min=2), hidden=True)
def demo(invocation: Invocation, folder: Path | None, keep: bool, steps: int | None) -> None:
    """Trains a small GPT twice: once undisturbed, once killed in the middle of a save and started again.

    Then it compares the loss of every step and the final weights, bit for bit, shows what is in the store
    and what reuse saved, and verifies it. Needs torch and 1 GiB of disk; takes about a minute on two cores.
    Ends with 1 if anything differs.
    """
    os.environ.pop(place.VARIABLE, None)  # it names a file for some other store
    settings = Settings() if steps is None else _small(steps)
    stream = sys.stderr if invocation.as_json else sys.stdout

    def tell(text: str) -> None:
        if not invocation.quiet:
            stream.write(text + "\n")
            stream.flush()

    reporter = Reporter(
        part=lambda title: tell(f"\n{output.strong(title)}"), line=lambda text: tell(f"   {shown(text)}")
    )
    with _working_folder(folder, keep) as (where, stays), terminated_like_interrupted():
        tell(f"working in {shown(str(where))}{'' if stays else ', which is removed at the end'}")
        result = demonstrate(where, settings, reporter)
        if invocation.as_json:
            output.emit_json(
                {"identical": result.comparison.identical, "ok": result.ok, **output.plain(result)}
            )
        else:
            _print(result, stays)
    if not result.ok:
        click.get_current_context().exit(1)


def _small(steps: int) -> Settings:
    every = max(1, steps // 6)
    return Settings(steps, every, steps // 2, every * 2, every)


@contextlib.contextmanager
def _working_folder(folder: Path | None, keep: bool) -> Iterator[tuple[Path, bool]]:
    if folder is not None:
        yield folder, True
        return
    made = Path(tempfile.mkdtemp(prefix="ckptstore-demo-"))
    try:
        yield made, keep
    finally:
        if not keep:
            shutil.rmtree(made, ignore_errors=True)


def _print(result: Result, stays: bool) -> None:
    compared = result.comparison
    with ckptstore.open(result.store) as store:
        output.say(
            f"\n{output.strong('What is in the store')}   (ckptstore -s {shown(str(result.store))} ls)\n"
        )
        for line in run_lines(store, store.runs()):
            output.say(f"   {line}")
        for name in (RUN, TUNED_RUN):
            output.say()
            for line in checkpoint_lines(store, (name,)):
                output.say(f"   {line}")
    reused = result.logical_bytes - result.new_bytes
    output.say(f"\n{output.strong('Result')}\n")
    output.say(
        f"   reuse      {size(result.logical_bytes)} of checkpoints in {size(result.new_bytes)}: "
        f"{size(reused)} saved by reuse"
    )
    verified = result.verified
    state = "clean" if not verified.problems else output.bad(plural(len(verified.problems), "problem"))
    checkpoints = plural(verified.checkpoints, "checkpoint")
    output.say(f"   verify     {state}: {checkpoints}, {size(verified.bytes)} read back")
    output.say(
        f"   resume     killed in the save of step {result.cut.step}, went on from step "
        f"{result.resumed_from_step}, {plural(compared.repeated, 'step')} done twice"
    )
    if compared.differing:
        steps = ", ".join(map(str, compared.differing[:10]))
        output.say(f"   losses     {output.bad('DIFFERENT')} at step {steps}")
    else:
        output.say(
            f"   losses     identical, bit for bit, at all {compared.steps} steps "
            f"(the last: {compared.last_loss:.4f})"
        )
    one, other = compared.digests
    if one == other:
        output.say(f"   weights    identical, bit for bit (SHA-256 {one[:16]}…)")
    else:
        output.say(f"   weights    {output.bad('DIFFERENT')}: {one[:16]}… and {other[:16]}…")
    output.say(
        f"\n{'identical' if result.ok else output.bad('NOT identical')}, in {duration(result.seconds)}"
    )
    if stays:
        output.say(f"look around: ckptstore -s {shown(str(result.store))} ls")
