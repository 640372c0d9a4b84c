"""Commands that note something about a checkpoint: tags, pins, validity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.cli import output
from ckptstore.cli.complete import complete_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import STDIN, from_stdin
from ckptstore.cli.text import plural, shown
from ckptstore.errors import UsageError
from ckptstore.run import Run

Note = Callable[[Run, Checkpoint], tuple[str, dict[str, Any]]]
"""Does it, and returns what to say of it, as text and as JSON fields."""


def _each(invocation: Invocation, ref: str, note: Note) -> None:
    """Does it to the checkpoint of a REF, or to each on stdin: all are looked up before any is changed."""
    documents = []
    with invocation.open_store() as store:
        for checkpoint in [store.checkpoint(name) for name in from_stdin((ref,))]:
            text, fields = note(store.run(checkpoint.run), checkpoint)
            documents.append({"run": checkpoint.run, "step": checkpoint.step, "id": checkpoint.id, **fields})
            if not invocation.as_json:
                output.say(f"{shown(checkpoint.run)} step {checkpoint.step} ({checkpoint.id}) {text}")
        if invocation.as_json:
            many = {"store": store.url, "checkpoints": documents}
            output.emit_json(many if ref == STDIN else documents[0])


@command(
    "tag",
    "ckptstore tag gpt@12000 paper",
    "ckptstore tag gpt@min:loss best --move",
)
@click.argument("ref", metavar="[REF | -]", shell_complete=complete_ref)
@click.argument("tag")
@click.option("--move", is_flag=True, help="Take the tag from the checkpoint of the run that has it.")
def tag(invocation: Invocation, ref: str, tag: str, move: bool) -> None:
    """Gives a checkpoint a name within its run: RUN@TAG is then a REF."""

    def note(run: Run, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
        run.tag(checkpoint, tag, move=move)
        return f"is tagged {shown(tag)}", {"tag": tag}

    _each(invocation, ref, note)


@command(
    "untag",
    "ckptstore untag gpt@12000 paper",
)
@click.argument("ref", metavar="[REF | -]", shell_complete=complete_ref)
@click.argument("tag")
def untag(invocation: Invocation, ref: str, tag: str) -> None:
    """Takes a tag away from a checkpoint."""

    def note(run: Run, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
        run.untag(checkpoint, tag)
        return f"is no longer tagged {shown(tag)}", {"tag": tag}

    _each(invocation, ref, note)


@command(
    "pin",
    'ckptstore pin gpt@12000 --reason "figures of the paper"',
)
@click.argument("ref", metavar="[REF | -]", shell_complete=complete_ref)
@click.option("--reason", default="", metavar="TEXT", help="Why, for whoever finds the pin later.")
def pin(invocation: Invocation, ref: str, reason: str) -> None:
    """Promises that a checkpoint is needed: nothing collects it until `unpin`."""

    def note(run: Run, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
        identity = run.pin(checkpoint, reason)
        return f"is pinned ({identity})", {"pin": identity, "reason": reason}

    _each(invocation, ref, note)


@command(
    "unpin",
    "ckptstore unpin gpt@12000",
)
@click.argument("ref", metavar="[REF | -]", shell_complete=complete_ref)
def unpin(invocation: Invocation, ref: str) -> None:
    """Takes all pins of a checkpoint back."""

    def note(run: Run, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
        count = run.unpin(checkpoint)
        return f"is unpinned: {plural(count, 'pin')} taken back", {"pins_removed": count}

    _each(invocation, ref, note)


@command(
    "invalidate",
    'ckptstore invalidate gpt@12000 --reason "loss spike from step 11800 on"',
    "ckptstore invalidate gpt@12000 --undo",
)
@click.argument("ref", metavar="[REF | -]", shell_complete=complete_ref)
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

    def note(run: Run, checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
        if reason is None:
            run.revalidate(checkpoint)
            return "is valid again", {"valid": True, "reason": None}
        run.invalidate(checkpoint, reason)
        return f"is marked invalid: {shown(reason)}", {"valid": False, "reason": reason}

    _each(invocation, ref, note)
