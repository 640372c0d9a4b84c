import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import DocumentError, SaveFailedError
from ckptstore.model import unpack
from ckptstore.model.boxes import Box
from ckptstore.model.dtypes import BY_NAME
from ckptstore.model.layout import Layout, Tensor
from ckptstore.model.tables import KeyList
from ckptstore.save.agree import Agreement
from ckptstore.save.merge import Merger
from ckptstore.save.parts import COMPARED, LEFT, WRITTEN, decode_part, encode_part
from tests.model.made import QUICK
from tests.ranks_merge.made import part_of, parts, ranks, thinned, tree_of
from tests.ranks_merge.reference import agreed, merged, pieces


def chunks_of(assembly):
    """(digest, key, bytes of the object, offset) of each chunk, in table order."""
    rows = assembly.locations
    return [
        (digest, assembly.keys.keys[number], int(assembly.keys.sizes[number]), offset)
        for digest, number, offset in zip(
            assembly.digests, rows.object.tolist(), rows.offset.tolist(), strict=True
        )
    ]


def outcome(merger, given_parts, **options):
    try:
        assembly, notes = merger.merge(given_parts, "the save", **options)
    except SaveFailedError as error:
        return error.message
    return (
        assembly.layout.encode(),
        chunks_of(assembly),
        assembly.keys.encode(),
        assembly.tree,
        assembly.components,
        notes,
    )


@QUICK
@given(st.data())
def test_a_merge_says_what_the_plainest_way_says(data):
    layouts = data.draw(ranks())
    made = data.draw(parts(layouts))
    if data.draw(st.booleans()):
        made = thinned(made, Agreement.of(layouts))
    expected = merged(made)
    found = outcome(Merger(), made)
    if expected.unwritten:
        assert "nobody wrote" in found
        assert all(name in found for name in {name for name, _ in expected.unwritten})
    elif expected.differing:
        assert "is replicated, but" in found
        for name, (unlike, kept) in expected.differing.items():
            shown = ", ".join(map(str, sorted(unlike)))
            rank = "rank" if len(unlike) == 1 else "ranks"
            assert (
                f"{name} is replicated, but {rank} {shown} hold other bytes than rank {min(kept)} " in found
            )
        warned = outcome(Merger(), made, replicas="warn")
        assert warned[1] == expected.chunks
        assert len(warned[-1]) == len(expected.differing)
        allowed = [dataclasses.replace(part, may_differ=tuple(expected.differing)) for part in made]
        assert outcome(Merger(), allowed)[1] == expected.chunks
    else:
        assert found[1] == expected.chunks
        layout = Layout.decode(found[0])
        held = {(name, box.offsets, box.sizes, k) for own in layouts for name, box, k, _ in pieces(own)}
        assert [(name, box.offsets, box.sizes, k) for name, box, k, _ in pieces(layout)] == sorted(held)
        assert layout.check_coverage() == []


@QUICK
@given(st.data())
def test_the_second_save_says_the_same_with_and_without_what_the_first_has_left(data):
    layouts = data.draw(ranks())
    first, second = data.draw(parts(layouts)), data.draw(parts(layouts, number=2))
    merger = Merger()
    outcome(merger, first)
    joined = merger._joined
    # What comes over the wire: ranks whose layout is known leave it out.
    known = outcome(Merger(), first)
    sent = [
        decode_part(
            encode_part(part, with_layout=merger.known.layout(part.layout.digest) is None), "p", merger.known
        )
        for part in second
    ]
    assert outcome(merger, sent) == outcome(Merger(), second)
    if not isinstance(known, str):
        assert merger._joined is joined  # nothing about the layouts was worked out again


@QUICK
@given(st.data())
def test_a_merger_notices_that_a_layout_has_changed(data):
    merger = Merger()
    for layouts in (data.draw(ranks(3)), data.draw(ranks(3))):
        made = data.draw(parts(layouts))
        assert outcome(merger, made) == outcome(Merger(), made)


@QUICK
@given(ranks())
def test_who_writes_what_is_what_the_plainest_way_says(layouts):
    writers = agreed(layouts)
    agreement = Agreement.of(layouts)
    again = Agreement.decode(agreement.encode())
    assert again.layout.encode() == agreement.layout.encode()
    assert again.writers.tolist() == agreement.writers.tolist()
    for rank, layout in enumerate(layouts):
        expected = [
            key not in writers or writers[key][k] == rank
            for key, k in (((name, box.offsets, box.sizes), k) for name, box, k, _ in pieces(layout))
        ]
        assert agreement.duty(layout, rank).tolist() == again.duty(layout, rank).tolist() == expected
        assert agreement.known(layout).all()
        other = Agreement.of(layouts[:rank])
        here = {(name, box) for before in layouts[:rank] for name, box, _, _ in pieces(before)}
        assert other.known(layout).tolist() == [(name, box) in here for name, box, _, _ in pieces(layout)]


@pytest.mark.parametrize("cut_at", [0, 8, 16, 30, -1])
def test_a_damaged_agreement_is_refused(cut_at):
    data = Agreement.of([simple()]).encode()
    with pytest.raises(DocumentError):
        Agreement.decode(data[:cut_at])


