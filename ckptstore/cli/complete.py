"""What the shell offers for runs and REFs: from the manifest, without torch, and never an error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator

import click

from ckptstore.cli.invocation import Invocation
from ckptstore.store import Store

MAX_STEPS = 100
"""The newest steps of a run that are offered; more would be no help."""


def complete_run(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of runs."""
    return _offered(context, incomplete, _runs)


def complete_ref(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """``RUN@latest``; tags, steps and metrics, too, where only one run fits."""
    return _offered(context, incomplete, lambda store: _refs(store, incomplete))


def complete_run_or_ref(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Either."""
    return _offered(context, incomplete, lambda store: [*_runs(store), *_refs(store, incomplete)])


def complete_new_ref(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """``RUN@``, for a step that is to be."""
    return _offered(context, incomplete, lambda store: [f"{run}@" for run in _runs(store)])


def _offered(context: click.Context, incomplete: str, find: Callable[[Store], Iterable[str]]) -> list[str]:
    invocation = context.ensure_object(Invocation)
    logging.disable(logging.CRITICAL)  # nothing may be written between what a person types
    try:
        if invocation.location is not None:
            invocation.location = os.path.expanduser(invocation.location)  # the shell has not yet
        with invocation.open_store() as store:
            found = list(dict.fromkeys(find(store)))
    except Exception:  # noqa: BLE001 - no store, no answer: there is nothing to offer
        return []
    finally:
        logging.disable(logging.NOTSET)
    # What does not print cannot be typed, either.
    return [text for text in found if text.startswith(incomplete) and text.isprintable()]


def _runs(store: Store) -> list[str]:
    return [row.run for row in store.runs()]


def _refs(store: Store, incomplete: str) -> Iterator[str]:
    known = {row.run: row for row in store.runs() if row.checkpoints}
    begun, separator, _ = incomplete.rpartition("@")
    fitting = (
        [begun] if separator and begun in known else [run for run in known if run.startswith(incomplete)]
    )
    if len(fitting) != 1:
        yield from (f"{run}@latest" for run in fitting)
        return
    run = fitting[0]
    key = known[run].run_key
    rows = store.catalog.ask(lambda manifest: manifest.checkpoints(key, newest_first=True))
    yield f"{run}@latest"
    yield from (f"{run}@{tag}" for row in rows for tag in row.tags)
    yield from (f"{run}@{row.step}" for row in rows[:MAX_STEPS])
    metrics = sorted({name for row in rows[:MAX_STEPS] for name in row.metrics})
    yield from (f"{run}@{mode}:{metric}" for metric in metrics for mode in ("min", "max"))
