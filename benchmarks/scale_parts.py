"""The simulated training of `scale`: a Llama 3.1 405B with AdamW over a mesh, and what each rank would say.

There are no tensors: a rank's part has the layout and places that a save would have made, and random digests.
Ranks stand in the order (pipeline stage, data parallel, tensor parallel), the last changing fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ckptstore.model import values
from ckptstore.model.box_columns import BoxColumns
from ckptstore.model.dtypes import BY_NAME
from ckptstore.model.heads import Heads
from ckptstore.model.layout import Layout
from ckptstore.model.plain import Leaf
from ckptstore.model.tables import Digests, KeyList
from ckptstore.save.limits import Limits
from ckptstore.save.parts import COMPARED, WRITTEN, Part, encode_part

CHUNK_BYTES = 16 << 20
HIDDEN, FEED_FORWARD, KEY_VALUE, VOCABULARY = 16384, 53248, 1024, 128256
LAYER = {
    # name: (shape, dimension that tensor parallelism cuts, None: every one of its ranks holds it)
    "attention.wq": ((HIDDEN, HIDDEN), 0),
    "attention.wk": ((KEY_VALUE, HIDDEN), 0),
    "attention.wv": ((KEY_VALUE, HIDDEN), 0),
    "attention.wo": ((HIDDEN, HIDDEN), 1),
    "feed_forward.w1": ((FEED_FORWARD, HIDDEN), 0),
    "feed_forward.w2": ((HIDDEN, FEED_FORWARD), 1),
    "feed_forward.w3": ((FEED_FORWARD, HIDDEN), 0),
    "attention_norm": ((HIDDEN,), None),
    "ffn_norm": ((HIDDEN,), None),
}
ENDS = {
    "tok_embeddings": ((VOCABULARY, HIDDEN), 0),
    "norm": ((HIDDEN,), None),
    "output": ((VOCABULARY, HIDDEN), 0),
}
STATES = (
    ("model", "", "bfloat16"),
    ("optimizer", "exp_avg", "float32"),
    ("optimizer", "exp_avg_sq", "float32"),
)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """`layers` of the model over pipeline stages, FSDP shards and tensor parallel ranks."""

    layers: int
    pipeline: int
    data: int
    tensor: int

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def place(self, rank: int) -> tuple[int, int, int]:
        stage, rest = divmod(rank, self.data * self.tensor)
        return (stage, *divmod(rest, self.tensor))

    @functools.cached_property
    def stages(self) -> list[Stage]:
        bounds = [round(self.layers * i / self.pipeline) for i in range(self.pipeline + 1)]
        return [Stage(self, i, range(bounds[i], bounds[i + 1])) for i in range(self.pipeline)]

    def layout(self, rank: int) -> Layout:
        stage, data, tensor = self.place(rank)
        return self.stages[stage].layout(data, tensor)


class Stage:
    """The tensors of one pipeline stage, in the order of their names."""

    def __init__(self, mesh: Mesh, number: int, layers: range) -> None:
        named = {
            f"layers.{i}.{name}.weight": (shape, dim) for i in layers for name, (shape, dim) in LAYER.items()
        }
        if number == 0:
            named["tok_embeddings.weight"] = ENDS["tok_embeddings"]
        if number == mesh.pipeline - 1:
            named |= {f"{name}.weight": ENDS[name] for name in ("norm", "output")}
        rows = sorted(
            (
                ".".join(filter(None, (component, "state" if state else "", name, state))),
                component,
                dtype,
                *how,
            )
            for name, how in named.items()
            for component, state, dtype in STATES
        )
        self._mesh = mesh
        self.heads = Heads(
            tuple(name for name, *_ in rows),
            tuple(component for _, component, *_ in rows),
            tuple(BY_NAME[dtype] for _, _, dtype, *_ in rows),
            ("torch",) * len(rows),
            tuple(shape for _, _, _, shape, _ in rows),
            (),
            CHUNK_BYTES,
        )
        self.cut_by_tensor = [dim for *_, dim in rows]
        self.tree = self._tree()

    @property
    def is_replicated(self) -> np.ndarray:
        return np.array([dim is None for dim in self.cut_by_tensor])

    def layout(self, data: int, tensor: int) -> Layout:
        """FSDP cuts rows of what tensor parallelism has left of them."""
        mesh = self._mesh
        counts, offsets, sizes = [], [], []
        for shape, dim in zip(self.heads.shapes, self.cut_by_tensor, strict=True):
            here, extent = [0] * len(shape), list(shape)
            if dim is not None:
                extent[dim] //= mesh.tensor
                here[dim] = tensor * extent[dim]
            rows = -(-extent[0] // mesh.data)
            start = min(data * rows, extent[0])
            here[0] += start
            extent[0] = min(rows, extent[0] - start)
            counts.append(1)
            offsets += here
            sizes += extent
        arrays = (np.array(column, np.int64) for column in (offsets, sizes))
        return Layout.of_columns(self.heads, BoxColumns(np.array(counts, np.int64), self.heads.ndim, *arrays))

    def _tree(self) -> bytes:
        state: dict[str, Any] = {"trainer": {"step": 1000, "tokens": 4 << 40}}
        for index, name in enumerate(self.heads.names):
            *path, last = name.split(".")
            node = state
            for key in path:
                node = node.setdefault(key, {})
            node[last] = _Tensor(index)

        def leaf_of(value: object, path: tuple[object, ...]) -> Leaf | None:
            return Leaf(path, None, "torch", None, value.index) if isinstance(value, _Tensor) else None

        return values.pack(values.flatten(state, leaf_of))


@dataclasses.dataclass(frozen=True)
class _Tensor:
    index: int


def parts(mesh: Mesh, attempt: str, number: int) -> Iterator[Part]:
    """The parts of all ranks, in rank order, of a save that changes every chunk."""
    limits = Limits.of(CHUNK_BYTES)
    for rank in range(mesh.world_size):
        stage_number, data, tensor = mesh.place(rank)
        stage = mesh.stages[stage_number]
        layout = stage.layout(data, tensor)
        chunks = layout.chunks
        own = np.random.default_rng((number, rank))
        digests = np.frombuffer(own.bytes(32 * len(chunks)), np.uint8).reshape(-1, 32).copy()
        is_replica = stage.is_replicated[chunks.tensor]
        shared = np.random.default_rng((number, stage_number, data))
        digests[is_replica] = np.frombuffer(shared.bytes(32 * int(is_replica.sum())), np.uint8).reshape(
            -1, 32
        )
        mine = ~is_replica | (chunks.tensor % mesh.tensor == tensor)
        objects, offsets, keys = _places(layout, digests, mine, limits, attempt, rank)
        yield Part(
            rank=rank,
            step=number,
            counter=number,
            error=None,
            layout=layout,
            state=np.where(mine, WRITTEN, COMPARED).astype(np.uint8),
            digests=Digests(digests),
            objects=objects,
            offsets=offsets,
            keys=keys,
            tree=stage.tree,
            components=("model", "optimizer", "trainer"),
        )


def _places(layout, digests, mine, limits, attempt, rank):
    """Packs and large objects as the library's writer groups them: per component, in name order."""
    chunks = layout.chunks
    components = np.array([name == "optimizer" for name in layout.heads.components])[chunks.tensor]
    objects, offsets = np.zeros(len(chunks), np.int64), np.zeros(len(chunks), np.int64)
    sizes: list[int] = []
    packs: list[bool] = []
    names: list[bytes] = []
    for component in (False, True):
        rows = np.flatnonzero(mine & (components == component))
        room = 0
        for row in rows.tolist():
            nbytes = int(chunks.nbytes[row])
            if nbytes >= limits.pack_below_bytes:
                objects[row] = len(sizes)
                sizes.append(nbytes)
                packs.append(False)
                names.append(digests[row].tobytes())
                continue
            if nbytes > room:
                room, current = limits.pack_bytes, len(sizes)
                sizes.append(0)
                packs.append(True)
                names.append(digests[row].tobytes()[::-1])
            objects[row], offsets[row] = current, sizes[current]
            sizes[current] += nbytes
            room -= nbytes
    # In the order of their keys, as a key list is.
    order = np.array(sorted(range(len(sizes)), key=lambda i: (packs[i], names[i])), np.int64)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    count = len(order)
    keys = KeyList(
        np.frombuffer(b"".join(names[i] for i in order), np.uint8).reshape(count, 32),
        np.array(packs, bool)[order],
        np.zeros(count, np.int64),
        (attempt,),
        np.full(count, rank, np.int64),
        np.array(sizes, np.int64)[order],
    )
    return place[objects] if count else objects, offsets, keys


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the parts of one save into a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--mesh", type=int, nargs=4, required=True, help="layers, pipeline, data, tensor")
    parser.add_argument("--known", action="store_true", help="leave the layouts out")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for part in parts(Mesh(*options.mesh), options.attempt, options.number):
        path = options.folder / f"{part.rank}.mp"
        path.write_bytes(encode_part(part, with_layout=not options.known))


if __name__ == "__main__":
    main()
