import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import DocumentError, FormatTooNewError, UsageError
from ckptstore.model.documents import seal
from ckptstore.model.policies import ORIGINS, Policy, PolicyDoc, decode_policy, encode_policy
from ckptstore.model.retention import Keep
from tests.model.made import QUICK
from tests.model.test_retention import policies as keeps

names = st.text(min_size=1, max_size=8)
policies = st.builds(
    Policy,
    st.one_of(st.none(), keeps),
    st.dictionaries(names, keeps, max_size=2),
    st.dictionaries(names, keeps, min_size=1, max_size=2),
)
documents = st.builds(
    PolicyDoc,
    number=st.integers(1, 2**63 - 1),
    at=st.floats(0, 4e9),
    author=st.text(max_size=20),
    origin=st.sampled_from(ORIGINS),
    policy=st.one_of(st.none(), policies),
)


@QUICK
@given(documents)
def test_a_document_comes_back_as_it_was(document: PolicyDoc) -> None:
    assert decode_policy(encode_policy(document), "k") == document


@QUICK
@given(policies)
def test_a_policy_survives_as_plain_data(policy: Policy) -> None:
    assert Policy.from_map(msgpack.unpackb(msgpack.packb(policy.as_map()))) == policy
    assert str(policy)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["components", "tiers", "last", "every", "within", "tags", "best", "n"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@QUICK
@given(st.dictionaries(st.sampled_from(["number", "at", "author", "origin", "policy", "x"]), plain), plain)
def test_a_document_that_says_anything_at_all_is_read_or_refused(body: dict[str, Any], policy: Any) -> None:
    good = {"number": 1, "at": 0.0, "author": "a", "origin": "code", "policy": policy}
    for fields in (body, good):
        with contextlib.suppress(DocumentError, FormatTooNewError):
            decode_policy(seal("policy", fields), "k")


@QUICK
@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_decoding_do_anything_but_refuse(data: bytes) -> None:
    with pytest.raises((DocumentError, FormatTooNewError)):
        decode_policy(data, "k")


@pytest.mark.parametrize(
    "policy",
    [
        {"last": 3, "monthly": 2},
        {"last": 3, "hosts": {}},
        {"components": {"optimizer": {"yearly": 1}}},
        {"best": [{"n": 1, "metric": "m", "mode": "min", "group": "x"}]},
    ],
)
def test_a_rule_of_a_later_release_is_not_passed_over(policy: dict[str, Any]) -> None:
    """What it would keep, this release would delete."""
    body = {"number": 1, "at": 0.0, "author": "a", "origin": "code", "policy": policy}
    with pytest.raises(FormatTooNewError, match="unknown retention rule"):
        decode_policy(seal("policy", body), "k")


@pytest.mark.parametrize("policy", [{}, {"last": 0}, {"every": 2.5}, {"tiers": {"s3": 3}}])
def test_a_policy_that_no_release_writes_is_damage(policy: dict[str, Any]) -> None:
    body = {"number": 1, "at": 0.0, "author": "a", "origin": "code", "policy": policy}
    with pytest.raises(DocumentError):
        decode_policy(seal("policy", body), "k")


def test_a_tier_has_its_own_rules_or_those_for_all() -> None:
    policy = Policy(Keep(last=3), tiers={"s3": Keep(every=1000)})
    assert policy.for_tier("s3") == Keep(every=1000)
    assert policy.for_tier("main") == Keep(last=3)
    assert Policy(components={"optimizer": Keep(last=1)}).for_tier("main") is None
    assert Policy.of(Keep(last=3)) == Policy(Keep(last=3))
    assert Policy.of(policy) is policy


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep": 3},
        {"components": {"optimizer": 3}},
        {"components": {"": Keep(last=1)}},
        {"tiers": [Keep(last=1)]},
    ],
)
def test_a_wrong_policy_is_refused_when_it_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="retention"):
        Policy(**options)
