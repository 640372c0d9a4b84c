"""The numbers of diff --values against plain numpy and torch, for every dtype."""

import math

import numpy as np
import pytest

from ckptstore.inspect import statistics
from ckptstore.inspect.diff import diff
from ckptstore.inspect.statistics import Accumulator
from ckptstore.model import numbers
from ckptstore.model.dtypes import BY_NAME
from tests.inspect.made import store

__all__ = ["store"]

SMALL = [name for name in BY_NAME if name.startswith(("float8", "bfloat16", "complex32"))]


@pytest.mark.torch
@pytest.mark.parametrize("name", SMALL)
def test_small_floats_are_decoded_as_torch_decodes_them(name):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"torch has no {name}")
    size = BY_NAME[name].itemsize
    codes = np.arange(1 << (8 * min(size, 2)), dtype=f"<u{min(size, 2)}")
    if name == "complex32":
        codes = np.stack([codes, codes[::-1]], axis=1)
    raw = np.ascontiguousarray(codes).view(np.uint8).reshape(-1)
    mine = numbers.decode(raw, BY_NAME[name])
    theirs = (
        torch.from_numpy(raw.copy()).view(dtype).to(torch.complex128 if size == 4 else torch.float64).numpy()
    )
    np.testing.assert_array_equal(mine, theirs)


def test_packed_floats_are_two_numbers():
    values = numbers.decode(np.array([0x10, 0xF7], np.uint8), BY_NAME["float4_e2m1fn_x2"])
    assert values.tolist() == [0, 0.5, 6, -6]


def result(old, new, dtype="float64", other=None):
    a, b = np.asarray(old), np.asarray(new)
    numbers_of = Accumulator(BY_NAME[dtype], BY_NAME[other or dtype])
    numbers_of.add(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
    return numbers_of.result(same_shape=True)


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "complex64", "complex128", "int8", "uint16", "int64"]
)
@pytest.mark.parametrize("block", [7, 1 << 16])
def test_against_numpy(dtype, block, monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK_ELEMENTS", block)
    source = np.random.default_rng(0)
    a = (source.standard_normal(1000) * 30).astype(dtype)
    b = (source.standard_normal(1000) * 30).astype(dtype)
    b[:100] = a[:100]
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    distance = np.abs(b.astype(wide) - a.astype(wide))
    found = result(a, b, dtype)
    assert found.elements == found.compared == 1000
    assert found.differing == np.count_nonzero(a != b)
    assert found.max_abs_diff == pytest.approx(distance.max())
    assert found.mean_abs_diff == pytest.approx(distance.mean())
    assert found.l2_diff == pytest.approx(np.linalg.norm(distance))
    assert found.old.l2 == pytest.approx(np.linalg.norm(a.astype(wide)))
    assert found.new.max_abs == pytest.approx(np.abs(b.astype(wide)).max())


def test_integers_of_64_bits_are_subtracted_exactly():
    top = 2**64 - 1
    found = result(np.array([top, 0], np.uint64), np.array([top - 1, top], np.uint64), "uint64")
    assert found.max_abs_diff == top
    assert found.differing == 2
    low, high = -(2**63), 2**63 - 1
    found = result(np.array([low, high], np.int64), np.array([high, high - 1], np.int64), "int64")
    assert found.max_abs_diff == top
    assert result(np.array([2**60], np.int64), np.array([2**60 + 1], np.int64), "int64").max_abs_diff == 1
    assert result(np.array([True, False]), np.array([True, True]), "bool").mean_abs_diff == 0.5


def test_what_is_not_finite_is_counted_and_left_out():
    nan, inf = math.nan, math.inf
    found = result([1.0, nan, inf, -inf, nan, 2.0, 3.0], [2.0, nan, inf, inf, 0.0, inf, nan])
    assert (found.old.nan, found.old.inf, found.new.nan, found.new.inf) == (2, 2, 2, 3)
    assert found.compared == 1
    assert found.differing == 5
    assert (found.max_abs_diff, found.mean_abs_diff) == (1.0, 1.0)
    nothing = result([nan], [nan])
    assert (nothing.differing, nothing.compared, nothing.max_abs_diff) == (0, 0, None)


def test_norms_neither_overflow_nor_vanish():
    found = result(np.full(4, 1e300), np.full(4, -1e300))
    assert found.old.l2 == pytest.approx(2e300)
    assert found.l2_diff == pytest.approx(4e300)
    tiny = result(np.full(4, 1e-300), np.zeros(4))
    assert tiny.old.l2 == pytest.approx(2e-300)
    most = np.finfo(np.float64).max
    assert result(np.array([most]), np.array([-most])).max_abs_diff == math.inf


def test_minus_zero_differs_in_bytes_and_not_in_value():
    found = result([0.0, 1.0], [-0.0, 1.0])
    assert (found.differing, found.differing_bytes) == (0, True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.arange(6, dtype="f4"), np.arange(6, dtype="f8") + 1),
        (np.arange(6, dtype="i4"), np.arange(6, dtype="f4") + 1),
        (np.arange(6, dtype="i8"), np.arange(6, dtype="u8") + 1),
        (np.arange(6, dtype="f4"), np.arange(6, dtype="c8") + 1),
        (np.arange(6, dtype=">f8"), np.arange(6, dtype="<f8") + 1),
    ],
)
def test_other_dtypes_are_compared_by_value(store, old, new):
    a = store.run("r").save(1, {"w": old}).result()
    b = store.run("r").save(2, {"w": new}).result()
    found = diff(a, b, values=True).tensors[0]
    assert found.values.max_abs_diff == 1
    assert found.values.differing == 6
    assert found.values.differing_bytes


def test_other_shapes_are_described_side_by_side(store):
    a = store.run("r").save(1, {"w": np.full(4, 3.0)}).result()
    b = store.run("r").save(2, {"w": np.full((2, 8), 1.0)}).result()
    found = diff(a, b, values=True).tensors[0].values
    assert (found.differing, found.max_abs_diff, found.elements) == (None, None, 16)
    assert (found.old.l2, found.new.l2) == (6, 4)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (), (3, 0, 5)])
def test_empty_and_scalar_tensors(store, shape):
    a = store.run("r").save(1, {"w": np.zeros(shape)}).result()
    b = store.run("r").save(2, {"w": np.ones(shape)}).result()
    found = diff(a, b, values=True)
    assert found.identical == (0 in shape)
    c = store.run("r").save(3, {"w": np.ones(shape, np.float32)}).result()
    assert diff(a, c, values=True).tensors[0].what == ("dtype",)


@pytest.mark.torch
def test_every_torch_dtype_goes_through(store):
    torch = pytest.importorskip("torch")
    source = torch.Generator().manual_seed(0)
    old, new = {}, {}
    for name in BY_NAME:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        for state in (old, new):
            raw = torch.randint(
                0, 2 if name == "bool" else 256, (64, 16), generator=source, dtype=torch.uint8
            )
            state[name] = raw.view(dtype)
    a = store.run("r").save(1, old).result()
    b = store.run("r").save(2, new).result()
    found = {t.name: t.values for t in diff(a, b, values=True).tensors}
    assert set(found) == set(old)
    for name, values in found.items():
        numbers_in = old[name].numel() * (2 if name.endswith("_x2") else 1)
        assert values.elements == numbers_in, name
        assert values.differing > 0
        assert values.l2_diff > 0
