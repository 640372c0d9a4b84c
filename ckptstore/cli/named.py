"""Runs and REFs as given on the command line: ``-`` for those on stdin, and what each names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import NotFoundError
from ckptstore.manifest import CheckpointRow
from ckptstore.store import Store

STDIN = "-"


def from_stdin(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, with those that come on stdin, one per line, in place of each ``-``."""
    return tuple(name for given in names for name in ((given,) if given != STDIN else _lines()))


def _lines() -> Iterator[str]:
    for line in stdin_text().split("\n"):
        name = line.removesuffix("\r")
        if name:
            yield name


def stdin_text() -> str:
    """All of stdin. Bytes that are no UTF-8 stay what they are, for whoever looks at the text to refuse."""
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if sys.stdin else ""


def checkpoint_of(store: Store, ref: str) -> Checkpoint:
    """The checkpoint of a REF, where a run's name could have stood, too.

    Raises:
        NotFoundError: names similar runs, if it looks like a run's name.
    """
    try:
        return store.checkpoint(ref)
    except NotFoundError:
        if "@" not in ref:
            store.checkpoint(f"{ref}@latest")  # its error names similar runs
        raise


def row_of(store: Store, checkpoint: Checkpoint) -> CheckpointRow:
    """What the manifest says of it."""
    key = store.run(checkpoint.run).key
    store.catalog.refresh(key)
    rows = store.catalog.ask(lambda manifest: manifest.checkpoints(key))
    return next(row for row in rows if row.checkpoint == checkpoint.id)


def divided(store: Store, names: Sequence[str]) -> tuple[list[str], list[Checkpoint]]:
    """The runs among `names`, and the checkpoints that the others name.

    Raises:
        NotFoundError: one of them names nothing.
    """
    known = {row.run for row in store.runs()}
    return (
        [name for name in names if name in known],
        [checkpoint_of(store, name) for name in names if name not in known],
    )
