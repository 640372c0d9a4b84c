import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckptstore.model.layout import assign_names
from ckptstore.model.unpack import walk
from tests.model.made import QUICK

# Keys that are made to meet: dots, brackets, backslashes, numbers as text, what a surrogate is spelled as.
awkward = st.one_of(
    st.text(st.sampled_from("a.[]\\1'"), max_size=3),
    st.sampled_from(
        ["", "1", "[1]", "a.b", "\ud800", "\\ud800", "None", "True", "('a', 1)", "b'a'", "é", "名"]
    ),
    st.integers(-1, 2),
    st.sampled_from([None, True, 1.5, b"a", ("a", 1), (1,), ""]),
)
paths = st.lists(awkward, min_size=1, max_size=3).map(tuple)


def distinct(found):
    """Paths that no dict could tell apart (True and 1) are one."""
    return list(dict.fromkeys(found))


@QUICK
@given(
    st.lists(st.lists(awkward.filter(lambda key: key != ""), min_size=1, max_size=3).map(tuple), max_size=6)
)
def test_names_of_different_paths_without_empty_keys_are_different(found):
    found = distinct(found)
    names = assign_names(found)
    assert len(set(names)) == len(found)


@QUICK
@given(st.lists(paths, max_size=6))
def test_names_are_text_that_can_be_written_as_utf8(found):
    for name in assign_names(distinct(found)):
        name.encode("utf-8")


@QUICK
@given(
    st.lists(
        st.lists(st.text("abc01_", min_size=1, max_size=3), min_size=1, max_size=3).map(tuple), max_size=6
    )
)
def test_plain_keys_are_simply_joined_by_dots(found):
    found = distinct(found)
    assert assign_names(found) == [".".join(path) for path in found]


trees = st.recursive(
    st.builds(lambda n: torch.full((1,), n), st.integers(0, 9)),
    lambda inner: st.one_of(
        st.dictionaries(
            st.one_of(st.text("ab.1", max_size=3), st.integers(0, 2)), inner, min_size=1, max_size=3
        ),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


@QUICK
@given(st.dictionaries(st.text("ab.1", max_size=3), trees, min_size=1, max_size=3))
def test_names_are_those_of_torch_dcp_wherever_dcp_can_name_at_all(state):
    found = [path for path, value in walk(state) if isinstance(value, torch.Tensor)]
    try:
        flat, mappings = flatten_state_dict(state)
    except ValueError:
        return  # DCP refuses what two paths would be called alike
    # Its paths have every key of a dict as a str.
    texts = [tuple(key if isinstance(key, str) else str(key) for key in path) for path in found]
    theirs = {
        name: tuple(map(str, path)) for name, path in mappings.items() if isinstance(flat[name], torch.Tensor)
    }
    assert theirs == dict(zip(assign_names(found), texts, strict=True))


def test_where_names_would_meet_both_are_written_out():
    assert assign_names([("a", "b"), ("a.b",), ("a", "c")]) == ["a.b", "a\\.b", "a.c"]
    assert assign_names([("k", 25), ("k", "25")]) == ["k[25]", "k.25"]


def test_the_smallest_state_whose_names_still_meet():
    found = [("", 1), ("", "1"), (1,), ("1",)]
    names = assign_names(found)
    assert len(set(names)) == 4


def test_two_nan_keys_have_two_names():
    names = assign_names([("a", float("nan")), ("a", float("nan"))])
    assert len(set(names)) == 2
