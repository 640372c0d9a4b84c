"""``import_``: a file of another format as an ordinary checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import blake3

from ckptstore.arrays import LazyArray, nbytes
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import NotFoundError, UsageError
from ckptstore.load.select import Globs, Rename, Selection, selected
from ckptstore.model.dtypes import DType
from ckptstore.run import Run
from ckptstore.transfer import dtypes, read_dcp, read_npz, read_safetensors, read_torch
from ckptstore.transfer.formats import sniff
from ckptstore.transfer.names import Renamer, listed
from ckptstore.transfer.nesting import WHOLE_KEY, paths_of
from ckptstore.transfer.report import Progress
from ckptstore.transfer.source import Source, converted
from ckptstore.transfer.trees import as_components, mapped, renamed

IMPORT_KEY = "import"
"""Where the checkpoint's metadata tells what was imported."""

MAX_FILES = 256
"""So many are told of one by one; of more, one digest over the lines that ``b3sum`` would print."""


def import_(
    store_run: Run,
    source: str | os.PathLike[str],
    *,
    step: int,
    format: str | None = None,
    component: str | None = "model",
    only: Globs = None,
    exclude: Globs = None,
    strip_prefix: str | None = None,
    rename: Rename = None,
    dtype: str | None = None,
    allow_pickle: bool = False,
    metrics: Mapping[str, int | float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Iterable[str] = (),
    progress: Progress | None = None,
) -> Checkpoint:
    """Saves what a file or DCP directory holds as a checkpoint of a run; it streams, as :func:`export` does.

    The checkpoint is like any other. Its metadata has an entry "import": source, format, size and BLAKE3
    of each file, and the metadata of the file itself.

    Args:
        store_run: like every save, this opens a session: a training of that run elsewhere is superseded.
        source: a file; for safetensors also an index, or a directory with one; for dcp the directory.
        step: of the new checkpoint.
        format: by suffix and content if None.
        component: the top-level key of the state that it becomes. None: what the file names ``model.x``
            becomes ``x`` in the component ``model``, and the top-level keys of a torch file or of what
            torch.distributed.checkpoint wrote are components.
        only, exclude: globs over names in the file.
        strip_prefix: taken off names that begin with it; of a nested state, ``"model."`` means what lies
            under ``model``.
        rename: names or prefixes, applied after that.
        dtype: floating-point tensors are converted to it.
        allow_pickle: for torch and dcp: load types that torch does not consider safe. Runs code from the
            file: only for files that you trust. From dcp, values that cannot be stored are pickled again.
        metrics, metadata, tags: as of :meth:`Run.save`.
        progress: told (bytes done, bytes in all), from several threads.

    Returns:
        The committed checkpoint.

    Raises:
        DocumentError: the file is damaged, or contradicts itself.
        UnsupportedValueError: it holds something that cannot be stored, by name.
        NotFoundError: there is no such file, or nothing in it has such a name.
        ConflictError: the file was changed meanwhile; nothing was committed.

    Example:
        >>> import_(store.run("llama-8b-base"), "model.safetensors", step=0)
    """
    path = Path(source)
    if metadata and IMPORT_KEY in metadata:
        raise UsageError(f"metadata has an entry {IMPORT_KEY!r}, where an import tells its source")
    target = dtypes.target_dtype(dtype)
    found = _read(path, format, allow_pickle=allow_pickle)
    with contextlib.closing(found):
        had = bool(found.tree)
        tree = selected(found.tree, Selection.of(only, exclude))
        if had and not tree:
            raise NotFoundError(f"{path} has nothing named {listed(_names(only))}")
        tree = renamed(tree, Renamer(strip_prefix, rename), strip_prefix, is_flat=found.is_flat)
        state = as_components(tree, component, is_flat=found.is_flat)
        if target is not None:
            _check_cast(state, component, target)
        whole = paths_of(state, found.whole) if found.whole else []
        counter = _Counter(progress)
        state = mapped(state, lambda lazy: counter.watch(_converted(lazy, target)), {})
        counter.start()
        facts = _facts(path, found)
        if target is not None:
            facts["dtype"] = target.name
        if whole:
            facts[WHOLE_KEY] = whole
        latest = store_run.latest
        pending = store_run.save(
            step,
            state,
            metrics=metrics,
            metadata={**(metadata or {}), IMPORT_KEY: facts},
            tags=tags,
            bases=() if latest is None else (latest,),
            allow_pickle=allow_pickle and found.format == "dcp",
            origin="import",
            wait=True,  # from where it lies: files are read chunk by chunk
        )
        return pending.result()


def _names(globs: Globs) -> list[str]:
    return [globs] if isinstance(globs, str) else list(globs or ())


def _read(path: Path, format: str | None, *, allow_pickle: bool) -> Source:
    if not path.exists():
        raise NotFoundError(f"there is no file {path}")
    match sniff(path, format):
        case "torch":
            return read_torch.read(path, allow_pickle=allow_pickle)
        case "npz":
            return read_npz.read(path)
        case "dcp":
            return read_dcp.read(path, allow_pickle=allow_pickle)
        case _:
            return read_safetensors.read(path)


def _check_cast(state: Mapping[Any, Any], component: str | None, target: DType) -> None:
    if component is None and len(state) > 1:
        raise UsageError(
            f"dtype={target.name!r} would convert {listed(map(str, state))} alike",
            hint="import the one to convert by itself, with only= and component=",
        )


def _converted(lazy: LazyArray, target: DType | None) -> LazyArray:
    if target is None or target is lazy.dtype or not dtypes.is_floating(lazy.dtype):
        return lazy
    source = lazy.dtype
    made = converted(lazy, lambda data: dtypes.convert(data, source, target)[0], target)
    # numpy has no dtype for some of them.
    detail = dtypes.numpy_detail(None, target) if lazy.kind == "numpy" else None
    return dataclasses.replace(made, kind="torch" if detail is None else "numpy", detail=detail)


def _facts(path: Path, found: Source) -> dict[str, Any]:
    """What the checkpoint tells about where it came from."""
    files = [{"name": f.path.name, "bytes": f.size, "blake3": f.digest()} for f in found.files]
    facts: dict[str, Any] = {
        "source": os.fspath(path),
        "format": found.format,
        "bytes": sum(file.size for file in found.files),
        "files": files[:MAX_FILES],
    }
    if len(files) == 1:
        facts["blake3"] = files[0]["blake3"]
    elif len(files) > MAX_FILES:
        lines = "".join(f"{file['blake3']}  {file['name']}\n" for file in files)
        facts["files_in_all"] = len(files)
        facts["blake3"] = blake3.blake3(lines.encode("utf-8", "surrogateescape")).hexdigest()
    if found.metadata:
        facts["metadata"] = dict(found.metadata)
    return facts


class _Counter:
    """Counts the bytes that a save has taken; a small tensor is read twice, and counted once."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._seen: set[tuple[int, int]] = set()
        self._done = 0
        self._total = 0

    def start(self) -> None:
        """All tensors are known."""
        if self._progress is not None:
            self._progress(0, self._total)

    def watch(self, lazy: LazyArray) -> LazyArray:
        """The same, counted."""
        progress = self._progress
        if progress is None:
            return lazy
        number = self._total
        self._total += nbytes(lazy.dtype, lazy.shape)

        def read(start: int, stop: int) -> memoryview:
            data = lazy.read(start, stop)
            with self._lock:
                if (number, start) in self._seen:
                    return data
                self._seen.add((number, start))
                self._done += stop - start
                done = self._done
            progress(done, self._total)
            return data

        return dataclasses.replace(lazy, read=read)
