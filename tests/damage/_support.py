"""A store in a directory with three checkpoints, and ways to spoil files in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import ckptstore
from ckptstore.store import Store
from ckptstore.tier import layout
from tests.crash._support import CHUNK_BYTES, TRAIN, make_state, quiet

STEPS = (1, 2, 3)


def open_quiet(directory: Path) -> Store:
    return ckptstore.open(directory, environment=quiet())


def make_store(directory: Path) -> None:
    """Three checkpoints of one run."""
    with ckptstore.init(directory, chunk_bytes=CHUNK_BYTES, environment=quiet()) as store:
        run = store.run(TRAIN)
        for step in STEPS:
            run.save(step, make_state(step)).result()
        run.close()


def record_file(store: Store, directory: Path, step: int) -> Path:
    run = store.run(TRAIN)
    return directory / layout.commit_key(run.key, run[step].record.attempt)


def own_files(store: Store, directory: Path, step: int) -> dict[str, list[Path]]:
    """The files that only this step names: "chunk", "pack" and "table"."""
    run = store.run(TRAIN)
    contents = run[step].contents
    others = {key for other in STEPS if other != step for key in run[other].contents.object_sizes}
    pieces = [piece.key for ref in contents.record.tables.values() for piece in ref.pieces]
    found: dict[str, list[Path]] = {
        "chunk": [],
        "pack": [],
        "table": [directory / key for key in pieces if key not in others],
    }
    for key in contents.keys.keys:
        if key not in others:
            found["pack" if key.startswith("packs/") else "chunk"].append(directory / key)
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.rename(path.with_name("moved-away"))
        make(path)

    return spoil


SPOILERS: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "emptied": lambda path: os.truncate(path, 0),
    "first byte flipped": lambda path: flip(path, 0),
    "middle byte flipped": lambda path: flip(path, path.stat().st_size // 2),
    "last byte flipped": lambda path: flip(path, -1),
    "zeroed": zero,
    "deleted": lambda path: path.unlink(),
    "a directory": _replace(lambda path: path.mkdir()),
    "a symlink to itself": _replace(lambda path: path.symlink_to(path.with_name("moved-away"))),
    "a dangling symlink": _replace(lambda path: path.symlink_to("nowhere")),
    "a FIFO": _replace(os.mkfifo),
}
