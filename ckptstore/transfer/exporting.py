"""``export``: a checkpoint, or a part of it, as a file that other tools read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import UsageError
from ckptstore.load.select import Globs, Rename, Selection
from ckptstore.model.dtypes import DType
from ckptstore.model.plain import StatePath
from ckptstore.transfer import dtypes, metadata, write_dcp, write_npz, write_safetensors, write_torch
from ckptstore.transfer.files import NewDirectory, NewFile, check_destination, check_new_directory, os_errors
from ckptstore.transfer.flat import Flat, Pump, flatten
from ckptstore.transfer.formats import format_of
from ckptstore.transfer.importing import IMPORT_KEY
from ckptstore.transfer.names import Renamer, listed
from ckptstore.transfer.nesting import WHOLE_KEY, whole_paths
from ckptstore.transfer.pick import Entry, Picked, pick
from ckptstore.transfer.ranges import ChunkStream
from ckptstore.transfer.report import ExportReport, Progress
from ckptstore.transfer.torch_tree import torch_tree


def export(
    checkpoint: Checkpoint,
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,
    component: str | None = None,
    only: Globs = None,
    exclude: Globs = None,
    strip_prefix: str | None = None,
    rename: Rename = None,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    metadata: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Writes a checkpoint as a file of another format: a copy, every byte verified on the way.

    It streams: memory stays under 256 MiB and two chunks, whatever the size. The file appears under its
    name when it is whole; after an error there is none, and one that was there is as it was.

    Args:
        destination: the file; with `max_shard_bytes`, and for dcp, a directory.
        format: "safetensors", "torch" or "npz"; by the suffix if None. "dcp": a directory that
            ``torch.distributed.checkpoint.load`` reads; it must not exist, or be empty.
        component: a top-level key of the state. Names in the file are then relative to it.
        only, exclude: globs over stored names (``"model.*"``), as in :meth:`Checkpoint.load`.
        strip_prefix: taken off names that begin with it, after the component.
        rename: names or prefixes, applied after that.
        dtype: floating-point tensors are converted to it; others stay. Where the export spans several
            components, say which by `component`.
        max_shard_bytes: safetensors in several files with an index, as transformers loads them.
        metadata: write the checkpoint's metadata and which tensors are tied (safetensors). Without it
            tied tensors are written once per name.
        overwrite: replace what is there, if it is a file.
        progress: told (bytes done, bytes in all).

    Returns:
        What was written, and what was left out.

    Raises:
        UnsupportedValueError: names what the format cannot hold; nothing was written.
        ConflictError: the destination exists.
        NotFoundError: nothing has such a name.
        DamageError: a chunk cannot be read.

    Example:
        >>> export(run.latest, "model.safetensors", component="model", dtype="bfloat16")
    """
    path = Path(destination)
    if max_shard_bytes is not None:
        if max_shard_bytes <= 0 or (format or "safetensors") != "safetensors":
            raise UsageError("max_shard_bytes must be positive, and is for safetensors only")
        format = "safetensors"
    chosen = format_of(path, format)
    tier = checkpoint.tier
    started = tier.environment.monotonic()
    target = dtypes.target_dtype(dtype)
    if chosen == "dcp":
        check_new_directory(Path(os.path.realpath(path)))
    elif max_shard_bytes is None:
        check_destination(Path(os.path.realpath(path)), overwrite=overwrite)
    if chosen in ("torch", "dcp"):
        import torch  # noqa: F401 - values like torch.Size are rebuilt as such only when it is there
    with checkpoint.reading():
        picked = pick(checkpoint.contents, component, Selection.of(only, exclude))
        _check_cast(picked, component, target)
        job = _Job(
            checkpoint,
            picked,
            Renamer(strip_prefix, rename),
            target,
            ChunkStream(tier, checkpoint.contents),
            progress,
            overwrite=overwrite,
        )
        if chosen == "torch":
            report = job.torch(path)
        elif chosen == "dcp":
            report = job.dcp(path, component)
        elif chosen == "npz":
            report = job.npz(path)
        else:
            report = job.safetensors(path, max_shard_bytes, metadata)
    return dataclasses.replace(report, seconds=tier.environment.monotonic() - started)


def _check_cast(picked: Picked, component: str | None, target: DType | None) -> None:
    if target is not None and component is None and len(picked.components) > 1:
        raise UsageError(
            f"dtype={target.name!r} would convert {listed(sorted(picked.components))} alike",
            hint="say whose tensors to convert: component='model' (--component model)",
        )


