"""Commands on a store as a whole: ``init``, ``rebuild``."""

from __future__ import annotations

import os

import click

from ckptstore import config
from ckptstore.cli import output
from ckptstore.cli.invocation import Invocation, command, complete_path, here
from ckptstore.cli.text import parse_size, plural, shown, size
from ckptstore.errors import UsageError
from ckptstore.tier.marker import DEFAULT_CHUNK_BYTES

_SMALLEST_CHUNK = 1 << 20


@command(
    "init",
    "ckptstore init ckpts",
    "ckptstore init /data/ckpts --chunk-size 64MiB",
    "ckptstore init ckptstore.toml",
)
@click.argument("location", required=False, shell_complete=complete_path)
@click.option(
    "--chunk-size",
    type=parse_size,
    default=f"{DEFAULT_CHUNK_BYTES >> 20}MiB",
    show_default=True,
    metavar="SIZE",
    help="The largest chunk: a power of two from 1MiB to 64MiB. It stays as it is for ever.",
)
def init(invocation: Invocation, location: str | None, chunk_size: int) -> None:
    """Makes a new store at LOCATION: an absent or empty directory, a URL, or the tiers of a ckptstore.toml.

    Without LOCATION, at the place that -s, $CKPTSTORE or the nearest ckptstore.toml names. An existing store
    is never touched; of several tiers, those that are missing are made, and which there are is written down.
    """
    import ckptstore

    where = location or invocation.location or config.find_location(here(), os.environ)
    if where is None:
        raise UsageError("init wants to know where", hint="write `ckptstore init DIR`")
    if chunk_size < _SMALLEST_CHUNK:
        raise UsageError(
            f"--chunk-size must be at least 1MiB, not {size(chunk_size)}", hint="the default is 16MiB"
        )
    with ckptstore.init(where, chunk_bytes=chunk_size) as store:
        if invocation.as_json:
            tiers = [{"name": tier.name, "url": tier.url, "uuid": tier.uuid} for tier in store.tiers]
            output.emit_json(
                {"store": store.url, "uuid": store.uuid, "chunk_bytes": store.chunk_bytes, "tiers": tiers}
            )
            return
        output.say(
            f"made a store at {shown(store.url)} (chunks up to {size(store.chunk_bytes)}, id {store.uuid})"
        )
        if len(store.tiers) > 1:
            output.say(f"its tiers: {', '.join(f'{tier.name} at {shown(tier.url)}' for tier in store.tiers)}")


@command(
    "rebuild",
    "ckptstore -s ckpts rebuild",
)
def rebuild(invocation: Invocation) -> None:
    """Makes the manifest anew from what is in the store. No answer changes by it.

    The manifest is the SQLite database that `ls` and `show` read. It holds nothing of its own: lost, damaged
    or deleted, it is made again, by itself or by this command.
    """
    with invocation.open_store() as store:
        store.rebuild()
        manifest = store.catalog.manifest
        rows = manifest.runs()
        counts = {"runs": len(rows), "checkpoints": sum(row.checkpoints for row in rows)}
        if invocation.as_json:
            path = None if manifest.path is None else str(manifest.path)
            output.emit_json({"store": store.url, "manifest": path, **counts})
            return
        where = (
            "in memory (no place for it may be written)"
            if manifest.path is None
            else shown(str(manifest.path))
        )
        output.say(
            f"rebuilt the manifest {where}: {plural(counts['runs'], 'run')}, "
            f"{plural(counts['checkpoints'], 'checkpoint')}"
        )
