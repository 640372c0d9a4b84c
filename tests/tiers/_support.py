"""Stores of several tiers in directories, with one checkpoint in all of them, and ways to spoil a tier."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.checkpoint import Checkpoint
from ckptstore.replicate.copying import copy_checkpoint
from ckptstore.store import Store
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier import layout
from ckptstore.tier.copies import Copy
from tests.crash._support import CHUNK_BYTES, make_state, quiet

RUN = "train/exp 1"
STATE = make_state(1)


def make_store(root: Path, names: Iterable[str] = ("hot", "cold"), steps: Iterable[int] = (1,)) -> None:
    """Tiers of those names below `root`, the checkpoints in each."""
    tiers = [f'[[tiers]]\nname = "{name}"\nurl = "{name}"\nreplicate = "manual"\n' for name in names]
    (root / "ckptstore.toml").write_text("\n".join(tiers))
    with ckptstore.init(root / "ckptstore.toml", chunk_bytes=CHUNK_BYTES, environment=quiet()) as store:
        with store.run(RUN) as run:
            for step in steps:
                run.save(step, make_state(step)).result()
        for step in steps:
            for tier in store.tiers[1:]:
                copy_checkpoint(store.run(RUN)[step].copies, tier)


def clone(template: Path, root: Path) -> None:
    """The same store once more; folders are made as they are needed, the manifest from what is there."""
    for path in template.rglob("*"):
        if path.is_file() and not path.name.startswith("manifest.db"):
            target = root / path.relative_to(template)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def open_store(root: Path) -> Store:
    return ckptstore.open(root / "ckptstore.toml", environment=quiet())


def latest(root: Path) -> Checkpoint:
    found = open_store(root).run(RUN).latest
    assert found is not None
    return found


def copy_in(checkpoint: Checkpoint, name: str) -> Copy:
    return next(copy for copy in checkpoint.copies if copy.tier.name == name)


def with_faults(checkpoint: Checkpoint, name: str, *script: Fault) -> FaultBackend:
    """The tier from now on fails as told; the log has all that is asked of it."""
    backend: Any = copy_in(checkpoint, name).tier.backend
    backend.inner = FaultBackend(backend.inner, script)
    return backend.inner


def objects(checkpoint: Checkpoint, name: str, prefix: str) -> list[str]:
    """Keys of a copy's objects that hold chunks."""
    return [key for key in copy_in(checkpoint, name).contents.keys.keys if key.startswith(prefix)]


def table_objects(checkpoint: Checkpoint, name: str, table: str) -> list[str]:
    return [piece.key for piece in copy_in(checkpoint, name).record.tables[table].pieces]


def record_key(checkpoint: Checkpoint, name: str) -> str:
    copy = copy_in(checkpoint, name)
    return layout.commit_key(copy.run_key, copy.attempt)


def place_of(checkpoint: Checkpoint, name: str, tensor: str) -> tuple[str, int]:
    """(key, offset) of the first chunk of a tensor in a tier."""
    contents = copy_in(checkpoint, name).contents
    row = int(contents.layout.chunks.first[contents.layout.by_name[tensor]])
    return contents.keys.key(int(contents.locations.object[row])), int(contents.locations.offset[row])


def object_of(checkpoint: Checkpoint, name: str, tensor: str) -> str:
    return place_of(checkpoint, name, tensor)[0]


def flip_chunk(root: Path, checkpoint: Checkpoint, name: str, tensor: str) -> str:
    """Flips a bit in the first chunk of a tensor; the key of its object."""
    key, offset = place_of(checkpoint, name, tensor)
    flip(root / name / key, offset)
    return key


def flip(path: Path, at: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


SPOILERS: dict[str, Callable[[Path], None]] = {"flipped": flip, "short": short, "missing": Path.unlink}
