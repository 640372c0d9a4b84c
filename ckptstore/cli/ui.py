"""``ui``: the store as pages in a browser."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command, complete_path
from ckptstore.cli.signals import terminated_like_interrupted
from ckptstore.cli.text import shown
from ckptstore.errors import ConflictError, UsageError

if TYPE_CHECKING:
    from ckptstore.inspect.ui import Pages
    from ckptstore.store import Store


@command(
    "ui",
    "ckptstore ui",
    "ckptstore ui --port 9000 --no-open",
    "ckptstore ui --export pages",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8001,
    show_default=True,
    metavar="N",
    help="Where to serve, for this machine only; 0 takes any that is free.",
)
@click.option("--no-open", is_flag=True, help="Open no browser.")
@click.option(
    "--export",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    shell_complete=complete_path,
    help="Start nothing: write the snapshot and the description into a new or empty DIR.",
)
def ui(invocation: Invocation, port: int, no_open: bool, folder: Path | None) -> None:
    """Serves the manifest as web pages until Ctrl-C: tables, columns explained, the worked questions.

    They show a snapshot: the store as it is now. Needs datasette: pip install 'ckptstore[ui]'.
    """
    if invocation.as_json and folder is None:
        raise UsageError("a server has no result to print as JSON", hint="--json is for `ui --export DIR`")
    from ckptstore.inspect import ui as pages

    with invocation.open_store() as store:
        if folder is None:
            pages.check_installed()
            if not invocation.quiet:
                sys.stderr.write("serving a snapshot of the store; Ctrl-C ends it\n")
            with terminated_like_interrupted():
                code = pages.serve(store, port=port, browser=not no_open)
            if code:
                click.get_current_context().exit(1)
            return
        made = _export(store, folder)
    if invocation.as_json:
        output.emit_json(
            {
                "store": store.url,
                "database": str(made.database),
                "metadata": str(made.metadata),
                "command": made.command(port=port, browser=not no_open),
            }
        )
        return
    output.say(f"wrote {shown(str(made.database))} and {shown(str(made.metadata))}")
    output.say(f"look at them: {shown(shlex.join(made.command(port=port, browser=not no_open)))}")


def _export(store: Store, folder: Path) -> Pages:
    from ckptstore.inspect import ui as pages
    from ckptstore.inspect.query import snapshot
    from ckptstore.transfer.files import os_errors

    with os_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConflictError(f"{folder} is not empty", hint="name a new folder")
        database = snapshot(store, folder / f"{pages.DATABASE}.db")
        metadata = folder / "metadata.json"
        text = json.dumps(pages.metadata(store), indent=2, ensure_ascii=False)
        metadata.write_text(text + "\n", encoding="utf-8")
    return pages.Pages(folder, database, metadata)
