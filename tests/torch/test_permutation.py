from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.torch import permutation
from ckptstore.torch.permutation import SORT_LIMIT, Permutation, derive

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("length", [1, 2, 3, 5, 1000, SORT_LIMIT, SORT_LIMIT + 1, 300_001, 1 << 19])
def test_every_element_comes_once(length):
    values = Permutation(length, 12345)(np.arange(length))
    assert values.dtype == np.int64
    assert np.array_equal(np.sort(values), np.arange(length))


@settings(deadline=None)
@given(length=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_the_network_is_a_bijection_for_small_lengths_too(length, key):
    with mock.patch.object(permutation, "SORT_LIMIT", 0):
        values = Permutation(length, key)(np.arange(length))
    assert sorted(values.tolist()) == list(range(length))


def test_huge_lengths_cost_nothing_and_stay_inside():
    length = 10**12 + 39
    values = Permutation(length, 7)(np.arange(length - 5000, length))
    assert len(set(values.tolist())) == 5000
    assert values.min() >= 0
    assert values.max() < length
    # Spread over the whole range, not near where the positions were.
    counts, _ = np.histogram(values, bins=10, range=(0, length))
    assert counts.min() > 400


@pytest.mark.parametrize("length", [1000, SORT_LIMIT + 1000])
def test_orders_of_other_keys_have_nothing_in_common(length):
    one, two = (Permutation(length, derive(3, epoch))(np.arange(length)) for epoch in (0, 1))
    assert (one == two).sum() < 12  # one is expected
    assert abs(np.corrcoef(one, np.arange(length))[0, 1]) < 0.15
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.15


def test_the_orders_are_fixed_for_ever():
    assert Permutation(10, derive(0, 0))(np.arange(10)).tolist() == SMALL
    assert Permutation(10**9, derive(1, 2))(np.arange(4)).tolist() == LARGE


def test_keys_depend_on_all_numbers_and_their_order():
    keys = {
        derive(*numbers) for numbers in [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**64 - 1, 0), (0, 2**64 - 1)]
    }
    assert len(keys) == 7
    assert all(0 <= key < 2**64 for key in keys)


SMALL = [0, 7, 8, 6, 3, 4, 2, 1, 5, 9]
LARGE = [999960691, 216189999, 111055392, 331520727]
