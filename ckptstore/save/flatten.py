"""From a live state to a layout, its arrays and its tree: everything is refused here or never."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptstore import arrays, shards
from ckptstore.errors import UnsupportedValueError, UsageError
from ckptstore.model import values
from ckptstore.model.boxes import Box, Shape
from ckptstore.model.dtypes import BY_NAME
from ckptstore.model.layout import Layout, Tensor, assign_names, printable
from ckptstore.model.plain import MAX_TREE_BYTES, Composite, Leaf, StatePath, class_path_of, show_path
from ckptstore.model.targets import PerRankValues

_EXTRA_STATE = "_extra_state"  # what torch.nn.Module.state_dict calls it

BLOB_BYTES = 64 << 10
"""From this size, bytes and str are stored as tensors are, not in the tree."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlatState:
    """A state ready to be written.

    Attributes:
        layout: its tensors, sorted by name.
        sources: the live arrays of each tensor, one per box, in layout order.
        tree: the packed tree.
        components: the state's top-level keys, those without a tensor too.
        may_differ: names of tensors whose bytes may differ between ranks by design (buffers).
    """

    layout: Layout
    sources: tuple[tuple[Any, ...], ...]
    tree: bytes
    components: tuple[str, ...]
    may_differ: tuple[str, ...] = ()


