"""Loading a checkpoint as new objects, whole or by name, and reading parts of single tensors."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckptstore import arrays, cycles
from ckptstore.errors import NotFoundError, TensorNotFoundError, UsageError
from ckptstore.load.build import Blob, Builder
from ckptstore.load.fetch import Fetched, Fetcher
from ckptstore.load.plan import Want
from ckptstore.load.select import Selection
from ckptstore.load.trimmed import lost, remedy
from ckptstore.model.boxes import Box
from ckptstore.model.layout import Tensor
from ckptstore.model.plain import Composite
from ckptstore.model.targets import PerRankValues, TensorSpec
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier

_DROPPED = object()


def load(
    tier: Tier,
    contents: Contents,
    selection: Selection,
    *,
    device: Any = None,
    allow_pickle: bool = False,
) -> tuple[dict[Any, Any], Fetched]:
    """The saved state as new objects.

    With ``only`` or ``exclude``, entries of dicts whose names were not asked for are left out; where they
    stand in a list or tuple, a TensorSpec keeps the place of a tensor, so that positions do not shift.
    What every rank kept of its own comes as PerRankValues, the values of all ranks.

    Raises:
        NotFoundError: nothing in the checkpoint has such a name.
        ChunkDamagedError, DocumentError: it cannot be read; nothing is returned.
    """
    builder = Builder(contents, device=device, allow_pickle=allow_pickle)
    layout = contents.layout
    kept = [0]
    names = {index: {tensor.name} for index, tensor in enumerate(layout.tensors)}
    for alias, index in layout.aliases:
        names[index].add(alias)

    def make(index: int, kind: str, detail: str | None) -> Any:
        tensor = layout.tensors[index]
        if not any(selection.wants(name) for name in names[index]):
            return TensorSpec(tensor.name, tensor.dtype.name, tensor.shape, kind)
        kept[0] += 1
        return builder.tensor(index, kind, detail)

    with cycles.held_off():
        tree = contents.decode_tree(make, _by_rank)
    if not selection.is_all:
        tree = _pruned(tree, (), selection)
        if not tree:
            gone = lost(contents.record, selection.only or ())
            if gone:
                raise NotFoundError("; ".join(gone.values()), hint=remedy(contents.record))
            raise NotFoundError(
                f"{contents} has nothing named {list(selection.only or ())}",
                hint=f"its components are {', '.join(contents.saved_tree.components)}; "
                "`ckptstore show` lists the names",
            )
    fetcher = Fetcher(tier, contents)
    fetcher.fetch(builder.wants)
    finished: dict[Any, Any] = builder.finish(tree)
    return finished, fetcher.done


def _by_rank(composite: Composite) -> Any:
    """What every rank kept of its own comes as a dict; other composites stay what they are."""
    if composite.kind != "per_rank":
        return composite
    by_rank = {int(key): composite.parts[key] for key in sorted(composite.parts, key=int)}
    return PerRankValues(by_rank, composite.head[0])


def _pruned(node: Any, path: tuple[str, ...], selection: Selection) -> Any:
    if isinstance(node, dict):
        kept = {}
        for key, item in node.items():
            made = _pruned(item, (*path, str(key)), selection)
            if made is not _DROPPED:
                kept[key] = made
        if not kept and node:
            return _DROPPED if path else {}
        if len(kept) == len(node):
            return node
        for key in [key for key in node if key not in kept]:
            del node[key]
        return node
    if isinstance(node, TensorSpec):
        return _DROPPED
    if arrays.is_array(node) or isinstance(node, (Blob, Composite)):
        return node
    return node if selection.wants(".".join(path)) or _holds_array(node) else _DROPPED


def _holds_array(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_holds_array(item) for item in node.values())
    if isinstance(node, (list, tuple)):
        return any(_holds_array(item) for item in node)
    return arrays.is_array(node) or isinstance(node, (Blob, Composite))


class StoredTensor:
    """One tensor of a checkpoint, read on demand: ``stored[0:100]`` reads only the chunks it meets.

    Attributes:
        name, dtype, shape: of the logical tensor; `dtype` is a name like ``"bfloat16"``.
    """

    def __init__(self, tier: Tier, contents: Contents, index: int) -> None:
        self._tier = tier
        self._contents = contents
        self._index = index
        tensor = self._tensor
        self.name, self.dtype, self.shape = tensor.name, tensor.dtype.name, tensor.shape

    @property
    def _tensor(self) -> Tensor:
        return self._contents.layout.tensors[self._index]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self._tensor.nbytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def __getitem__(self, key: Any) -> Any:
        """The elements under ints and slices of step 1; as a torch tensor, or numpy if that was saved.

        Raises:
            IndexError, UsageError: the key is outside, or is not made of ints, slices and ``...``.
            ChunkDamagedError: a chunk is damaged; nothing is returned.
        """
        box, squeezed = self._box_of(key)
        array = self.read(box)
        return array.reshape(tuple(n for i, n in enumerate(box.sizes) if i not in squeezed))

    def read(self, box: Box) -> Any:
        """The elements of a box of global indices, of shape ``box.sizes``."""
        tensor = self._tensor
        kind = "torch" if tensor.kind == "torch" else "numpy"
        itemsize = tensor.dtype.itemsize
        raw = np.empty(box.numel * itemsize, np.uint8)
        if len(raw):
            view = raw.view(arrays.raw_dtype(itemsize)).reshape(box.sizes)
            Fetcher(self._tier, self._contents).fetch([Want(self._index, box, view)])
        detail = self._contents.details.get(self._index) if tensor.kind == "numpy" else None
        return arrays.in_byte_order(arrays.from_raw(raw, kind, tensor.dtype, box.sizes, detail), detail)

    def _box_of(self, key: Any) -> tuple[Box, set[int]]:
        keys = list(key) if isinstance(key, tuple) else [key]
        if sum(part is Ellipsis for part in keys) > 1:
            raise UsageError("an index can have one ellipsis")
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (len(self.shape) - len(keys) + 1)
        keys += [slice(None)] * (len(self.shape) - len(keys))
        if len(keys) != len(self.shape):
            raise IndexError(f"{self.name!r} has {len(self.shape)} dimensions, got {len(keys)} indices")
        offsets, sizes, squeezed = [], [], set()
        for dim, (part, extent) in enumerate(zip(keys, self.shape, strict=True)):
            if isinstance(part, slice):
                start, stop, step = part.indices(extent)
                if step != 1:
                    raise UsageError(
                        f"{self.name!r}: slices must have step 1, not {step}", hint="slice what you read"
                    )
                offsets.append(start)
                sizes.append(max(stop - start, 0))
                continue
            if isinstance(part, bool) or not hasattr(type(part), "__index__"):
                raise UsageError(f"{self.name!r}: index with ints, slices and ..., not {type(part).__name__}")
            number = part.__index__()
            if not -extent <= number < extent:
                raise IndexError(f"index {number} is out of bounds for dimension {dim} of size {extent}")
            offsets.append(number % extent)
            sizes.append(1)
            squeezed.add(dim)
        return Box(tuple(offsets), tuple(sizes)), squeezed


class StoredTensors(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint by name, aliases included, in name order; nothing is read to look."""

    def __init__(self, tier: Tier, contents: Contents) -> None:
        self._tier = tier
        self._contents = contents
        self._index = contents.layout.by_name

    def __getitem__(self, name: str) -> StoredTensor:
        """The tensor of that name.

        Raises:
            TensorNotFoundError: there is none; similar names are given.
        """
        index = self._index.get(name)
        if index is None:
            gone = lost(self._contents.record, [str(name)])
            if gone:
                raise TensorNotFoundError("; ".join(gone.values()), hint=remedy(self._contents.record))
            near = ", ".join(repr(other) for other in difflib.get_close_matches(str(name), self._index, n=3))
            raise TensorNotFoundError(
                f"{self._contents} has no tensor {name!r}",
                hint=f"similar: {near}" if near else "`ckptstore show --tensors` lists the names",
            )
        return StoredTensor(self._tier, self._contents, index)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._index))

    def __len__(self) -> int:
        return len(self._index)
