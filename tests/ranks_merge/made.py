"""Ranks and their parts, drawn at random: tensors cut into boxes, each box with one holder or several."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from ckptstore.model import values
from ckptstore.model.boxes import Box
from ckptstore.model.dtypes import BY_NAME
from ckptstore.model.ids import chunk_key, digest_of, pack_key
from ckptstore.model.layout import Layout, Tensor
from ckptstore.model.plain import Leaf
from ckptstore.model.tables import KeyList
from ckptstore.save.parts import COMPARED, LEFT, WRITTEN, Part
from tests.model.made import attempt, shapes, tilings
from tests.ranks_merge.reference import pieces

NAMES = ("a", "b.weight", "b.bias", "c", "d")


@st.composite
def ranks(draw, most=5):
    """Layouts of up to `most` ranks whose boxes together cover every tensor once."""
    world = draw(st.integers(1, most))
    chunk_bytes = draw(st.sampled_from([8, 64, 1024]))
    held = [[] for _ in range(world)]
    for name in sorted(draw(st.sets(st.sampled_from(NAMES), min_size=1))):
        shape = draw(shapes)
        dtype = BY_NAME[draw(st.sampled_from(["uint8", "float32", "float64"]))]
        of_rank = [[] for _ in range(world)]
        for box in draw(tilings(shape)):
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                of_rank[rank].append(box)
        for rank, boxes in enumerate(of_rank):
            if not boxes and draw(st.booleans()):
                continue  # this rank does not have the tensor at all
            if shape and draw(st.integers(0, 4)) == 0:
                boxes.append(Box(tuple(0 for _ in shape), (0, *shape[1:])))  # an empty shard
            own = tuple(draw(st.permutations(boxes)))
            held[rank].append(Tensor(name, name.split(".")[0], dtype, shape, "numpy", own))
    return [Layout(tuple(tensors), (), chunk_bytes) for tensors in held]


def tree_of(layout, **more):
    """A packed tree that names each tensor of a layout once, and some values."""
    places = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
    state = {**dict.fromkeys(places, Ellipsis), **more}

    def leaf_of(value, path):
        return Leaf(path, None, "numpy", "<f4", places[path[0]]) if value is Ellipsis else None

    return values.pack(values.flatten(state, leaf_of))


def part_of(rank, layout, state, *, salt=None, number=1, reused=(), tree=None):
    """A part whose chunks' bytes follow from tensor, box and piece.

    Args:
        state: LEFT, WRITTEN or COMPARED per chunk.
        salt: per chunk, mixed into its content.
        reused: rows that lie in objects of the attempt before.
    """
    digests, places, packed = [], {}, []
    for row, (name, box, k, _) in enumerate(pieces(layout)):
        mark = salt[row] if salt is not None else ""
        digests.append(digest_of(f"{name} {box} {k} {mark}".encode()) if state[row] != LEFT else b"")
    written = [row for row in range(len(digests)) if state[row] == WRITTEN]
    sizes = {}
    for row in written:
        nbytes = int(layout.chunks.nbytes[row])
        if row in reused:
            key = chunk_key(digests[row], attempt(number - 1), rank)
        elif nbytes >= 32:
            key = chunk_key(digests[row], attempt(number), rank)
        else:
            packed.append((row, nbytes))
            continue
        sizes[key] = nbytes
        places[row] = (key, 0)
    if packed:
        key = pack_key(digest_of(b"".join(digests[row] for row, _ in packed)), attempt(number), rank)
        at = 0
        for row, nbytes in packed:
            places[row] = (key, at)
            at += nbytes
        sizes[key] = at
    keys = KeyList.of(sizes)
    number_of = {key: i for i, key in enumerate(keys.keys)}
    rows = [(number_of[places[r][0]], places[r][1]) if r in places else (0, 0) for r in range(len(digests))]
    table = np.array(rows, np.int64).reshape(len(rows), 2)
    return Part(
        rank=rank,
        step=number,
        counter=number,
        error=None,
        layout=layout,
        state=np.array(state, np.uint8),
        digests=digests,
        objects=table[:, 0].copy(),
        offsets=table[:, 1].copy(),
        keys=keys,
        tree=tree_of(layout) if tree is None else tree,
        components=tuple(dict.fromkeys(tensor.component for tensor in layout.tensors)),
    )


@st.composite
def parts(draw, layouts, number=1):
    """A part of each rank; nearly always somebody wrote each chunk, and nearly always all are equal."""
    found = []
    flaw = draw(st.sampled_from(["none", "none", "none", "unwritten", "unlike"]))
    for rank, layout in enumerate(layouts):
        count = len(layout.chunks)
        kinds = [LEFT, WRITTEN, COMPARED] if flaw == "unwritten" else [WRITTEN]
        state = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
        salt = None
        if flaw == "unlike":
            salt = draw(st.lists(st.sampled_from(["", "", "x"]), min_size=count, max_size=count))
        reused = draw(st.sets(st.integers(0, max(count - 1, 0)))) if number > 1 else ()
        found.append(part_of(rank, layout, state, salt=salt, number=number, reused=reused))
    return found


def thinned(found, agreement):
    """Parts in which each chunk is written by whom the agreement says, and compared by the others."""
    out = []
    for part in found:
        duty = agreement.duty(part.layout, part.rank)
        state = np.where(duty, part.state, np.where(part.state == WRITTEN, COMPARED, part.state))
        out.append(dataclasses.replace(part, state=state.astype(np.uint8)))
    return out
