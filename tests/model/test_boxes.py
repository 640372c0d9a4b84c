import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.model.boxes import Box, cell_shape, cut, uncovered
from tests.model.made import QUICK, boxes_in, chunk_sizes, shapes, tilings

itemsizes = st.sampled_from([1, 2, 4, 8, 16])


def mask(shape, box):
    """True where the box is."""
    found = np.zeros(shape, bool)
    found[box.within(Box.whole(shape))] = True
    return found


@st.composite
def shape_and_box(draw):
    shape = draw(shapes)
    return shape, draw(boxes_in(shape))


@st.composite
def shape_and_two(draw):
    shape = draw(shapes)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@st.composite
def shape_and_boxes(draw):
    """Now and then an exact cover, now and then one with a box left out, doubled or moved."""
    shape = draw(shapes)
    boxes = list(draw(tilings(shape)))
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(["drop", "double", "add", "outside", "empty"]))
        if change == "drop" and boxes:
            boxes.pop()
        elif change == "double" and boxes:
            boxes.append(boxes[0])
        elif change == "add":
            boxes.append(draw(boxes_in(shape)))
        elif change == "outside" and shape and boxes:
            boxes[0] = Box(tuple(o + 1 for o in boxes[0].offsets), boxes[0].sizes)
        elif change == "empty" and shape:
            boxes.append(Box((0,) * len(shape), (0,) * len(shape)))
    return shape, boxes


@QUICK
@given(shape_and_box(), itemsizes, chunk_sizes)
def test_the_pieces_of_a_box_put_together_are_the_box(shape_box, itemsize, chunk_bytes):
    shape, box = shape_box
    count = np.zeros(shape, int)
    for piece in cut(box, cell_shape(shape, itemsize, chunk_bytes)):
        assert piece.numel > 0
        count[piece.within(Box.whole(shape))] += 1
    assert (count == mask(shape, box)).all()


@QUICK
@given(shape_and_box(), itemsizes, chunk_sizes)
def test_the_pieces_lie_end_to_end_in_the_memory_of_the_box(shape_box, itemsize, chunk_bytes):
    shape, box = shape_box
    memory = np.arange(box.numel).reshape(box.sizes)
    seen = []
    for piece in cut(box, cell_shape(shape, itemsize, chunk_bytes)):
        assert piece.is_contiguous_in(box)
        elements = memory[piece.within(box)].reshape(-1)
        start = piece.flat_offset_in(box)
        assert elements.tolist() == list(range(start, start + piece.numel))
        seen += elements.tolist()
    assert seen == list(range(box.numel))


@QUICK
@given(shape_and_box(), itemsizes, chunk_sizes)
def test_no_piece_is_larger_than_a_chunk(shape_box, itemsize, chunk_bytes):
    shape, box = shape_box
    limit = max(chunk_bytes, itemsize)  # one element cannot be cut
    assert all(
        piece.numel * itemsize <= limit for piece in cut(box, cell_shape(shape, itemsize, chunk_bytes))
    )


@QUICK
@given(shapes, itemsizes, chunk_sizes)
def test_a_cell_is_the_largest_power_of_two_of_rows_that_fits(shape, itemsize, chunk_bytes):
    cell = cell_shape(shape, itemsize, chunk_bytes)
    fits = [dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) * itemsize <= chunk_bytes]
    if not fits:
        assert all(size == 1 for size in cell)
        return
    dim = fits[0]
    row_bytes = math.prod(shape[dim + 1 :]) * itemsize
    rows = cell[dim]
    assert cell == (*[1] * dim, rows, *shape[dim + 1 :])
    assert rows & (rows - 1) == 0
    assert rows * row_bytes <= chunk_bytes < 2 * rows * row_bytes


@st.composite
def two_shardings(draw):
    shape = draw(shapes)
    return shape, draw(tilings(shape)), draw(tilings(shape))


@QUICK
@given(two_shardings(), itemsizes, chunk_sizes)
def test_boundaries_are_grid_lines_or_edges_of_the_shard_whatever_the_sharding(drawn, itemsize, chunk_bytes):
    shape, first, second = drawn
    cell = cell_shape(shape, itemsize, chunk_bytes)
    for sharding in (first, second):
        for box in sharding:
            for piece in cut(box, cell):
                for dim, step in enumerate(cell):
                    start, end = piece.offsets[dim], piece.ends[dim]
                    assert start % step == 0 or start == box.offsets[dim]
                    assert end % step == 0 or end == box.ends[dim]
                    assert start // step == (end - 1) // step  # within one cell
    # A cell that no shard's edge crosses is one and the same chunk in both.
    whole = {piece for box in first for piece in cut(box, cell)} & {
        p for box in second for p in cut(box, cell)
    }
    for piece in cut(Box.whole(shape), cell):
        if all(any(piece.intersect(box) == piece for box in sharding) for sharding in (first, second)):
            assert piece in whole


@QUICK
@given(shape_and_two())
def test_two_boxes_meet_where_both_are(drawn):
    shape, a, b = drawn
    both = mask(shape, a) & mask(shape, b)
    common = a.intersect(b)
    if common is None:
        assert not both.any()
    else:
        assert (mask(shape, common) == both).all()
        assert common.numel > 0
    assert common == b.intersect(a)


@QUICK
@given(shape_and_two())
def test_a_box_is_contiguous_exactly_when_its_elements_are_adjacent(drawn):
    _, outer, inner = drawn
    part = inner.intersect(outer)
    if part is None:
        return
    memory = np.arange(outer.numel).reshape(outer.sizes)
    elements = memory[part.within(outer)].reshape(-1)
    assert part.is_contiguous_in(outer) == (np.diff(elements) == 1).all()
    assert part.flat_offset_in(outer) == elements[0]


@QUICK
@given(shape_and_boxes())
def test_uncovered_says_none_exactly_when_each_element_is_held_once(drawn):
    shape, boxes = drawn
    whole = Box.whole(shape)
    inside = all(not box.numel or box.intersect(whole) == box for box in boxes)
    count = np.zeros(shape, int)
    if inside:
        for box in boxes:
            count[box.within(whole)] += 1
    assert (uncovered(shape, boxes) is None) == (inside and bool((count == 1).all()))


@pytest.mark.parametrize(
    ("shape", "boxes", "word"),
    [
        ((), [], "not covered"),
        ((), [Box((), ())], None),
        ((0, 3), [], None),
        ((4,), [Box((0,), (2,))], "2 of 4"),
        ((4,), [Box((0,), (3,)), Box((2,), (2,))], "overlap"),
        ((4,), [Box((2,), (3,))], "outside"),
        # sizes add up and nothing is outside: only the overlap tells
        ((2, 2), [Box((0, 0), (1, 2)), Box((0, 0), (1, 2))], "overlap"),
    ],
)
def test_uncovered_names_what_is_wrong(shape, boxes, word):
    found = uncovered(shape, boxes)
    assert (found is None) if word is None else (word in found)


def test_a_scalar_is_one_cell_and_an_empty_box_has_no_piece():
    assert list(cut(Box((), ()), cell_shape((), 8, 1))) == [Box((), ())]
    assert list(cut(Box((0, 0), (0, 5)), cell_shape((0, 5), 8, 1024))) == []


def test_a_tensor_cut_over_four_or_eight_ranks_has_the_same_chunks():
    shape, cell = (1024, 256), cell_shape((1024, 256), 4, 1 << 16)

    def pieces(ranks):
        rows = shape[0] // ranks
        return {piece for r in range(ranks) for piece in cut(Box((r * rows, 0), (rows, 256)), cell)}

    assert pieces(4) == pieces(8) == pieces(1)
