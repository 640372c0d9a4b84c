"""``forget`` and ``undelete``: removing checkpoints on purpose, and taking that back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from ckptstore import refs as refs_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.cli import output
from ckptstore.cli.complete import complete_ref, complete_run_or_ref
from ckptstore.cli.invocation import Invocation, command
from ckptstore.cli.named import checkpoint_of, from_stdin
from ckptstore.cli.text import plural, shown
from ckptstore.errors import UsageError
from ckptstore.store import Store


@command(
    "forget",
    "ckptstore forget gpt@12000 gpt@14000",
    "ckptstore forget old-run --all",
    "ckptstore undelete gpt@12000        until it is being deleted",
)
@click.argument(
    "what", nargs=-1, required=True, metavar="(REF... | RUN | -)", shell_complete=complete_run_or_ref
)
@click.option("--all", "whole", is_flag=True, help="All checkpoints of each RUN that is named.")
@click.option("--yes", is_flag=True, help="With --all: do not ask.")
def forget(invocation: Invocation, what: tuple[str, ...], whole: bool, yes: bool) -> None:
    """Asks for checkpoints to be deleted, whatever the policy says; the next `ckptstore gc` does it.

    They are not restorable from now on. What somebody needs is refused, and then nothing of that run is
    forgotten: what is pinned or being read, what another run was forked from, and what a training that is
    alive began with or saved.
    """
    names = list(dict.fromkeys(from_stdin(what)))
    with invocation.open_store() as store:
        if not whole:
            known = {row.run for row in store.runs()}
            runs = [name for name in names if name in known]
            if runs:
                raise UsageError(
                    f"{runs[0]!r} is a run: forgetting all of its checkpoints wants --all",
                    hint=f"or name one: {runs[0]}@STEP",
                )
            found = [checkpoint_of(store, name) for name in names]
        else:
            found = [each for name in names for each in _all_of(store, name)]
            if not yes:
                _confirm(names, found)
        for run in dict.fromkeys(each.run for each in found):
            store.run(run).forget(*(each for each in found if each.run == run))
        after = [store.run(each.run).find(each.id) for each in found]
        _print(invocation, store, after, "is forgotten: the next `ckptstore gc` deletes it")


def _all_of(store: Store, name: str) -> list[Checkpoint]:
    run = store.run(name)
    return run.checkpoints() or [checkpoint_of(store, f"{name}@latest")]  # its error says what is wrong


def _confirm(names: Sequence[str], found: Sequence[Checkpoint]) -> None:
    if not (sys.stdin and sys.stdin.isatty()):
        raise UsageError("forgetting a whole run wants to be confirmed", hint="add --yes")
    runs = ", ".join(map(shown, names))
    click.confirm(f"Forget all {plural(len(found), 'checkpoint')} of {runs}?", abort=True, err=True)


@command(
    "undelete",
    "ckptstore undelete gpt@12000",
)
@click.argument("refs", nargs=-1, required=True, metavar="(REF... | -)", shell_complete=complete_ref)
def undelete(invocation: Invocation, refs: tuple[str, ...]) -> None:
    """Takes `forget` back, and what `gc --grace` has announced, until it is being deleted.

    What the policy does not keep expires again at the next `gc`: tag or pin it, too.
    """
    with invocation.open_store() as store:
        found = []
        for name in dict.fromkeys(from_stdin(refs)):
            run, which = refs_of.split(name)
            if run is None:
                checkpoint = store.checkpoint(name)
                run, which = checkpoint.run, checkpoint.id
            found.append(store.run(run).undelete(which))
        _print(invocation, store, found, "stays")


def _print(invocation: Invocation, store: Store, found: Sequence[Checkpoint], said: str) -> None:
    if invocation.as_json:
        checkpoints: list[dict[str, Any]] = [
            {"run": each.run, "step": each.step, "id": each.id, "state": each.state} for each in found
        ]
        output.emit_json({"store": store.url, "checkpoints": checkpoints})
        return
    for each in found:
        output.say(f"{shown(each.run)} step {each.step} ({each.id}) {said}")
