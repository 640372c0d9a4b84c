"""``plot``: a run as a picture."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ckptstore.cli import output
from ckptstore.cli.complete import complete_run
from ckptstore.cli.invocation import Invocation, command, complete_path
from ckptstore.cli.text import shown

_MAX_NAME = 100


@command(
    "plot",
    "ckptstore plot gpt",
    "ckptstore plot gpt -o loss.svg --metric loss --metric val_loss",
)
@click.argument("run", shell_complete=complete_run)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    shell_complete=complete_path,
    help="Where to: .png, .svg or .pdf. Default: the run's name with .png, in this directory.",
)
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="A panel for it. Default: the first four."
)
def plot(invocation: Invocation, run: str, path: Path | None, metrics: tuple[str, ...]) -> None:
    """Draws a run over its steps: metrics, kept checkpoints, bytes and the time that saves took.

    A picture that is there is replaced. Needs matplotlib: pip install 'ckptstore[plot]'.
    """
    from ckptstore.inspect.plot import plot as draw

    target = Path(_file_name(run)) if path is None else path
    with invocation.open_store() as store:
        drawn = draw(store.run(run), target, metrics=metrics or None)
    if invocation.as_json:
        output.emit_json({"store": store.url, "run": run, "path": str(target), "metrics": drawn})
        return
    what = f": {', '.join(map(shown, drawn))}" if drawn else ""
    output.say(f"wrote {shown(str(target))}{what}")


def _file_name(run: str) -> str:
    """A name for the picture that every file system takes, whatever the run is called."""
    name = re.sub(r"[^\w.+-]+", "_", run).lstrip(".")
    return f"{name[:_MAX_NAME] or 'run'}.png"
