"""Commands that note something about a checkpoint: tags, pins, validity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.text import plural, shown
from ckptstore.errors import UsageError
from ckptstore.run import Run


@contextmanager
def _found(invocation: Invocation, ref: str) -> Iterator[tuple[Run, Checkpoint]]:
    with invocation.open_store() as store:
        checkpoint = store.checkpoint(ref)
        yield store.run(checkpoint.run), checkpoint


def _tell(invocation: Invocation, checkpoint: Checkpoint, text: str, **more: Any) -> None:
    if invocation.as_json:
        output.emit_json({"run": checkpoint.run, "step": checkpoint.step, "id": checkpoint.id, **more})
        return
    output.say(f"{shown(checkpoint.run)} step {checkpoint.step} ({checkpoint.id}) {text}")


@command(
    "tag",
    "ckptstore tag gpt@12000 paper",
    "ckptstore tag gpt@min:loss best --move",
)
@click.argument("ref")
@click.argument("tag")
@click.option("--move", is_flag=True, help="Take the tag from the checkpoint of the run that has it.")
def tag(invocation: Invocation, ref: str, tag: str, move: bool) -> None:
    """Gives a checkpoint a name within its run: RUN@TAG is then a REF."""
    with _found(invocation, ref) as (run, checkpoint):
        run.tag(checkpoint, tag, move=move)
        _tell(invocation, checkpoint, f"is tagged {shown(tag)}", tag=tag)


@command(
    "untag",
    "ckptstore untag gpt@12000 paper",
)
@click.argument("ref")
@click.argument("tag")
def untag(invocation: Invocation, ref: str, tag: str) -> None:
    """Takes a tag away from a checkpoint."""
    with _found(invocation, ref) as (run, checkpoint):
        run.untag(checkpoint, tag)
        _tell(invocation, checkpoint, f"is no longer tagged {shown(tag)}", tag=tag)


@command(
    "pin",
    'ckptstore pin gpt@12000 --reason "figures of the paper"',
)
@click.argument("ref")
@click.option("--reason", default="", metavar="TEXT", help="Why, for whoever finds the pin later.")
def pin(invocation: Invocation, ref: str, reason: str) -> None:
    """Promises that a checkpoint is needed: nothing collects it until `unpin`."""
    with _found(invocation, ref) as (run, checkpoint):
        identity = run.pin(checkpoint, reason)
        _tell(invocation, checkpoint, f"is pinned ({identity})", pin=identity, reason=reason)


@command(
    "unpin",
    "ckptstore unpin gpt@12000",
)
@click.argument("ref")
def unpin(invocation: Invocation, ref: str) -> None:
    """Takes all pins of a checkpoint back."""
    with _found(invocation, ref) as (run, checkpoint):
        count = run.unpin(checkpoint)
        _tell(invocation, checkpoint, f"is unpinned: {plural(count, 'pin')} taken back", pins_removed=count)


@command(
    "invalidate",
    'ckptstore invalidate gpt@12000 --reason "loss spike from step 11800 on"',
    "ckptstore invalidate gpt@12000 --undo",
)
@click.argument("ref")
@click.option("--reason", metavar="TEXT", help="What is wrong with it; whoever finds it later will ask.")
@click.option("--undo", is_flag=True, help="Mark it valid again.")
def invalidate(invocation: Invocation, ref: str, reason: str | None, undo: bool) -> None:
    """Marks a checkpoint as not to be restored (a diverged training, bad data). Nothing is deleted.

    It is then never "latest" or "best", and `restore` passes it over.
    """
    if undo == (reason is not None):
        raise UsageError(
            "invalidate wants either --reason TEXT or --undo", hint='add --reason "what is wrong"'
        )
    with _found(invocation, ref) as (run, checkpoint):
        if reason is None:
            run.revalidate(checkpoint)
            _tell(invocation, checkpoint, "is valid again", valid=True, reason=None)
            return
        run.invalidate(checkpoint, reason)
        _tell(invocation, checkpoint, f"is marked invalid: {shown(reason)}", valid=False, reason=reason)
