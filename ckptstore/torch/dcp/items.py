"""From the items of a DCP save plan to what one rank writes: layout, live tensors, flat tree."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptstore import arrays, dtensors
from ckptstore.errors import SaveFailedError, UnsupportedValueError
from ckptstore.load.saved import Saved
from ckptstore.model import unpack
from ckptstore.model.boxes import Box, Shape
from ckptstore.model.dtypes import DType
from ckptstore.model.layout import Layout, Tensor, printable
from ckptstore.save.flatten import FlatState, flatten_state
from ckptstore.torch.dcp import trees, values


@dataclasses.dataclass(slots=True)
class _Pieces:
    """What this rank has of one tensor."""

    dtype: DType
    shape: Shape
    parts: list[tuple[Box, torch.Tensor]] = dataclasses.field(default_factory=list)


class Collector:
    """Takes a plan's items apart; everything that can be refused is refused here.

    Dtypes, boxes and paths are those of the live state, not of the plan: a cached plan may be of an
    earlier save, and DCP compares neither dtypes nor paths before it takes one.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool) -> None:
        self._plan = plan
        self._planner = planner
        self._allow_pickle = allow_pickle
        self._tensors: dict[str, _Pieces] = {}
        self._values: dict[str, Any] = {}

    def collect(self, chunk_bytes: int) -> FlatState:
        """What this rank has to write.

        Returns:
            Its tree is flat, see :mod:`ckptstore.torch.dcp.trees`.

        Raises:
            UnsupportedValueError: names what cannot be stored; nothing was written.
            SaveFailedError: the plan does not fit the state.
        """
        for item in self._plan.items:
            resolved = self._planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                if not isinstance(resolved, io.BytesIO):
                    raise SaveFailedError(f"{item.index.fqn}: the planner gives no bytes for it")
                name = item.index.fqn
                self._values[name] = values.decode(resolved, name, allow_pickle=self._allow_pickle)
            else:
                self._add(item, resolved)
        return self._flat(chunk_bytes)

    def _add(self, item: WriteItem, resolved: Any) -> None:
        name = item.index.fqn
        data = item.tensor_data
        if not isinstance(resolved, torch.Tensor) or data is None:
            raise SaveFailedError(f"{name}: the planner gives no tensor for it")
        tensor = resolved.detach()
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        shape = tuple(data.size)
        if arrays.composite_of(tensor, (name,)) is not None:
            if box.sizes != shape:
                raise UnsupportedValueError(f"{name} is a shard of a {type(tensor).__name__}", path=name)
            self._values[name] = tensor
            return
        info = arrays.describe(tensor, (name,))
        if info.shape != box.sizes:
            raise SaveFailedError(
                f"{name}: the plan says {list(box.sizes)} at {list(box.offsets)}, the state has "
                f"{list(info.shape)}",
                hint="a cached plan of another state? Give planners of different states different classes",
            )
        check_box(live_object(self._planner, name), box, name)
        pieces = self._tensors.setdefault(name, _Pieces(info.dtype, shape))
        if (pieces.dtype, pieces.shape) != (info.dtype, shape):
            raise SaveFailedError(f"{name}: its shards on this rank are of different tensors")
        if box.numel:
            pieces.parts.append((box, tensor))

    def _path(self, name: str) -> tuple[Any, ...]:
        for mapping in (getattr(self._planner, "mappings", None), self._plan.planner_data):
            if isinstance(mapping, Mapping) and mapping.get(name):
                return tuple(mapping[name])
        return (name,)  # a planner that does not flatten, or renames

    def _flat(self, chunk_bytes: int) -> FlatState:
        paths = {name: self._path(name) for name in [*self._tensors, *self._values]}
        inner = flatten_state(self._values, chunk_bytes, allow_pickle=self._allow_pickle)
        tensors: dict[str, tuple[Tensor, tuple[Any, ...]]] = {}
        for tensor, sources in zip(inner.layout.tensors, inner.sources, strict=True):
            component = _component(tensor.name, paths)
            tensors[tensor.name] = (dataclasses.replace(tensor, component=component), sources)
        for name, pieces in self._tensors.items():
            if printable(name) in tensors:
                raise UnsupportedValueError(f"two entries of the state are called {name}", path=name)
            parts = sorted(pieces.parts, key=lambda part: part[0].offsets)
            boxes = tuple(box for box, _ in parts)
            tensor = Tensor(printable(name), _first(paths[name]), pieces.dtype, pieces.shape, "torch", boxes)
            tensors[tensor.name] = (tensor, tuple(array for _, array in parts))
        names = sorted(tensors)
        number = {name: i for i, name in enumerate(names)}
        aliases = tuple((name, number[inner.layout.tensors[i].name]) for name, i in inner.layout.aliases)
        layout = Layout(tuple(tensors[name][0] for name in names), aliases, chunk_bytes)

        def numbered(index: int, kind: str, detail: str | None) -> Saved:
            return Saved(number[inner.layout.tensors[index].name], kind, detail)

        flat: trees.FlatTree = {}
        decoded = unpack.decode(inner.tree, numbered, "the values of a plan")
        for name, value in decoded.items():
            flat[name] = [list(paths[name]), value]
        for name in self._tensors:
            flat[name] = [list(paths[name]), Saved(number[printable(name)], "torch", None)]
        components = tuple(dict.fromkeys(_first(path) for path in paths.values()))
        return FlatState(layout, tuple(tensors[name][1] for name in names), trees.pack(flat), components)


def _first(path: tuple[Any, ...]) -> str:
    return printable(str(path[0]))


def _component(name: str, paths: Mapping[str, tuple[Any, ...]]) -> str:
    """Of a tensor inside of a value: what the value belongs to."""
    owner = name
    while owner not in paths and "." in owner:
        owner = owner.rpartition(".")[0]
    return _first(paths.get(owner, (name,)))


def live_object(planner: Any, name: str) -> Any:
    """What stands in the state under a name, where the planner keeps it as torch's own do; else None."""
    state = getattr(planner, "state_dict", None)
    return state.get(name) if isinstance(state, Mapping) else None


def check_box(live: Any, box: Box, name: str) -> None:
    """That DCP's one box says rightly what a DTensor holds here.

    Raises:
        UnsupportedValueError: it does not: such a shard is no rectangle.
    """
    if not dtensors.is_dtensor(live) or not box.numel:
        return
    boxes = [found for found, _ in dtensors.boxes_of(live, name)]
    if boxes != [box]:
        raise UnsupportedValueError(
            f"{name} is a DTensor with the placements {tuple(live.placements)}: its part here is no "
            f"rectangle at {list(box.offsets)} of size {list(box.sizes)}, as DCP says, but {len(boxes)} "
            "other boxes",
            path=name,
            hint="run.save and run.restore handle it; or redistribute it to Shard(...) before",
        )
