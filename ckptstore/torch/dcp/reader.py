"""Loading through ``torch.distributed.checkpoint``: every byte verified, every element accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    ConflictError,
    NotFoundError,
    StateMismatchError,
    UsageError,
)
from ckptstore.load.saved import Saved, own_parts
from ckptstore.load.select import Globs, Selection
from ckptstore.model.layout import Tensor
from ckptstore.model.targets import LOAD
from ckptstore.ranks import place_in_torch
from ckptstore.torch.dcp import sessions, trees
from ckptstore.torch.dcp.ids import CheckpointId, split, step_of, text_of
from ckptstore.torch.dcp.loads import Load

if TYPE_CHECKING:
    from ckptstore.run import Run


class StoreReader(StorageReader):
    """Loads checkpoints of a run with ``dcp.load``, whoever saved them: DCP or ``run.save``.

    Args:
        run: the run; every rank opens the same one.
        allow_pickle: rebuild values that were pickled at save. Runs code from the store: only for stores
            that you trust.
        cast: names of tensors whose dtype may be converted; True for all.
        resume: the run's next save continues from what was loaded, as after ``run.restore``; False for a
            warm start or an evaluation.

    Example:
        >>> dcp.load(state, storage_reader=StoreReader(run))                         # the latest
        >>> dcp.load(state, checkpoint_id="llama@500", storage_reader=StoreReader(run))
    """

    def __init__(
        self,
        run: Run,
        *,
        allow_pickle: bool = False,
        cast: Globs | bool = None,
        resume: bool = True,
    ) -> None:
        super().__init__()
        self.run = run
        self._allow_pickle = allow_pickle
        self._selection = Selection.of(cast=cast)
        self._resume = resume
        self._checkpoint_id: str | None = None
        self._checkpoint: Checkpoint | None = None
        self._nodes: dict[str, Any] = {}

    # --- which checkpoint ---------------------------------------------------------------------

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Says which checkpoint the next load takes: as for saving, or any ``RUN@...``; None: as before.

        Raises:
            UsageError: the id names no checkpoint, or another run.
        """
        self._checkpoint = None
        if checkpoint_id is not None:
            text = text_of(checkpoint_id)
            self._selector(text)
            self._checkpoint_id = text

    def _selector(self, text: str) -> int | str:
        prefix = f"{self.run.name}@"
        if text.startswith(prefix) and split(text)[0] is None and len(text) > len(prefix):
            return text.removeprefix(prefix)
        return step_of(text, self.run.name)

    @property
    def checkpoint_id(self) -> str | None:
        """The id of the next load; None for the latest."""
        return self._checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether an id names a step, or a checkpoint of a run in another way."""
        text = text_of(checkpoint_id)
        try:
            step_of(text, None)
        except UsageError:
            return "@" in text
        return True

    def _find(self) -> Checkpoint:
        if self._checkpoint_id is not None:
            return self.run.find(self._selector(self._checkpoint_id))
        found = self.run.latest
        if found is None:
            raise NotFoundError(
                f"run {self.run.name!r} has no checkpoint that can be restored",
                hint=f"`ckptstore ls {self.run.name}` shows what there is",
            )
        return found

    # --- one load, in the order of DCP's calls ------------------------------------------------

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What the checkpoint holds, in DCP's words.

        Raises:
            NotFoundError: there is no such checkpoint.
            DamageError: its tables cannot be read.
        """
        self._checkpoint = checkpoint = self._find()
        with checkpoint.reading():
            layout = checkpoint.contents.layout
            tree = checkpoint.contents.decode_tree(Saved)
        tree = own_parts(tree, LOAD, place_in_torch()[0]).tree
        self._nodes, paths = trees.flatten(tree, str(checkpoint.contents))
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, node in self._nodes.items():
            is_tensor = isinstance(node, Saved) and node.kind == "torch"
            described[name] = _described(layout.tensors[node.index]) if is_tensor else BytesStorageMetadata()
        return Metadata(
            state_dict_metadata=described,
            planner_data=paths,
            storage_meta=StorageMeta(checkpoint_id=self._checkpoint_id, load_id=checkpoint.id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is needed here."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the checkpoint that this rank has found: all must load the same."""
        return LoadPlan(plan.items, self._current().id, plan.planner_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks have found the same checkpoint.

        Raises:
            ConflictError: they have not; nothing was loaded.
        """
        found = sorted({str(plan.storage_data) for plan in plans})
        if len(found) > 1:
            raise ConflictError(
                f"the ranks would load different checkpoints of run {self.run.name!r}: {', '.join(found)}",
                hint="one was committed just now; load again, or give checkpoint_id=",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads, verifies and places what the plan asks for.

        Raises:
            StateMismatchError: lists every difference; nothing was read.
            PartlyRestoredError: reading failed after tensors had been written to.
        """
        checkpoint = self._current()
        load = Load(checkpoint, self._nodes, self._selection, allow_pickle=self._allow_pickle)
        load.plan(plan, planner)
        with checkpoint.reading():
            load.carry_out(planner)
        if self._resume:
            sessions.resume_from(self.run, checkpoint)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _current(self) -> Checkpoint:
        if self._checkpoint is None:
            raise UsageError("no load is under way", hint="DCP calls read_metadata first")
        return self._checkpoint


def _described(tensor: Tensor) -> TensorStorageMetadata:
    dtype = getattr(torch, tensor.dtype.name, None)
    if dtype is None:
        raise StateMismatchError(f"{tensor.name}: this torch has no dtype {tensor.dtype.name}")
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks)
