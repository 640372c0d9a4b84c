"""Columns say what boxes, keys and rows one by one say."""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import DocumentError
from ckptstore.load.plan import Want, plan
from ckptstore.model.box_columns import BoxRows
from ckptstore.model.boxes import Box, cut
from ckptstore.model.dtypes import BY_NAME
from ckptstore.model.ids import ObjectName, chunk_key, digest_of, pack_key
from ckptstore.model.layout import Layout, Tensor
from ckptstore.model.tables import Digests, KeyList, Locations, written_bytes
from tests.model.made import QUICK, attempt, boxes_in, layouts, shapes, tilings
from tests.ranks_merge.reference import covers_once, pieces


@QUICK
@given(layouts())
def test_a_decoded_layout_has_the_tensors_boxes_and_chunks_that_were_encoded(layout):
    found = Layout.decode(layout.encode())
    assert [dataclasses.replace(t, boxes=tuple(t.boxes)) for t in found.tensors] == list(layout.tensors)
    assert found.by_name == layout.by_name
    for name in ("tensor", "nbytes", "first"):
        assert getattr(found.chunks, name).tolist() == getattr(layout.chunks, name).tolist()
    sizes = [
        box.numel * layout.tensors[layout.by_name[name]].dtype.itemsize for name, _, _, box in pieces(layout)
    ]
    assert found.chunks.nbytes.tolist() == sizes
    for i in range(len(layout.tensors)):
        assert found.chunk_boxes(i) == layout.chunk_boxes(i)


@QUICK
@given(st.data())
def test_coverage_is_exact(data):
    tensors, expected = [], []
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        shape = data.draw(shapes.filter(lambda shape: np.prod(shape, dtype=int) < 500))
        boxes = list(data.draw(tilings(shape)))
        flaw = data.draw(st.sampled_from(["none", "none", "lost", "twice", "other"]))
        at = data.draw(st.integers(0, len(boxes) - 1))
        if flaw == "lost":
            del boxes[at]
        elif flaw == "twice" and shape:
            boxes.append(boxes[at])
        elif flaw == "other":
            boxes[at] = data.draw(boxes_in(shape))
        tensors.append(Tensor(name, "c", BY_NAME["uint8"], shape, "torch", tuple(boxes)))
        if not covers_once(shape, boxes):
            expected.append(name)
    layout = Layout(tuple(tensors), (), 64)
    for one in (layout, Layout.decode(layout.encode())):
        assert [line.split(":")[0] for line in one.check_coverage()] == expected


def test_boxes_made_on_demand_look_like_boxes():
    offsets = np.arange(60).reshape(30, 2)
    rows = BoxRows(offsets, offsets + 1)
    plain = tuple(Box((2 * i, 2 * i + 1), (2 * i + 1, 2 * i + 2)) for i in range(30))
    assert tuple(rows) == plain
    assert rows == plain
    assert rows == BoxRows(offsets.copy(), offsets + 1)
    assert rows != plain[:-1]
    assert rows != "boxes"
    assert hash(rows) == hash(plain)
    assert (rows[3], rows[-1], tuple(rows[2:4])) == (plain[3], plain[-1], plain[2:4])
    assert repr(rows) == "<30 boxes>"
    assert "Box(" in repr(rows[:2])


# --- keys ----------------------------------------------------------------------------------------

keys = st.builds(
    lambda make, n, session, step, tries, rank: make(
        digest_of(bytes([n])), attempt(session, step=step, tries=tries), rank
    ),
    st.sampled_from([chunk_key, pack_key]),
    st.integers(0, 3),  # so few that many keys differ in attempt or rank only
    st.integers(0, 1),
    st.sampled_from([-1, 1, 2, 10, 11]),
    st.sampled_from([1, 2, 10]),
    st.one_of(st.integers(0, 12), st.sampled_from([99, 100, 101, 1000, 2**32 - 1])),
)


@QUICK
@given(st.dictionaries(keys, st.integers(0, 2**40)))
def test_a_key_list_is_in_the_order_of_its_text(sizes):
    found = KeyList.of(sizes)
    assert list(found.keys) == sorted(sizes)
    back = KeyList.decode(found.encode())
    assert back.keys == found.keys
    assert [back.key(row) for row in range(len(back))] == list(found.keys)
    for name in found.attempts:
        own = [ObjectName.parse(key).attempt == name for key in found.keys]
        assert back.written_by(name).tolist() == own
    assert not back.written_by(attempt(9)).any()


