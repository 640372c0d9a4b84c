"""Work on many boxes is work on columns: how much Python runs does not grow with their number."""

import sys

import pytest

from benchmarks.scale_parts import Mesh, parts
from ckptstore.model.layout import Layout
from ckptstore.model.tables import written_bytes
from ckptstore.save.merge import Merger
from ckptstore.save.parts import decode_part, encode_part
from tests.model.made import attempt


def calls(work):
    """(how many functions `work` called, Python's and C's; what it returned)."""
    count = 0

    def note(_frame, event, _arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        found = work()
    finally:
        sys.setprofile(None)
    return count, found


@pytest.fixture(scope="module")
def counted():
    """Ranks, chunks, and calls per phase, of the second save of 32 and of 128 ranks."""
    return [_counted(Mesh(2, 1, data, 4)) for data in (8, 32)]


def _counted(mesh):
    merger = Merger()
    merger.merge([decode_part(encode_part(p), "p", merger.known) for p in parts(mesh, attempt(1), 1)], "s")
    raw = [encode_part(p, with_layout=False) for p in parts(mesh, attempt(2), 2)]
    found = {}
    found["decode"], second = calls(lambda: [decode_part(one, "p", merger.known) for one in raw])
    found["merge"], (made, _) = calls(lambda: merger.merge(second, "s"))
    table = made.layout.encode()
    found["layout"], layout = calls(lambda: _taken(table))
    found["written"], _ = calls(lambda: written_bytes(layout, made.locations, made.keys, attempt(2)))
    return mesh.world_size, layout.chunk_count, found


def _taken(table):
    layout = Layout.decode(table)
    assert layout.check_coverage() == []
    assert int(layout.chunks.nbytes.sum()) > 0
    return layout


def test_calls_grow_with_ranks_and_tensors_and_not_with_boxes(counted):
    (few_ranks, few, small), (many_ranks, many, large) = counted
    assert many > 1.25 * few
    assert large["layout"] < 1.2 * small["layout"]
    assert large["written"] < 1.2 * small["written"]
    for phase in ("decode", "merge"):
        assert large[phase] / many_ranks < 1.2 * small[phase] / few_ranks + 5
    assert large["merge"] < many / 4  # nothing is done chunk by chunk