def flatten_state(
    state: Mapping[Any, Any],
    chunk_bytes: int,
    *,
    allow_pickle: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> FlatState:
    """Takes a state apart.

    Args:
        state: nested containers of tensors, arrays, values and objects with ``state_dict``.
        chunk_bytes: the store's.
        allow_pickle: values of other types are pickled into the tree instead of being refused.
        rank, world_size: whose :class:`PerRank` values these are, and of how many.

    Raises:
        UsageError: the state is not a dict.
        UnsupportedValueError: names the path of what cannot be stored; nothing was written.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            f"state must be a dict of components, not {class_path_of(state)}",
            hint="save {'model': model, 'optimizer': optimizer, ...} or a ckptstore.TrainState",
        )
    collector = _Collector(allow_pickle, rank, world_size)
    plain = values.flatten(dict(state), collector.leaf_of)
    return collector.finish(plain, chunk_bytes, tuple(printable(str(key)) for key in state))


class _Collector:
    def __init__(self, allow_pickle: bool, rank: int, world_size: int) -> None:
        self._allow_pickle = allow_pickle
        self._rank = rank
        self._world_size = world_size
        self._leaves: list[Leaf] = []
        self._infos: list[arrays.ArrayInfo] = []
        self._differing: set[StatePath] = set()

    def leaf_of(self, value: Any, path: StatePath) -> Any:
        if isinstance(value, shards.PerRank):
            key = self._rank if value.key is None else value.key
            return Composite("per_rank", [self._world_size], {str(key): value.value})
        if isinstance(value, PerRankValues):  # as ckpt.load() gives them
            return Composite("per_rank", [value.world_size], {str(key): part for key, part in value.items()})
        if isinstance(value, shards.MayDiffer):
            self._differing.add(path)
            return value.value
        held = shards.held_of(value, path)
        if held is not None:
            _check_plain(held.array, path)
            info = arrays.describe(held.array, path)
            tie = None if info.tie is None else (*info.tie, held.shape)
            info = dataclasses.replace(info, shape=held.shape, tie=tie)
            return self._add(Leaf(path, held, info.kind, info.detail), info)
        if isinstance(value, np.ndarray) or arrays.is_torch_tensor(value):
            composite = arrays.composite_of(value, path)
            if composite is not None:
                return composite
            info = arrays.describe(value, path)
            return self._add(Leaf(path, value, info.kind, info.detail), info)
        if isinstance(value, arrays.LazyArray):
            # The same object in two places is a tied tensor, as with tensors in memory.
            tie = ("lazy", id(value)) if 0 not in value.shape else None
            info = arrays.ArrayInfo(value.dtype, value.shape, value.kind, value.detail, tie)
            return self._add(Leaf(path, value, value.kind, value.detail), info)
        if isinstance(value, (str, bytes, bytearray)) and type(value) in (str, bytes, bytearray):
            if len(value) < BLOB_BYTES:
                return None
            return self._add_blob(value, path)
        if type(value) is memoryview:
            return bytes(value)
        if _has_state_dict(value):
            return _with_buffers_marked(value, value.state_dict())
        return self._pickled(value, path) if self._allow_pickle else None

    def _add(self, leaf: Leaf, info: arrays.ArrayInfo) -> Leaf:
        self._leaves.append(leaf)
        self._infos.append(info)
        return leaf

    def _add_blob(self, value: str | bytes | bytearray, path: StatePath) -> Leaf:
        kind = type(value).__name__
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        array = np.frombuffer(raw, np.uint8)
        info = arrays.ArrayInfo(BY_NAME["uint8"], array.shape, kind, None, None)
        return self._add(Leaf(path, array, kind), info)

    def _pickled(self, value: Any, path: StatePath) -> Any:
        """An opaque leaf, if nothing else can hold the value."""
        try:
            values.flatten(value, lambda _value, _path: None, path)
        except UnsupportedValueError:
            try:
                payload = pickle.dumps(value)
            except Exception as error:  # a user's __reduce__ may raise anything
                raise UnsupportedValueError(
                    f"{show_path(path)} is of type {class_path_of(value)}, which cannot be pickled: {error}",
                    path=show_path(path),
                    hint="leave it out, or save plain values instead",
                ) from error
            return values.opaque(class_path_of(value), payload)
        return None

    def _may_differ(self, path: StatePath) -> bool:
        return bool(self._differing) and any(path[:n] in self._differing for n in range(len(path) + 1))

    def finish(self, plain: Any, chunk_bytes: int, components: tuple[str, ...]) -> FlatState:
        names = assign_names([leaf.path for leaf in self._leaves])
        ties: dict[tuple[Any, ...], int] = {}
        order = sorted(range(len(names)), key=names.__getitem__)
        tensors: list[Tensor] = []
        sources: list[tuple[Any, ...]] = []
        aliases: list[tuple[str, int]] = []
        for i in order:
            leaf, info, name = self._leaves[i], self._infos[i], names[i]
            tied = ties.get(info.tie) if info.tie is not None else None
            if tied is not None:
                leaf.index = tied
                aliases.append((name, tied))
                continue
            leaf.index = len(tensors)
            if info.tie is not None:
                ties[info.tie] = leaf.index
            parts = _parts(leaf.value, info.shape)
            boxes = tuple(box for box, _ in parts)
            component = printable(str(leaf.path[0]))
            tensors.append(Tensor(name, component, info.dtype, info.shape, info.kind, boxes))
            sources.append(tuple(array for _, array in parts))
        layout = Layout(tuple(tensors), tuple(aliases), chunk_bytes)
        tree = values.pack(plain)
        if len(tree) > MAX_TREE_BYTES:
            raise UsageError(
                f"the values of the state (without tensors) take {len(tree)} bytes, "
                f"more than {MAX_TREE_BYTES}",
                hint="store large lists of numbers as arrays",
            )
        differing = tuple(
            name for name, leaf in zip(names, self._leaves, strict=True) if self._may_differ(leaf.path)
        )
        return FlatState(layout, tuple(sources), tree, components, differing)


def _parts(value: Any, shape: Shape) -> tuple[shards.Part, ...]:
    """The boxes of a tensor that are here, in order, each with its array."""
    if isinstance(value, shards.Held):
        return tuple(sorted(value.parts, key=lambda part: part[0].offsets))
    return ((Box.whole(shape), value),) if 0 not in shape else ()


def _check_plain(local: Any, path: StatePath) -> None:
    """That what a rank holds of a sharded tensor has plain bytes, one for each element of its boxes."""
    if not isinstance(local, arrays.LazyArray) and arrays.composite_of(local, path) is not None:
        where = show_path(path)
        raise UnsupportedValueError(
            f"{where} is sharded, and its local part is a {class_path_of(local)}, whose inner tensors have "
            "no place in the whole tensor",
            path=where,
            hint="save ckptstore.PerRank(tensor.to_local()), or its plain form",
        )


def _with_buffers_marked(owner: Any, state: Any) -> Any:
    """A module's ``state_dict`` with its buffers and extra states marked: they may differ between ranks."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(owner, torch.nn.Module) or not isinstance(state, dict):
        return state
    marks = {name for name, _ in owner.named_buffers(remove_duplicate=False)}
    marks |= {name for name in state if name.endswith(_EXTRA_STATE)}
    marked = (
        (name, shards.MayDiffer(item) if name in marks and item is not None else item)
        for name, item in state.items()
    )
    return collections.OrderedDict(marked) if type(state) is collections.OrderedDict else dict(marked)


def _has_state_dict(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))