@QUICK
@given(st.data())
def test_key_lists_joined_are_one_key_list(data):
    all_keys = data.draw(st.lists(keys, unique=True))
    lists = [
        KeyList.of(
            {key: len(key) for key in data.draw(st.sets(st.sampled_from(all_keys)))} if all_keys else {}
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    given_keys = [key for one in lists for key in one.keys]
    needed = np.array([data.draw(st.booleans()) for _ in given_keys], bool)
    found, rows = KeyList.joined(lists, needed)
    wanted = {key for key, take in zip(given_keys, needed.tolist(), strict=True) if take}
    expected = KeyList.of({key: len(key) for key in wanted})
    assert found.encode() == expected.encode()
    for key, take, row in zip(given_keys, needed.tolist(), rows.tolist(), strict=True):
        assert (found.keys[row] == key) if take else row == -1


@QUICK
@given(st.lists(st.integers(0, 255), max_size=5))
def test_digests_are_a_sequence_of_bytes(numbers):
    plain = [digest_of(bytes([n])) for n in numbers]
    found = Digests.of(plain)
    assert found == plain
    assert plain == found
    assert list(found) == plain
    assert found[1:] == plain[1:]
    assert [found[i] for i in range(len(found))] == plain
    assert found != [*plain, b""]
    assert hash(found) == hash(Digests.of(plain))
    assert Digests.of([b"", *plain])[0] == bytes(32)


# --- rows ----------------------------------------------------------------------------------------


@QUICK
@given(st.data())
def test_equal_chunks_count_as_written_once_wherever_they_are(data):
    layout = data.draw(layouts())
    count = len(layout.chunks)
    list_of = KeyList.of({chunk_key(digest_of(bytes([n])), attempt(n % 2), n): 1 for n in range(4)})
    offset = st.integers(0, 2) if data.draw(st.booleans()) else st.integers(2**62, 2**63 - 1)
    objects = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    offsets = data.draw(st.lists(offset, min_size=count, max_size=count))
    rows = Locations(
        np.array(objects, np.int64),
        np.array(offsets, np.int64),
        layout.chunks.nbytes,
        np.zeros(count, np.uint8),
    )
    expected, seen = [0] * len(layout.tensors), set()
    for row, place in enumerate(zip(objects, offsets, strict=True)):
        if place not in seen and f".{attempt(1)}." in list_of.keys[place[0]]:
            expected[int(layout.chunks.tensor[row])] += int(layout.chunks.nbytes[row])
        seen.add(place)
    assert written_bytes(layout, rows, list_of, attempt(1)).tolist() == expected


@QUICK
@given(st.data())
def test_a_plan_reads_the_chunks_that_meet_what_is_wanted_and_no_other(data):
    layout = data.draw(layouts().filter(lambda layout: len(layout.tensors) > 0))
    if data.draw(st.booleans()):
        layout = Layout.decode(layout.encode())
    count = len(layout.chunks)
    key_list = KeyList.of({chunk_key(digest_of(bytes([n])), attempt(), 0): 1 << 40 for n in range(3)})
    order = data.draw(st.permutations(range(count)))
    locations = Locations(
        np.array([row % 3 for row in order], np.int64),
        np.array([row * 2000 for row in order], np.int64),
        layout.chunks.nbytes,
        np.zeros(count, np.uint8),
    )
    contents = types.SimpleNamespace(layout=layout, locations=locations, keys=key_list)
    wants = []
    for _ in range(data.draw(st.integers(1, 4))):
        i = data.draw(st.integers(0, len(layout.tensors) - 1))
        tensor = layout.tensors[i]
        if tensor.nbytes:
            box = data.draw(st.one_of(st.just(Box.whole(tensor.shape)), boxes_in(tensor.shape)))
            wants.append(Want(i, box, np.zeros(box.sizes, np.uint8)))
    expected = {}
    for number, want in enumerate(wants):
        row = int(layout.chunks.first[want.tensor])
        for box in layout.tensors[want.tensor].boxes:
            for piece in cut(box, layout.cell(want.tensor)):
                part = piece.intersect(want.box)
                if part is not None:
                    expected.setdefault(row, []).append((number, piece, part))
                row += 1
    found = {}
    for read in plan(contents, wants):
        assert read.pieces[0].offset == read.offset
        for piece in read.pieces:
            row = piece.uses[0].row
            assert read.key == key_list.keys[int(locations.object[row])]
            assert (piece.offset, piece.length) == (int(locations.offset[row]), int(locations.length[row]))
            assert piece.offset + piece.length <= read.offset + read.length
            # Distinct places here, so a piece is one row.
            assert {use.row for use in piece.uses} == {row}
            found[row] = [
                (next(n for n, want in enumerate(wants) if want is use.want), use.chunk_box, use.part)
                for use in piece.uses
            ]
    assert found == expected


@pytest.mark.parametrize("rows", [[(0, 1)], [(2, 1)], [(0, 3), (2, 0)]])
def test_a_box_outside_of_its_tensor_is_refused(rows):
    boxes = tuple(Box((offset,), (size,)) for offset, size in rows)
    layout = Layout((Tensor("a", "c", BY_NAME["uint8"], (2,), "torch", boxes),), (), 64)
    if all(offset + size <= 2 for offset, size in rows):
        assert Layout.decode(layout.encode()) == layout
    else:
        with pytest.raises(DocumentError, match="outside of 'a'"):
            Layout.decode(layout.encode())
