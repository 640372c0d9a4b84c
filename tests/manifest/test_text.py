"""Values as text: exact where it must be, harmless everywhere."""

import collections
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.manifest.text import (
    MAX_JSON_CHARS,
    iso,
    metrics_from_json,
    metrics_json,
    number_real,
    number_text,
    people_json,
    ranges_text,
)

NUMBERS = st.one_of(st.integers(), st.floats(), st.integers(10**4400, 10**4401))
TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), NUMBERS))
def test_metrics_survive_json_exactly_and_it_is_strict(metrics):
    text = metrics_json(metrics)
    json.loads(text, parse_constant=pytest.fail)
    assert {k: repr(v) if isinstance(v, float) else v for k, v in metrics_from_json(text).items()} == {
        k: repr(v) if isinstance(v, float) else v for k, v in metrics.items()
    }


@given(TREES)
def test_any_value_becomes_strict_json(value):
    json.loads(people_json(value), parse_constant=pytest.fail)


def test_odd_values_become_something_readable():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert "too deeply" in people_json(deep)
    assert "characters" in people_json("x" * (MAX_JSON_CHARS + 1))
    assert len(people_json("x" * (MAX_JSON_CHARS + 1), max_chars=None)) > MAX_JSON_CHARS
    assert people_json(b"\x00\xff") == '"bytes[2] 00ff"'
    assert people_json(np.float64(0.5)) == "0.5"
    assert people_json({1: {3, 1}, "o": collections.OrderedDict(a=())}) == '{"1": [1, 3], "o": {"a": []}}'
    assert people_json(np.dtype("int8")) == '"int8"'
    assert json.loads(people_json("\ud800")) == "\ud800"
    people_json("\ud800").encode()


def test_times():
    assert iso(None) is None
    assert iso(0.0) == "1970-01-01T00:00:00.000Z"
    assert iso(1_795_953_600.1239) == "2026-11-29T12:00:00.123Z"
    for broken in (math.nan, math.inf, 1e300, -1e300):
        assert iso(broken) == repr(broken)


def test_numbers():
    assert [number_text(x) for x in (1, 1.0, math.nan, -math.inf, -0.0, True)] == [
        "1", "1.0", "NaN", "-Infinity", "-0.0", "1"
    ]  # fmt: skip
    assert [number_real(x) for x in (1, math.nan, 10**400, -(10**400))] == [1.0, None, math.inf, -math.inf]


def test_ranges():
    assert ranges_text((0, 512), (1024, 512)) == "[0:1024, 512:1024]"
    assert ranges_text((), ()) == "[]"
