"""What columns must agree with: the same answers found chunk by chunk, in the plainest way."""

import dataclasses
import itertools

from ckptstore.model.boxes import cell_shape, cut, pieces_of
from ckptstore.save.parts import LEFT, WRITTEN


def pieces(layout):
    """(tensor name, box, number of the piece, piece) of each chunk, in table order."""
    return [
        (tensor.name, box, k, piece)
        for tensor in layout.tensors
        for box in tensor.boxes
        for k, piece in enumerate(
            cut(box, cell_shape(tensor.shape, tensor.dtype.itemsize, layout.chunk_bytes))
        )
    ]


@dataclasses.dataclass
class Merged:
    """Chunk by chunk, in table order: (digest, key, size, offset); what is wrong, and what is noted."""

    chunks: list
    unwritten: set
    differing: dict


def merged(parts):
    """The checkpoint that parts make, by name, box and piece."""
    held = {}
    for part in parts:
        for row, (name, box, k, _) in enumerate(pieces(part.layout)):
            held.setdefault((name, box.offsets, box.sizes, k), []).append((part, row))
    out = Merged([], set(), {})
    for (name, offsets, _, _), holders in sorted(held.items(), key=lambda item: item[0]):
        writers = [(part, row) for part, row in holders if part.state[row] == WRITTEN]
        if not writers:
            out.unwritten.add((name, offsets))
            continue
        part, row = writers[0]
        digest = part.digests[row]
        unlike = {
            other.rank for other, at in holders if other.state[at] != LEFT and other.digests[at] != digest
        }
        if unlike:
            out.differing.setdefault(name, [set(), []])
            out.differing[name][0] |= unlike
            out.differing[name][1].append(part.rank)
        number = int(part.objects[row])
        out.chunks.append(
            (digest, part.keys.keys[number], int(part.keys.sizes[number]), int(part.offsets[row]))
        )
    return out


def agreed(layouts):
    """(tensor name, offsets, sizes) -> the writer of each chunk, for boxes with several holders."""
    holders, size_of, load = {}, {}, [0] * len(layouts)
    for rank, layout in enumerate(layouts):
        for tensor in layout.tensors:
            cell = cell_shape(tensor.shape, tensor.dtype.itemsize, layout.chunk_bytes)
            for box in tensor.boxes:
                key = (tensor.name, box.offsets, box.sizes)
                holders.setdefault(key, []).append(rank)
                size_of[key] = (pieces_of(box, cell), box.numel * tensor.dtype.itemsize)
    for key, ranks in holders.items():
        if len(ranks) == 1:
            load[ranks[0]] += size_of[key][1]
    writers = {}
    shared = [key for key, ranks in holders.items() if len(ranks) > 1 and size_of[key][0]]
    for key in sorted(shared, key=lambda key: (-size_of[key][1], key)):
        count, nbytes = size_of[key]
        writers[key] = []
        for _ in range(count):
            rank = min(holders[key], key=lambda rank: (load[rank], rank))
            load[rank] += nbytes // count
            writers[key].append(rank)
    return writers


def covers_once(shape, boxes):
    """Whether each element of a small tensor is in exactly one of the boxes, and all boxes are inside."""
    seen = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for box in boxes:
        for index in itertools.product(
            *(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        ):
            if index not in seen:
                return False
            seen[index] += 1
    return all(count == 1 for count in seen.values())
