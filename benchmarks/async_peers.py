"""One small adapter per library that saves in the background: `save` returns when training may go on.

Each is used as its documentation says. What a tuned user keeps between saves (a stager, a manager) is kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import disk, peers
from benchmarks.states import State

_LARGE_BYTES = 1 << 20


class AsyncPeer:
    """A library kept open over several saves; the checkpoint of step n goes below the folder of `open`."""

    name = ""

    def open(self, folder: Path) -> None:
        """What a training does once, at its start."""
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"{step}"

    def prepare(self, state: State) -> bool:
        """Begins to get ready for the first save, in the background. False: there is no such call."""
        return False

    def save(self, state: State, step: int) -> None:
        """Everything that training waits for."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits until the last save is on its way no more, and raises what it raised."""
        raise NotImplementedError

    def load(self, state: State, step: int) -> None:
        """Fills the tensors of `state`."""
        raise NotImplementedError

    def forget(self, step: int) -> None:
        """Frees the disk between saves, where one save is one folder."""
        disk.remove(self.path(step))

    def close(self) -> None:
        """Gives buffers and processes back."""


class Ckptstore(AsyncPeer):
    name = "ckptstore"

    def open(self, folder: Path) -> None:
        super().open(folder)
        library: Any = importlib.import_module("ckptstore")
        self._run = library.open(str(folder / "store"), create=True).run("bench")
        self._pending: Any = None

    def prepare(self, state: State) -> bool:
        self._run.prepare(state)
        return True

    def save(self, state: State, step: int) -> None:
        self._pending = self._run.save(step, state)

    def finish(self) -> None:
        self._pending.result()

    def load(self, state: State, step: int) -> None:
        self._pending.result().restore(state)

    def forget(self, step: int) -> None:
        """Deletes the large objects of this step behind the store's back; here every byte changes, so that no
        later save reuses them. Their names hold the step.
        """
        for file in disk.files(self.folder / "store"):
            if f"-{step}-" in file.name and file.stat().st_size >= _LARGE_BYTES:
                file.unlink()

    def close(self) -> None:
        self._run.close()


class DcpAsync(AsyncPeer):
    """torch's DCP: out of the box or with a `DefaultStager` that is kept; a thread or a process writes."""

    def __init__(self, *, process: bool = False, kept: bool = False, async_staging: bool = False) -> None:
        self._library: Any = importlib.import_module("torch.distributed.checkpoint")
        self._saver: Any = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        self._staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
        self._process, self._kept, self._async_staging = process, kept, async_staging
        stager = ", kept stager" if kept else ""
        self.name = (
            f"DCP async, {'process' if process else 'thread'}{stager}{', async staging' * async_staging}"
        )

    def open(self, folder: Path) -> None:
        super().open(folder)
        types = self._saver.AsyncCheckpointerType
        self._options: dict[str, Any] = {
            "async_checkpointer_type": types.PROCESS if self._process else types.THREAD,
            "no_dist": not self._process,
        }
        self._stager: Any = None
        if self._kept:
            # Pinned memory and non-blocking copies need an accelerator; a process needs shared memory.
            options = self._staging.StagingOptions(False, self._process, self._async_staging, False)
            self._stager = self._staging.DefaultStager(options)
            self._options["async_stager"] = self._stager
        if self._process:
            _group_of_one()

    def save(self, state: State, step: int) -> None:
        self._response = self._saver.async_save(state, checkpoint_id=self.path(step), **self._options)

    def finish(self) -> None:
        getattr(self._response, "upload_completion", self._response).result()

    def load(self, state: State, step: int) -> None:
        self._library.load(state, checkpoint_id=self.path(step), no_dist=True)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class DcpStaged(DcpAsync):
    """Async staging, and `save` waits for it: what a training must do before its next update."""

    def __init__(self) -> None:
        super().__init__(kept=True, async_staging=True)
        self.name += ", waited for"

    def save(self, state: State, step: int) -> None:
        super().save(state, step)
        self._response.staging_completion.result()


class Torchsnapshot(AsyncPeer):
    name = "torchsnapshot"

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("torchsnapshot")

    def save(self, state: State, step: int) -> None:
        application = {"app": self._library.StateDict(**state)}
        self._pending = self._library.Snapshot.async_take(str(self.path(step)), application)

    def finish(self) -> None:
        self._pending.wait()

    def load(self, state: State, step: int) -> None:
        snapshot = self._library.Snapshot(str(self.path(step)))
        snapshot.restore({"app": self._library.StateDict(**state)})


class TorchCheckpointing(AsyncPeer):
    """torch_checkpointing: one manager, kept; its staging goes on after `save` returned."""

    name = "torch_checkpointing"

    def __init__(self) -> None:
        importlib.import_module("torch_checkpointing")

    def open(self, folder: Path) -> None:
        super().open(folder)
        self._manager = peers.checkpoint_manager(asynchronous=True)
        # Its process starts with it, and a training's first save comes long after that.
        self._manager.save(str(folder / "begin"), {"begin": torch.zeros(1)}).result()

    def prepare(self, state: State) -> bool:
        self._manager.prewarm_staging(state)
        return True

    def _take_lock(self) -> None:
        with self._manager.lock():
            pass

    def save(self, state: State, step: int) -> None:
        self._future = self._manager.save(str(self.path(step)), state)

    def finish(self) -> None:
        self._future.result()

    def load(self, state: State, step: int) -> None:
        self._manager.load(str(self.path(step)), into=state)

    def close(self) -> None:
        self._manager.close()


class TorchCheckpointingLocked(TorchCheckpointing):
    """And the lock that trainings are told to take around the update, which waits for the staging."""

    name = "torch_checkpointing, until lock()"

    def save(self, state: State, step: int) -> None:
        super().save(state, step)
        self._take_lock()


CANDIDATES: dict[str, Callable[[], list[AsyncPeer]]] = {
    "ckptstore": lambda: [Ckptstore()],
    "dcp": lambda: [
        DcpAsync(),
        DcpAsync(process=True),
        DcpAsync(kept=True),
        DcpAsync(kept=True, async_staging=True),
        DcpStaged(),
        DcpAsync(process=True, kept=True),
    ],
    "torchsnapshot": lambda: [Torchsnapshot()],
    "torch_checkpointing": lambda: [TorchCheckpointing(), TorchCheckpointingLocked()],
}


def available(keys: list[str]) -> tuple[list[AsyncPeer], dict[str, str]]:
    """The peers of `keys` that can be imported here, and the reason for each that cannot."""
    found: list[AsyncPeer] = []
    skipped: dict[str, str] = {}
    for key in keys:
        try:
            found += CANDIDATES[key]()
        except Exception as error:  # noqa: BLE001 - a library broken beside this torch may raise anything
            skipped[key] = f"{type(error).__name__}: {error}"
    return found, skipped


def _group_of_one() -> None:
    """DCP's process needs a process group, as a training has one."""
    dist: Any = importlib.import_module("torch.distributed")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
