"""Reading parts of strided views gives what numpy gives, whatever the view and the part."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.transfer import strided


@st.composite
def views(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    strides = tuple(draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
    offset = draw(st.integers(0, 7))
    count = int(np.prod(shape))
    start = draw(st.integers(0, count))
    return shape, strides, offset, start, draw(st.integers(start, count))


@settings(deadline=None)
@given(views(), st.sampled_from([1, 2, 8, 16]), st.sampled_from([8, 40, 1 << 20]))
def test_any_part_of_any_view(view, itemsize, span_bytes):
    shape, strides, offset, start, stop = view
    storage = np.random.default_rng(0).integers(0, 255, 300 * itemsize, np.uint8)
    whole = np.lib.stride_tricks.as_strided(
        storage.view(f"V{itemsize}")[offset:], shape, [stride * itemsize for stride in strides]
    )
    expected = whole.reshape(-1)[start:stop].tobytes()
    longest = 0

    def read(a, b):
        nonlocal longest
        longest = max(longest, b - a)
        return memoryview(storage)[a:b]

    old = strided.SPAN_BYTES
    strided.SPAN_BYTES = span_bytes
    try:
        found = strided.read_strided(
            read, itemsize, shape, strides, offset, (start * itemsize, stop * itemsize)
        )
    finally:
        strided.SPAN_BYTES = old
    assert bytes(found) == expected
    assert longest <= max(span_bytes, itemsize)


def test_one_element_seen_many_times_is_read_even_if_it_is_longer_than_a_span(monkeypatch):
    monkeypatch.setattr(strided, "SPAN_BYTES", 8)
    data = memoryview(bytes(range(16)))
    found = strided.read_strided(lambda a, b: data[a:b], 16, (1, 3), (0, 0), 0, (0, 48))
    assert bytes(found) == bytes(range(16)) * 3


def test_a_transposed_matrix_larger_than_a_span_is_read_in_parts(monkeypatch):
    monkeypatch.setattr(strided, "SPAN_BYTES", 1000)
    matrix = np.arange(100 * 70, dtype=np.int32).reshape(100, 70)
    data = memoryview(matrix.tobytes())
    found = strided.read_strided(lambda a, b: data[a:b], 4, (70, 100), (1, 70), 0, (0, matrix.nbytes))
    assert bytes(found) == np.ascontiguousarray(matrix.T).tobytes()