class _Job:
    """One export."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        picked: Picked,
        renamer: Renamer,
        target: DType | None,
        stream: ChunkStream,
        progress: Progress | None,
        *,
        overwrite: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._picked = picked
        self._renamer = renamer
        self._target = target
        self._stream = stream
        self._progress = progress
        self._overwrite = overwrite

    def safetensors(self, path: Path, max_shard_bytes: int | None, with_metadata: bool) -> ExportReport:
        flat = self._flat(keep_ties=with_metadata)
        write_safetensors.check(flat.entries)
        values, left_out = metadata.own_values(self._checkpoint) if with_metadata else ({}, ())
        # An array that was converted is whatever the file says; its numpy dtype no longer fits.
        numpy = {e.name: e.detail for e in flat.entries if e.kind == "numpy" and e.dtype is e.source}
        document = metadata.document(self._checkpoint, flat.aliases, numpy)
        text = metadata.as_text(values, document) if with_metadata else None
        if max_shard_bytes is None:

            def write(file: NewFile, pump: Pump) -> int:
                return write_safetensors.write_into(file, flat.entries, text, pump)

            report = self._one_file("safetensors", path, flat.entries, write)
        else:
            index = {**values, metadata.KEY: document} if with_metadata else {}
            report = self._shards(path, flat.entries, max_shard_bytes, text, index)
        return dataclasses.replace(
            report, aliases=flat.aliases, left_out=flat.left_out, metadata_left_out=left_out
        )

    def _shards(
        self,
        path: Path,
        entries: Sequence[Entry],
        max_bytes: int,
        text: dict[str, str] | None,
        index: dict[str, Any],
    ) -> ExportReport:
        shards = write_safetensors.shards_of(entries, max_bytes)
        names = write_safetensors.shard_names(len(shards))
        target = write_safetensors.ShardedTarget(path, overwrite=self._overwrite)
        pump = self._pump(entries)
        size = 0
        with contextlib.ExitStack() as stack:
            stack.callback(target.forget)
            files: list[NewFile] = []
            for shard, name in zip(shards, names, strict=True):
                files.append(stack.enter_context(target.new_file(name)))
                # Only the index speaks of the whole; a shard alone says what kind of file it is.
                said = text if len(shards) == 1 else None if text is None else {"format": "pt"}
                size += write_safetensors.write_into(files[-1], shard, said, pump)
            if len(shards) > 1:
                files.append(stack.enter_context(target.new_file(write_safetensors.INDEX_NAME)))
                files[-1].file.write(write_safetensors.index_of(shards, names, index))
                size += files[-1].finish()
            target.publish(files)
        return self._report("safetensors", [file.path for file in files], entries, pump, size)

    def npz(self, path: Path) -> ExportReport:
        flat = self._flat(keep_ties=False)
        write_npz.check(flat.entries)

        def write(file: NewFile, pump: Pump) -> int:
            return write_npz.write_into(file, flat.entries, pump)

        report = self._one_file("npz", path, flat.entries, write)
        return dataclasses.replace(report, left_out=flat.left_out)

    def torch(self, path: Path) -> ExportReport:
        made = torch_tree(self._checkpoint.contents, self._picked, self._renamer, self._target, self._stream)
        tree = write_torch.pickled(made.tree)

        def write(file: NewFile, pump: Pump) -> int:
            return write_torch.write_into(file, tree, made.entries, pump)

        report = self._one_file("torch", path, made.entries, write)
        return dataclasses.replace(report, aliases=made.aliases, converted=made.converted)

    def dcp(self, path: Path, component: str | None) -> ExportReport:
        contents = self._checkpoint.contents
        made = torch_tree(contents, self._picked, self._renamer, self._target, self._stream)
        planned = write_dcp.plan(made.tree, contents.layout.tensors, self._whole(component))
        pump = self._pump(planned.entries)
        with NewDirectory(path) as directory:
            paths, size = write_dcp.write_into(directory, planned, pump)
            with os_errors(f"cannot write {path}"):
                directory.publish()
        report = self._report("dcp", paths, made.entries, pump, size)
        return dataclasses.replace(
            report, aliases=made.aliases, converted=made.converted, left_out=planned.left_out
        )

    def _whole(self, component: str | None) -> frozenset[StatePath]:
        """Paths of containers that were one value in the DCP directory that this was imported from."""
        facts = self._checkpoint.metadata.get(IMPORT_KEY)
        found = whole_paths(facts.get(WHOLE_KEY, ()) if isinstance(facts, dict) else ())
        if component is None:
            return found
        return frozenset(path[1:] for path in found if len(path) > 1 and path[0] == component)

    def _flat(self, *, keep_ties: bool) -> Flat:
        contents = self._checkpoint.contents
        return flatten(contents, self._picked, self._renamer, self._target, keep_ties=keep_ties)

    def _pump(self, entries: Sequence[Entry]) -> Pump:
        return Pump(self._stream, sum(entry.source_nbytes for entry in entries), self._progress)

    def _one_file(
        self, format: str, path: Path, entries: Sequence[Entry], write: Callable[[NewFile, Pump], int]
    ) -> ExportReport:
        pump = self._pump(entries)
        with NewFile(path, overwrite=self._overwrite) as file:
            size = write(file, pump)
            file.publish()
        return self._report(format, [file.path], entries, pump, size)

    def _report(
        self, format: str, paths: Sequence[Path], entries: Sequence[Entry], pump: Pump, size: int
    ) -> ExportReport:
        kept = [e.name for e in entries if self._target is not None and not dtypes.is_floating(e.source)]
        return ExportReport(
            paths=tuple(paths),
            format=format,
            tensors=len(entries),
            tensor_bytes=sum(entry.nbytes for entry in entries),
            file_bytes=size,
            cast=tuple(e.name for e in entries if e.dtype is not e.source),
            kept=tuple(kept),
            overflowed=tuple(sorted(pump.overflowed)),
        )
