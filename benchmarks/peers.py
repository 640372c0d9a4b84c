"""One small adapter per library: save a state below a folder, load it into tensors that exist.

Peers are used as their documentation says, with no tricks. A library that leaves its files in the page
cache appears twice: as it comes, and wrapped in `Durable`, which is what a fair comparison looks at.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import disk, orbax
from benchmarks.states import State, copy_into, flat, size_bytes

BOTH = frozenset({"save", "load"})
SAVE = frozenset({"save"})
LOAD = frozenset({"load"})
_DCP_THREADS = (1, 2, 4)  # the default, and those among which the best is found


class Peer(Protocol):
    """What the harness needs of a library. `path` is a folder of this save alone."""

    name: str
    durable: bool
    """True when everything is on the disk, directories included, as `save` returns."""
    rows: frozenset[str]
    """Which rows to time; a peer that only loads still saves, outside the clock."""

    def prepare(self, state: State, path: Path) -> None:
        """What users do once, not at every save: outside the clock, before `save`."""

    def save(self, state: State, path: Path) -> None: ...

    def load(self, state: State, path: Path) -> None:
        """Fill the tensors of `state`, all of them."""


class _Base:
    name = ""
    durable = False
    rows = BOTH

    def prepare(self, state: State, path: Path) -> None:
        path.mkdir(parents=True)


class Durable:
    """A peer whose files and directories are flushed before its save counts as done."""

    durable = True
    rows = SAVE  # its files are those of the peer inside, and so are its loads

    def __init__(self, inner: Peer) -> None:
        self._inner = inner
        self.name = f"{inner.name} + fsync"
        self.prepare = inner.prepare
        self.load = inner.load

    def save(self, state: State, path: Path) -> None:
        self._inner.save(state, path)
        disk.fsync_tree(path)


class Ckptstore(_Base):
    """ckptstore: the store is made outside the clock, the session is opened inside."""

    name = "ckptstore"
    durable = True

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("ckptstore")
        self._store: Any = None

    def prepare(self, state: State, path: Path) -> None:
        self._store = self._library.open(str(path), create=True)

    def save(self, state: State, path: Path) -> None:
        run = self._store.run("bench")
        run.save(1, state, wait=True)
        run.close()

    def load(self, state: State, path: Path) -> None:
        self._library.open(str(path)).run("bench").latest.restore(state)


class CkptstoreAgain(Ckptstore):
    """A later save of the same process. Another run, so that no byte is reused."""

    name = "ckptstore, second save"
    rows = SAVE

    def prepare(self, state: State, path: Path) -> None:
        super().prepare(state, path)
        before = self._store.run("before")
        before.save(1, state, wait=True)
        before.close()


class TorchSave(_Base):
    name = "torch.save"

    def save(self, state: State, path: Path) -> None:
        torch.save(state, path / "state.pt")

    def load(self, state: State, path: Path) -> None:
        copy_into(state, torch.load(path / "state.pt", map_location="cpu", weights_only=True))


class TorchMmap(TorchSave):
    name = "torch.load(mmap=True)"
    rows = LOAD

    def load(self, state: State, path: Path) -> None:
        copy_into(state, torch.load(path / "state.pt", map_location="cpu", weights_only=True, mmap=True))


class Safetensors(_Base):
    """load_file maps the file, so this is also the mmap line: nothing is checked."""

    name = "safetensors"

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("safetensors.torch")

    def save(self, state: State, path: Path) -> None:
        self._library.save_file(flat(state), path / "state.safetensors")

    def load(self, state: State, path: Path) -> None:
        loaded = self._library.load_file(path / "state.safetensors")
        for name, tensor in flat(state).items():
            tensor.copy_(loaded[name])


class Dcp(_Base):
    """torch.distributed.checkpoint: flushes its files by default, but no directory."""

    def __init__(self, threads: int) -> None:
        self._library: Any = importlib.import_module("torch.distributed.checkpoint")
        self._threads = threads
        self.name = "DCP" if threads == 1 else f"DCP, {threads} threads"

    def save(self, state: State, path: Path) -> None:
        writer = self._library.FileSystemWriter(path, thread_count=self._threads)
        self._library.save(state, storage_writer=writer, no_dist=True)

    def load(self, state: State, path: Path) -> None:
        reader = self._library.FileSystemReader(path)
        self._library.load(state, storage_reader=reader, no_dist=True)


class Torchsnapshot(_Base):
    name = "torchsnapshot"

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("torchsnapshot")

    def save(self, state: State, path: Path) -> None:
        self._library.Snapshot.take(str(path), {"app": self._library.StateDict(**state)})

    def load(self, state: State, path: Path) -> None:
        self._library.Snapshot(str(path)).restore({"app": self._library.StateDict(**state)})


class TorchCheckpointing(_Base):
    """torch_checkpointing: a sync manager, kept.

    Its O_DIRECT writes fail on ext4 (they are not aligned) and do not fall back: switched off, as its
    documentation says for such file systems.
    """

    name = "torch_checkpointing"

    def __init__(self) -> None:
        self._manager = checkpoint_manager(asynchronous=False)

    def prepare(self, state: State, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)  # it makes the folder itself, by a rename

    def save(self, state: State, path: Path) -> None:
        self._manager.save(str(path), state)

    def load(self, state: State, path: Path) -> None:
        self._manager.load(str(path), into=state)


def checkpoint_manager(*, asynchronous: bool) -> Any:
    """A manager of torch_checkpointing with its defaults, but for O_DIRECT."""
    library: Any = importlib.import_module("torch_checkpointing")
    storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
    config = library.CheckpointManager.Config
    made = config.with_async_save() if asynchronous else config.with_sync_save()
    made.storage_config = storage.LocalFileSystemStorageConfig(use_direct_io=False)
    return library.CheckpointManager(made)


class Orbax:
    """Orbax, in a process of its own, on jax arrays; it makes new arrays when it loads."""

    rows = BOTH

    def __init__(self, *, fsync: bool) -> None:
        orbax.python()
        self.name = "Orbax + fsync" if fsync else "Orbax"
        self.durable = fsync
        self._fsync = fsync

    def sample(self, state: State, path: Path) -> dict[str, float]:
        """Seconds by row, measured and checked in that process."""
        shapes = orbax.shapes_of(state)
        answer = orbax.ask("save_load", path, shapes=shapes, fsync=self._fsync, seed=0)
        if answer.pop("bytes") < 0.8 * size_bytes(state):  # it compresses, by its defaults
            raise RuntimeError("Orbax did not write the whole state")
        return answer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer to try: its key on the command line and how to make its lines."""

    key: str
    make: Callable[[], list[Peer | Orbax]]


