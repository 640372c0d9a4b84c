"""The text against the parser of prometheus_client."""

from __future__ import annotations

import io
import math
import operator
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.metrics import definitions
from ckptstore.metrics.exposition import Family, Sample, check_namespace, exposition
from tests.metrics.made import AWKWARD

parser = pytest.importorskip("prometheus_client.parser")


def parsed(text: str) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Of each metric: (name, labels, value) of its samples."""
    found = {}
    for family in parser.text_fd_to_metric_families(io.StringIO(text, newline="\n")):
        assert family.name not in found
        found[family.name] = [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return found


def gauge(*samples: Sample, text: str = "What it tells.") -> Family:
    return Family("a_b", "gauge", text, samples)


@settings(max_examples=40)
@given(st.text(max_size=40), st.text(max_size=10))
def test_any_text_in_a_label_comes_back(first, second):
    text = exposition([gauge(Sample("", (("run", first), ("kind", second)), 1))])
    assert parsed(text) == {"a_b": [("a_b", {"run": first, "kind": second}, 1.0)]}


def test_an_awkward_label_takes_one_line():
    text = exposition([gauge(Sample("", (("run", AWKWARD),), 1))])
    assert text.count("\n") == 3
    assert parsed(text)["a_b"][0][1] == {"run": AWKWARD}


@settings(max_examples=40)
@given(st.one_of(st.floats(), st.integers(-(2**70), 2**70)))
def test_any_number_comes_back(value):
    [(_, labels, found)] = parsed(exposition([gauge(Sample("", (), value))]))["a_b"]
    assert labels == {}
    assert float(found) == float(value) or (math.isnan(found) and math.isnan(value))


def test_help_is_one_line():
    text = exposition([gauge(Sample("", (), 1), text="two\nlines \\ here")])
    assert text.splitlines()[0] == r"# HELP a_b two\nlines \\ here"


def test_a_counter_is_named_like_its_samples():
    text = exposition([Family("a", "counter", "h", (Sample("_total", (), 3),))])
    assert text == "# HELP a_total h\n# TYPE a_total counter\na_total 3\n"


def test_a_metric_without_numbers_is_left_out():
    assert exposition([gauge()]) == ""


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a.b", "a\n", "é", 3])
def test_names_that_cannot_begin_a_metric(name):
    with pytest.raises(UsageError, match="namespace="):
        check_namespace(name)


@pytest.mark.parametrize(
    "definition",
    sorted(
        {*definitions.OF_A_PROCESS, *definitions.OF_A_STORE, *definitions.OF_A_ROUND},
        key=operator.attrgetter("name"),
    ),
    ids=operator.attrgetter("name"),
)
def test_definitions_keep_the_conventions(definition):
    """https://prometheus.io/docs/practices/naming/"""
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", definition.name)
    assert not definition.name.endswith(("_total", "_count", "_sum", "_bucket"))  # of the format itself
    assert definition.help.endswith(".")
    assert definition.labels[0] == ("tier" if definition in definitions.OF_A_ROUND else "run")
    assert not set(definition.labels) & {"le", "quantile", "job", "instance"}
    if definition.kind in ("histogram", "summary"):
        assert definition.name.endswith("_seconds")


def test_names_are_given_once():
    for group in (definitions.OF_A_PROCESS, definitions.OF_A_STORE, definitions.OF_A_ROUND):
        assert len({definition.name for definition in group}) == len(group)
    assert list(definitions.BLOCKED_BUCKETS) == sorted(set(definitions.BLOCKED_BUCKETS))