@pytest.mark.parametrize("claim", [3, 1 << 31, 1 << 62])
def test_an_agreement_that_claims_another_length_is_refused(claim):
    data = bytearray(Agreement.of([simple()]).encode())
    data[:8] = claim.to_bytes(8, "little")
    with pytest.raises(DocumentError):
        Agreement.decode(bytes(data))


# --- by hand -------------------------------------------------------------------------------------


def simple(name="w", shape=(8,), box=None, dtype="uint8", chunk_bytes=1024):
    held = Box.whole(shape) if box is None else box
    return Layout((Tensor(name, "model", BY_NAME[dtype], shape, "torch", (held,)),), (), chunk_bytes)


def test_a_hole_is_named():
    halves = [part_of(r, simple(box=Box((5 * r,), (3,))), [WRITTEN]) for r in range(2)]
    assert "w: 2 of 8 elements are not covered" in outcome(Merger(), halves)


def test_ranks_that_see_other_tensors_are_named():
    made = [part_of(r, simple(shape=(8,) if r < 2 else (8, 1)), [WRITTEN]) for r in range(4)]
    assert "w: uint8 [8, 1] on ranks 2, 3, uint8 [8] elsewhere" in outcome(Merger(), made)


def test_a_chunk_outside_of_its_object_is_refused():
    part = part_of(0, simple(), [WRITTEN])
    moved = dataclasses.replace(part, offsets=part.offsets + 1)
    assert "outside of its object" in outcome(Merger(), [moved])


def test_a_bit_flipped_in_one_replica_fails_the_save_and_a_buffer_is_noted():
    made = [
        part_of(r, simple(), [WRITTEN if r == 0 else COMPARED], salt=["x" if r == 2 else ""])
        for r in range(3)
    ]
    assert "w is replicated, but rank 2 hold" in outcome(Merger(), made)
    noted = [dataclasses.replace(part, may_differ=("w",)) for part in made]
    assert outcome(Merger(), noted)[-1] == ["w differs on rank 2; rank 0's is kept"]


def test_trees_are_joined_by_name():
    one = dataclasses.replace(
        part_of(0, simple("a"), [WRITTEN]), tree=tree_of(simple("a"), step=3, shared={"x": 1})
    )
    two = dataclasses.replace(
        part_of(1, simple("b"), [WRITTEN]), tree=tree_of(simple("b"), step=4, shared={"y": 2})
    )
    merger = Merger()
    for _ in range(2):
        assembly, _ = merger.merge([one, two], "the save")
        tree = unpack.decode(assembly.tree, lambda index, kind, detail: index, "t")
        assert tree == {"a": 0, "step": 3, "shared": {"x": 1, "y": 2}, "b": 1}
    later = dataclasses.replace(one, tree=tree_of(simple("a"), step=5))
    tree = unpack.decode(merger.merge([later, two], "s")[0].tree, lambda index, kind, detail: index, "t")
    assert tree["step"] == 5


# --- documents -----------------------------------------------------------------------------------


@QUICK
@given(st.data())
def test_a_part_comes_back(data):
    for part in data.draw(parts(data.draw(ranks(3)))):
        found = decode_part(encode_part(part), "p")
        assert (found.rank, found.step, found.counter, found.error) == (part.rank, 1, 1, None)
        assert found.layout == part.layout
        assert found.layout.digest == part.layout.digest
        assert found.keys.keys == part.keys.keys
        assert found.keys.sizes.tolist() == part.keys.sizes.tolist()
        for name in ("state", "objects", "offsets"):
            assert getattr(found, name).tolist() == getattr(part, name).tolist()
        hashed = [digest for digest, state in zip(found.digests, part.state, strict=True) if state != LEFT]
        assert hashed == [digest for digest in part.digests if digest]
        assert (found.tree, found.components) == (part.tree, part.components)


def test_a_part_that_rests_on_an_unknown_layout_is_refused():
    part = part_of(0, simple(), [WRITTEN])
    with pytest.raises(DocumentError, match="rests on a layout that rank 0 has not seen"):
        decode_part(encode_part(part, with_layout=False), "p")


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": np.zeros(2, np.uint8)},
        {"offsets": np.zeros(3, np.int64)},
        {"digests": []},
        {"keys": dataclasses.replace(KeyList.of({}), attempts=("no attempt",))},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_part_of_impossible_columns_is_refused(wrong):
    part = dataclasses.replace(part_of(0, simple(), [WRITTEN]), **wrong)
    with pytest.raises(DocumentError):
        decode_part(encode_part(part), "p")


@pytest.mark.parametrize(
    "wrong", [{"state": np.array([7], np.uint8)}, {"objects": np.array([1])}], ids=["state", "object"]
)
def test_a_part_of_impossible_rows_is_refused_when_all_are_there(wrong):
    made = [part_of(r, simple(), [WRITTEN]) for r in range(2)]
    made[1] = dataclasses.replace(made[1], **wrong)
    sent = [decode_part(encode_part(part), "p") for part in made]
    assert "the part of rank 1 is damaged" in outcome(Merger(), sent)
