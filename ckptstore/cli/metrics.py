"""``metrics``: what monitoring wants to know of a store, as Prometheus reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run
from ckptstore.cli.invocation import Invocation, command, complete_path
from ckptstore.cli.named import from_stdin
from ckptstore.manifest.text import iso

if TYPE_CHECKING:
    from ckptstore.inspect.metrics import RunMetrics


@command(
    "metrics",
    "ckptstore metrics                     of all runs",
    "ckptstore metrics gpt --json",
    "ckptstore metrics -o /var/lib/node_exporter/ckptstore.prom",
)
@click.argument("runs", nargs=-1, metavar="[RUN | -]...", shell_complete=complete_run)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE.prom",
    shell_complete=complete_path,
    help="Replace this file, for node_exporter's textfile collector, instead of printing.",
)
def metrics(invocation: Invocation, runs: tuple[str, ...], path: Path | None) -> None:
    """Says how saving goes, as Prometheus reads it: for a cron job beside the trainings.

    Of each RUN, or of all: when it was last saved and how long that took, its checkpoints and their bytes,
    and the saves that failed and left word of it. A process that was killed leaves none.
    """
    from ckptstore.inspect.metrics import families, measure
    from ckptstore.metrics.exposition import exposition
    from ckptstore.metrics.textfile import check_path, write_textfile

    target = None if path is None else check_path(path)
    names = from_stdin(runs) if runs else None
    with invocation.open_store() as store:
        found = measure(store, names)
        url = store.url
    text = exposition(families(found, url))
    if target is not None:
        write_textfile(target, text)
    if invocation.as_json:
        shown_path = None if target is None else str(target)
        output.emit_json({"store": url, "path": shown_path, "runs": [_json(run) for run in found]})
    elif target is None and text:
        output.say(text.removesuffix("\n"))


def _json(found: RunMetrics) -> dict[str, Any]:
    last = found.last_save
    document: dict[str, Any] = output.plain(found)
    if last is not None:
        document["last_save"] = {
            "step": last.step,
            "id": last.checkpoint,
            "saved_at": iso(last.created_at),
            "seconds_since": last.seconds_since,
            "blocked_seconds": last.blocked_seconds,
            "timings": last.phase_seconds,
            "new_bytes": last.new_bytes,
            "reused_bytes": last.reused_bytes,
        }
    return document
