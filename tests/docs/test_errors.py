"""docs/errors.md has every error class as it is, and every exit code."""

import inspect
import re

import pytest

from ckptstore import errors
from tests.docs.pages import DOCS

PAGE = (DOCS / "errors.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| ((?:· )*)`(\w+)`(?: \(`(\w+)`\))? \| `([\w-]+)` \| (\d+) \| (.+?) \| (.*?) \|$", PAGE, re.MULTILINE
)
CODES = [int(code) for code in re.findall(r"^\| (\d+) \| ", PAGE, re.MULTILINE)]
CLASSES = {
    name: found
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, errors.CkptstoreError)
}


def test_every_class_is_on_the_page_once():
    assert sorted(row[1] for row in ROWS) == sorted(CLASSES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_a_row_is_true(row):
    _, name, builtin, kind, code, when, what = row
    found = CLASSES[name]
    assert (found.kind, found.exit_code) == (kind, int(code))
    assert when.strip()
    assert what.strip() or name == "CkptstoreError"
    if builtin:
        assert builtin in {base.__name__ for base in found.__bases__}
    else:
        assert all(
            issubclass(base, errors.CkptstoreError) for base in found.__bases__
        ) or found.__bases__ == (Exception,)


def test_the_indentation_is_the_tree():
    parents = []
    for dots, name, *_ in ROWS:
        depth = dots.count("·")
        del parents[depth:]
        if parents:
            assert CLASSES[parents[-1]] in CLASSES[name].__bases__, name
        parents.append(name)


def test_kinds_are_unique_and_every_exit_code_is_in_the_table():
    assert len({found.kind for found in CLASSES.values()}) == len(CLASSES)
    assert {found.exit_code for found in CLASSES.values()} <= set(CODES)
    assert sorted(set(CODES)) == CODES
