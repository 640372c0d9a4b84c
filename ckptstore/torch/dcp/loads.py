"""One rank's share of a load through DCP: compared, read, verified, placed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckptstore import arrays
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, PartlyRestoredError, StateMismatchError
from ckptstore.load.build import Builder
from ckptstore.load.fetch import Fetcher
from ckptstore.load.plan import Want
from ckptstore.load.saved import Saved, own_parts
from ckptstore.load.select import Selection
from ckptstore.model.boxes import Box
from ckptstore.model.targets import LOAD, Opaque
from ckptstore.ranks import place_in_torch
from ckptstore.torch.dcp import items, trees, values

_SHOWN = 12


class Load:
    """One rank's share of one load."""

    def __init__(
        self, checkpoint: Checkpoint, nodes: dict[str, Any], selection: Selection, *, allow_pickle: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._contents = checkpoint.contents
        self._nodes = nodes
        self._selection = selection
        self._allow_pickle = allow_pickle
        self._builder = Builder(self._contents, allow_pickle=allow_pickle)
        self._wants: list[Want] = []
        self._tensors: list[tuple[ReadItem, torch.Tensor, Any]] = []
        self._values: list[tuple[ReadItem, Any]] = []
        self._problems: list[str] = []

    # --- before anything is read --------------------------------------------------------------

    def plan(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Compares everything; raises StateMismatchError with all that does not fit."""
        asked: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in self._nodes:
                self._problems.append(f"{name}: not in the checkpoint")
            elif item.type is LoadItemType.BYTE_IO:
                self._add_value(item, planner)
            else:
                self._add_tensor(item, planner)
                asked.setdefault(item.dest_index.fqn, []).append(item)
        for name, read_items in asked.items():
            self._check_cover(name, read_items, planner)
        if self._problems:
            shown = "\n  ".join(self._problems[:_SHOWN])
            more = f"\n  ... and {len(self._problems) - _SHOWN} more" if len(self._problems) > _SHOWN else ""
            raise StateMismatchError(
                f"{self._contents} does not fit this state; nothing was loaded:\n  {shown}{more}",
                problems=self._problems,
                hint="StoreReader(run, cast=...) converts dtypes by name",
            )

    def _add_value(self, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.dest_index.fqn
        node = self._nodes[item.storage_index.fqn]
        if isinstance(node, Saved) and node.kind == "torch":
            self._problems.append(f"{name}: a tensor in the checkpoint, asked for as a value")
        elif isinstance(items.live_object(planner, name), torch.Tensor) and not trees.is_tensor(node):
            self._problems.append(f"{name}: a tensor here, {type(node).__name__} in the checkpoint")
        elif isinstance(node, Opaque) and not self._allow_pickle:
            self._problems.append(
                f"{name}: a {node.class_path} that was pickled (StoreReader(run, allow_pickle=True) loads "
                "it, if you trust where it came from)"
            )
        else:
            self._values.append((item, node))

    def _add_tensor(self, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.dest_index.fqn
        node = self._nodes[item.storage_index.fqn]
        if not (isinstance(node, Saved) and node.kind == "torch"):
            self._problems.append(f"{name}: a tensor here, a value in the checkpoint")
            return
        tensor = self._contents.layout.tensors[node.index]
        chunk = item.storage_index.offset or (0,) * len(tensor.shape)
        offsets = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
        box = Box(offsets, tuple(item.lengths))
        if box.numel and box.intersect(Box.whole(tensor.shape)) != box:
            self._problems.append(
                f"{name}: {list(box.sizes)} at {list(offsets)} is outside of the stored tensor"
            )
            return
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != box.sizes:
            self._problems.append(f"{name}: {list(target.shape)} here, {list(box.sizes)} planned")
            return
        cast = str(target.dtype) != f"torch.{tensor.dtype.name}"
        if cast and not self._selection.may_cast(name):
            self._problems.append(
                f"{name}: dtype {str(target.dtype).removeprefix('torch.')} here, {tensor.dtype.name} in the "
                f"checkpoint (cast={name!r} converts it)"
            )
            return
        reason = arrays.unwritable(target) if box.numel else None
        if reason is not None:
            self._problems.append(f"{name}: {reason}")
            return
        raw = None if cast else arrays.raw_view(target)
        if raw is not None:
            self._wants.append(Want(node.index, box, raw))
            self._tensors.append((item, target, None))
        else:
            loaded = self._builder.box(node.index, box, "torch") if box.numel else None
            self._tensors.append((item, target, loaded))

    def _check_cover(self, name: str, read_items: list[ReadItem], planner: LoadPlanner) -> None:
        """That what is here of a tensor is filled whole: nothing keeps its old values."""
        live = items.live_object(planner, name)
        if not isinstance(live, torch.Tensor) or not hasattr(planner, "lookup_tensor"):
            return
        by_part: dict[tuple[int, ...], list[ReadItem]] = {}
        for item in read_items:
            by_part.setdefault(tuple(item.dest_index.offset or ()), []).append(item)
        for offset, group in by_part.items():
            part = planner.lookup_tensor(group[0].dest_index)
            filled = sum(math.prod(item.lengths) for item in group)
            if filled != part.numel():
                self._problems.append(f"{name}: the plan fills {filled} of the {part.numel()} elements here")
            elif offset:
                items.check_box(live, Box(offset, tuple(part.shape)), name)

    # --- reading ------------------------------------------------------------------------------

    def carry_out(self, planner: LoadPlanner) -> None:
        """Reads and places; hands values to the planner when all bytes are in and verified."""
        fresh = self._fresh_nodes()
        made = [(item, self._placed(fresh[item.storage_index.fqn])) for item, _ in self._values]
        fetcher = Fetcher(self._checkpoint.tier, self._contents)
        try:
            fetcher.fetch([*self._wants, *self._builder.wants])
        except CkptstoreError as error:
            if fetcher.done.placed and self._wants:
                raise PartlyRestoredError(
                    f"loading {self._contents} failed after it had begun: {error.message}; "
                    "the state is a mixture of old and new and must not be trained on",
                    hint=error.hint or "load another checkpoint into it, or start the process anew",
                ) from error
            raise
        for item, target, loaded in self._tensors:
            if loaded is not None:
                arrays.assign(target, loaded)
            planner.commit_tensor(item, target)
        for item, node in made:
            planner.load_bytes(item, values.encode(self._builder.finish(node)))

    def _fresh_nodes(self) -> dict[str, Any]:
        """The values once more: building them takes their containers apart."""
        if not self._values:
            return {}
        tree = own_parts(self._contents.decode_tree(Saved), LOAD, place_in_torch()[0]).tree
        return trees.flatten(tree, str(self._contents))[0]

    def _placed(self, node: Any) -> Any:
        return trees.replaced(node, lambda leaf: self._builder.tensor(leaf.index, leaf.kind, leaf.detail))