CANDIDATES = (
    Candidate("ckptstore", lambda: [Ckptstore(), CkptstoreAgain()]),
    Candidate("torch", lambda: [TorchSave(), Durable(TorchSave()), TorchMmap()]),
    Candidate("safetensors", lambda: [Safetensors(), Durable(Safetensors())]),
    Candidate("dcp", lambda: [*map(Dcp, _DCP_THREADS), *(Durable(Dcp(n)) for n in _DCP_THREADS)]),
    Candidate("torchsnapshot", lambda: [Torchsnapshot(), Durable(Torchsnapshot())]),
    Candidate("torch_checkpointing", lambda: [TorchCheckpointing(), Durable(TorchCheckpointing())]),
    Candidate("orbax", lambda: [Orbax(fsync=False), Orbax(fsync=True)]),
)


def available(only: list[str]) -> tuple[list[Peer | Orbax], dict[str, str]]:
    """The peers that can be imported here, and the reason for each that cannot.

    A library that is broken beside this torch may raise anything while it is imported: any reason is kept.
    """
    peers: list[Peer | Orbax] = []
    skipped: dict[str, str] = {}
    for candidate in CANDIDATES:
        if only and candidate.key not in only:
            continue
        try:
            peers += candidate.make()
        except Exception as error:  # noqa: BLE001 - see above
            skipped[candidate.key] = f"{type(error).__name__}: {error}"
    return peers, skipped
