"""Tensors whose every byte follows from its global index, in any layout over ranks, and what saves and
loads them on the ranks of a pool. Numbers only are drawn and sent; ranks make the tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.model.boxes import Box
from ckptstore.shards import LocalShard

NUMPY_DTYPES = ("float32", "float64", "int16", "uint8", "int64", "bool", "complex64", "float16")
TORCH_DTYPES = (*NUMPY_DTYPES, "bfloat16", "float8_e4m3fn", "int8", "uint16")
RESHAPED_DTYPES = ("float32", "float64", "int64", "bfloat16")

Corner = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box, as plain numbers."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """How the ranks hold one tensor.

    Attributes:
        kind: "dtensor"; "reshaped": a DTensor of shape `source`, flattened; "boxes": LocalShards; "whole":
            a plain tensor or array on every rank.
        placements: ("S", dim), ("SS", dim, split factor) or ("R",), one for each dimension of `mesh`.
        boxes: for each rank those that it holds.
    """

    kind: str
    mesh: tuple[int, ...] = ()
    placements: tuple[tuple[Any, ...], ...] = ()
    source: tuple[int, ...] = ()
    boxes: tuple[tuple[Corner, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One tensor: how it is saved, and how it is wanted."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    saved: Placed
    wanted: Placed


@dataclasses.dataclass(frozen=True)
class Side:
    """The ranks that save, or load: how many, and whether torch.distributed is there."""

    world: int
    plain: bool


@dataclasses.dataclass(frozen=True)
class Case:
    """One save and one load.

    Attributes:
        together: the load is `run.restore` by all ranks, not `checkpoint.restore` by each alone.
    """

    saving: Side
    loading: Side
    tensors: tuple[Drawn, ...]
    together: bool


# --- drawing --------------------------------------------------------------------------------------

MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,), (1, 2)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
shapes = st.one_of(
    st.lists(st.integers(0, 24), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(12,), (24,), (48,), (96,), (24, 48), (17, 9, 5), ()]),
)


@st.composite
def sides(draw: st.DrawFn) -> Side:
    """Few ranks more often than many: they start faster."""
    world = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4, 4, 6, 8]))
    return Side(world, plain=draw(st.integers(0, 3)) == 0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layouts of two to eight tensors on both sides."""
    saving, loading = draw(sides()), draw(sides())
    tensors = tuple(draw(tensors_of(saving, loading, f"w{i}")) for i in range(draw(st.integers(2, 8))))
    return Case(saving, loading, tensors, together=draw(st.booleans()))


@st.composite
def tensors_of(draw: st.DrawFn, saving: Side, loading: Side, name: str) -> Drawn:
    """A tensor of any shape and dtype, and how both sides hold it."""
    shape = draw(shapes)
    saved = draw(placed(saving, shape, everything=True))
    wanted = draw(placed(loading, shape, everything=False))
    kinds = {saved.kind, wanted.kind}
    dtypes: tuple[str, ...] = RESHAPED_DTYPES if "reshaped" in kinds else TORCH_DTYPES
    if saving.plain or loading.plain:
        dtypes = tuple(dtype for dtype in dtypes if dtype in NUMPY_DTYPES)
    return Drawn(name, shape, draw(st.sampled_from(dtypes)), saved, wanted)


