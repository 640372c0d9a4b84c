"""From a live state to a layout, its arrays and its tree: everything is refused here or never."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptstore import arrays, cycles, shards
from ckptstore.errors import UnsupportedValueError, UsageError
from ckptstore.forms import form_of
from ckptstore.model import values
from ckptstore.model.boxes import Box
from ckptstore.model.dtypes import BY_NAME
from ckptstore.model.layout import Layout, printable
from ckptstore.model.plain import MAX_TREE_BYTES, Composite, StatePath, class_path_of, show_path
from ckptstore.model.targets import PerRankValues
from ckptstore.save.plan import Found, LeafDict, Plan, SeenLeaf, Sources

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
        views: the bytes of each box in layout order where its memory holds them as they are stored; None
            where :func:`ckptstore.arrays.bytes_of` must make them; empty if nobody has looked. The same tuple
            as at the last save, if nothing has moved.
        storages: what keeps the memory under `views`, which are valid while this is held.
    """

    layout: Layout
    sources: Sequence[tuple[Any, ...]]
    tree: bytes
    components: tuple[str, ...]
    may_differ: tuple[str, ...] = ()
    views: tuple[memoryview | None, ...] = ()
    storages: Sequence[Any] = ()


def flatten_state(
    state: Mapping[Any, Any],
    chunk_bytes: int,
    *,
    allow_pickle: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> FlatState:
    """Takes a state apart, once: see :meth:`Flattener.flatten`."""
    return Flattener().flatten(
        state, chunk_bytes, allow_pickle=allow_pickle, rank=rank, world_size=world_size
    )


class Flattener:
    """Takes the states of one run apart, save after save.

    Every leaf is looked at every time. Where names, shapes, strides, dtypes and ties are those of the last
    time, the layout is the last one, as an object: what has been worked out of it is not worked out again.
    No tensor is kept between saves. One thread at a time.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._sizes: list[int] = []  # bytes of the storage under each view

    @cycles.held_off()
    def flatten(
        self,
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
        # Its leaves are numbered anew while this goes on: after an error there is none.
        before, self._plan = self._plan, None
        collector = _Collector(allow_pickle, rank, world_size, before)
        plain = values.flatten(dict(state), collector)
        found = collector.found
        if 0 in found.places:  # an ordinary tensor that is not empty and lies nowhere
            number = found.places.index(0)
            arrays.check_memory(found.sources[number], found.leaves[number].path)
        plan = collector.plan(chunk_bytes)
        sizes = list(map(found.storage_bytes.__getitem__, plan.viewed_leaves))
        if plan is not before or sizes != self._sizes:
            for leaf, source in zip(found.leaves, found.sources, strict=True):
                if leaf.is_plain and leaf.boxes:
                    arrays.check_memory(source, leaf.path)
        tree = values.pack(plain)
        if len(tree) > MAX_TREE_BYTES:
            raise UsageError(
                f"the values of the state (without tensors) take {len(tree)} bytes, "
                f"more than {MAX_TREE_BYTES}",
                hint="store large lists of numbers as arrays",
            )
        self._plan, self._sizes = plan, sizes
        return FlatState(
            layout=plan.layout,
            sources=Sources(list(map(found.sources.__getitem__, plan.rows))),
            tree=tree,
            components=tuple(printable(str(key)) for key in state),
            may_differ=plan.may_differ,
            views=plan.views,
            storages=found.storages,
        )


class _Collector:
    def __init__(self, allow_pickle: bool, rank: int, world_size: int, before: Plan | None = None) -> None:
        self._allow_pickle = allow_pickle
        self._rank = rank
        self._world_size = world_size
        self._before = before
        self._known = before.leaves if before is not None else []
        self._known_dicts = before.dicts if before is not None else {}
        self._is_as_before = before is not None
        self._made: list[tuple[dict[Any, Any], LeafDict]] = []
        torch = sys.modules.get("torch")
        self._tensor_types = frozenset((torch.Tensor, torch.nn.Parameter) if torch is not None else ())
        self.found = Found()

    def plan(self, chunk_bytes: int) -> Plan:
        """The layout of what was found: the last one, if that is still right."""
        before, found = self._before, self.found
        plan = None
        if (
            before is not None
            and self._is_as_before
            and len(self._known) == len(found.leaves)
            and before.layout.chunk_bytes == chunk_bytes
            and before.differing == found.differing
        ):
            plan = before.moved(found)
        if plan is not None:
            return plan
        for made, known in self._made:  # the references in them are those of the last time
            made.update(zip(known.keys, known.leaves, strict=True))
        return Plan.of(found, chunk_bytes)

    def __call__(self, value: Any, path: StatePath) -> Any:
        return self.leaf_of(value, path)

    def dict_of_leaves(self, value: Mapping[Any, Any], path: StatePath) -> dict[Any, Any] | None:
        """The plain form of a dict in which all is as it was, but for addresses; else None."""
        found = self.found
        known = self._known_dicts.get(len(found.leaves)) if self._is_as_before else None
        if known is None or not known.is_at(path) or list(value) != known.keys:
            return None
        tensors = list(value.values())
        if set(map(type, value)) != {str} or not self._tensor_types.issuperset(map(type, tensors)):
            return None
        memory = known.forms.memory_of(tensors)
        if memory is None:
            return None
        found.leaves += known.leaves
        found.sources += tensors
        found.places += memory.addresses
        found.storages += memory.storages
        found.storage_bytes += memory.nbytes
        made = dict(zip(known.keys, known.references, strict=True))
        self._made.append((made, known))
        return made

    def leaf_of(self, value: Any, path: StatePath) -> Any:
        if type(value) in self._tensor_types:
            leaf = self._plain_leaf(value, path)
            if leaf is not None:
                return leaf
        if isinstance(value, shards.PerRank):
            key = self._rank if value.key is None else value.key
            return Composite("per_rank", [self._world_size], {str(key): value.value})
        if isinstance(value, PerRankValues):  # as ckpt.load() gives them
            return Composite("per_rank", [value.world_size], {str(key): part for key, part in value.items()})
        if isinstance(value, shards.MayDiffer):
            self.found.differing.add(path)
            return value.value
        held = shards.held_of(value, path)
        if held is not None:
            _check_plain(held.array, path)
            info = _described(held.array, path)
            tie = None if info.tie is None else (*info.tie, held.shape)
            info = dataclasses.replace(info, shape=held.shape, tie=tie)
            return self._leaf(path, info, sorted(held.parts, key=lambda part: part[0].offsets))
        if isinstance(value, np.ndarray) or arrays.is_torch_tensor(value):
            composite = arrays.composite_of(value, path)
            if composite is not None:
                return composite
            info = _described(value, path)
            return self._leaf(path, info, _whole(info, value))
        if isinstance(value, arrays.LazyArray):
            # The same object in two places is a tied tensor, as with tensors in memory.
            tie = (id(value), "lazy") if 0 not in value.shape else None
            info = arrays.ArrayInfo(value.dtype, value.shape, value.kind, value.detail, tie)
            return self._leaf(path, info, _whole(info, value))
        if isinstance(value, (str, bytes, bytearray)) and type(value) in (str, bytes, bytearray):
            if len(value) < BLOB_BYTES:
                return None
            return self._add_blob(value, path)
        if type(value) is memoryview:
            return bytes(value)
        if _has_state_dict(value):
            return _with_buffers_marked(value, value.state_dict())
        return self._pickled(value, path) if self._allow_pickle else None

    def _plain_leaf(self, value: Any, path: StatePath) -> SeenLeaf | None:
        """The leaf of an ordinary tensor; None if others must look at it."""
        form = form_of(value)
        if form is None:
            return None
        leaf = self._next_known()
        if leaf is None or leaf.form != form or not leaf.is_at(path):
            self._is_as_before = False
            leaf = SeenLeaf.of_tensor(path, form)
        if leaf is not None:
            if leaf.boxes:
                self.found.add(leaf, value, value.data_ptr(), value.untyped_storage())
            else:
                self.found.add(leaf, (), None)
        return leaf

    def _next_known(self) -> SeenLeaf | None:
        number = len(self.found.leaves)
        return self._known[number] if number < len(self._known) else None

    def _leaf(self, path: StatePath, info: arrays.ArrayInfo, parts: Sequence[shards.Part]) -> SeenLeaf:
        leaf = SeenLeaf.of_parts(path, info, tuple(box for box, _ in parts))
        known = self._next_known()
        if known is not None and known.form == leaf.form and known.is_at(path):
            leaf = known
        else:
            self._is_as_before = False
        self.found.add(leaf, tuple(array for _, array in parts), info.tie)
        return leaf

    def _add_blob(self, value: str | bytes | bytearray, path: StatePath) -> SeenLeaf:
        kind = type(value).__name__
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        array = np.frombuffer(raw, np.uint8)
        info = arrays.ArrayInfo(BY_NAME["uint8"], array.shape, kind, None, None)
        return self._leaf(path, info, _whole(info, array))

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


def _described(array: Any, path: StatePath) -> arrays.ArrayInfo:
    info = arrays.describe(array, path)
    if arrays.is_torch_tensor(array):
        arrays.check_memory(array, path)
    return info


def _whole(info: arrays.ArrayInfo, value: Any) -> tuple[shards.Part, ...]:
    """All of an array, unless that is nothing."""
    return ((Box.whole(info.shape), value),) if 0 not in info.shape else ()


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