@st.composite
def placed(draw: st.DrawFn, side: Side, shape: tuple[int, ...], *, everything: bool) -> Placed:
    """How the ranks of a side hold a tensor; with `everything`, so that all of it is held."""
    kinds = ["boxes", "whole"] if side.plain else ["dtensor", "dtensor", "dtensor", "boxes", "whole"]
    rows = _rows_to_flatten(shape, side.world)
    if not side.plain and rows:
        kinds += ["reshaped"] * 3
    kind = draw(st.sampled_from(kinds if shape else ["whole"]))
    if kind == "boxes":
        return Placed(kind, boxes=draw(partitions(shape, side.world, everything=everything)))
    if kind == "reshaped":
        factor = draw(st.sampled_from(rows))
        return Placed(kind, (side.world,), (("S", 1),), source=(factor, shape[0] // factor))
    if kind == "whole":
        return Placed(kind)
    mesh: tuple[int, ...] = draw(st.sampled_from(MESHES[side.world]))
    one = st.one_of(
        st.tuples(st.just("S"), st.integers(0, len(shape) - 1)),
        st.tuples(st.just("S"), st.integers(0, len(shape) - 1)),
        st.tuples(st.just("SS"), st.integers(0, len(shape) - 1), st.integers(2, 4)),
        st.tuples(st.just("R")),
    )
    return Placed(kind, mesh, tuple(draw(one) for _ in mesh))


def _rows_to_flatten(shape: tuple[int, ...], world: int) -> list[int]:
    """Of matrices whose columns `world` ranks share evenly, and that flattened have a shape."""
    if len(shape) != 1 or world == 1:
        return []
    return [rows for rows in range(2, shape[0] // world + 1) if shape[0] % (rows * world) == 0]


@st.composite
def partitions(
    draw: st.DrawFn, shape: tuple[int, ...], world: int, *, everything: bool
) -> tuple[tuple[Corner, ...], ...]:
    """Disjoint boxes from any cuts, each on some ranks: at least on one if `everything`."""
    pieces: list[Corner] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        offsets, size = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        for start, length in ((0, at), (at, size[dim] - at)):
            moved = tuple(o + start if d == dim else o for d, o in enumerate(offsets))
            pieces.append((moved, tuple(length if d == dim else n for d, n in enumerate(size))))
    held: list[list[Corner]] = [[] for _ in range(world)]
    for piece in pieces:
        least = 1 if everything else 0
        for rank in draw(st.lists(st.integers(0, world - 1), unique=True, min_size=least, max_size=2)):
            held[rank].append(piece)
    return tuple(tuple(boxes) for boxes in held)


# --- making ---------------------------------------------------------------------------------------


def content(name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
    """uint8, (*shape, item size): each byte a function of name and place (0 and 1 only for bool)."""
    itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    places = np.arange(math.prod(shape) * itemsize, dtype=np.uint64)
    seed = np.uint64(sum(name.encode()))
    mixed = (places + seed * np.uint64(1_000_003)) * np.uint64(0x9E3779B97F4A7C15)
    raw = (mixed >> np.uint64(37)).astype(np.uint8)
    return (raw & 1 if dtype == "bool" else raw).reshape(*shape, itemsize)


def leaf(drawn: Drawn, how: Placed, rank: int, *, plain: bool, blank: bool) -> Any:
    """What `rank` has in its state for a tensor: with its content, or blank, to be restored into."""
    raw = content(drawn.name, drawn.shape, drawn.dtype)
    if blank:
        raw = raw.copy()
        raw[:] = 1 if drawn.dtype == "bool" else 0x5A
    if how.kind == "whole":
        return _typed(raw, drawn.dtype, plain=plain)
    if how.kind == "boxes":
        return _shards_of(raw, drawn, how.boxes[rank], plain=plain)
    mesh = init_device_mesh("cpu", how.mesh)
    if how.kind == "reshaped":
        whole = _typed(raw, drawn.dtype, plain=False).reshape(how.source)
        return distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None).reshape(drawn.shape)
    return _dtensor(raw, drawn, mesh, how)


def _typed(raw: np.ndarray, dtype: str, *, plain: bool) -> Any:
    """Bytes, (*shape, item size), as an array or tensor of `dtype`, in memory of its own."""
    shape = raw.shape[:-1]
    flat = np.ascontiguousarray(raw).reshape(-1).copy()
    if plain:
        return flat.view(dtype).reshape(shape)
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if flat.size:  # no bytes cannot be seen as another dtype
        made.copy_(torch.from_numpy(flat).view(made.dtype).reshape(shape))
    return made


def _shards_of(raw: np.ndarray, drawn: Drawn, boxes: tuple[Corner, ...], *, plain: bool) -> Any:
    made = []
    for offsets, size in boxes:
        # In a frame of other elements, so that strides are not those of the box alone.
        frame = np.full((*(n + 1 for n in size), raw.shape[-1]), 1, np.uint8)
        inner = tuple(slice(0, n) for n in size)
        frame[inner] = raw[Box(offsets, size).within(Box.whole(drawn.shape))]
        array = _typed(frame, drawn.dtype, plain=plain)[inner]
        made.append(LocalShard(array, global_shape=drawn.shape, offsets=offsets))
    if not made:  # nothing of it is here: an empty box says so
        empty = _typed(raw[(slice(0, 0),) * len(drawn.shape)], drawn.dtype, plain=plain)
        made.append(LocalShard(empty, global_shape=drawn.shape, offsets=(0,) * len(drawn.shape)))
    return made[0] if len(made) == 1 else made


def _dtensor(raw: np.ndarray, drawn: Drawn, mesh: Any, how: Placed) -> DTensor:
    """Split by torch's own placements; as bytes, since not every dtype can be split or joined."""
    placements: list[Any] = []
    for kind, *numbers in how.placements:
        if kind == "R":
            placements.append(Replicate())
        else:
            make = Shard if kind == "S" else _StridedShard
            placements.append(make(numbers[0], **({"split_factor": numbers[1]} if kind == "SS" else {})))
    local = torch.from_numpy(raw)
    for size, place, placement in zip(how.mesh, mesh.get_coordinate(), placements, strict=True):
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, size, with_padding=False)[0][place]
    typed = _typed(local.numpy(), drawn.dtype, plain=False)
    strides = [math.prod(drawn.shape[dim + 1 :]) for dim in range(len(drawn.shape))]
    return DTensor.from_local(
        typed, mesh, placements, run_check=False, shape=torch.Size(drawn.shape), stride=tuple(strides)
    )


def bytes_of(value: Any) -> list[bytes]:
    """All that this rank holds of a leaf, row-major, box by box; frames included."""
    if isinstance(value, list):
        return [part for item in value for part in bytes_of(item)]
    if isinstance(value, LocalShard):
        base = value.array.base if isinstance(value.array, np.ndarray) else value.array._base
        return bytes_of(value.array if base is None else base)
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().reshape(-1)
        value = value.view(torch.uint8).numpy() if value.numel() else np.empty(0)
    return [value.tobytes()] if value.size else []
