"""docs/manifest.md: every query in it runs and answers, and its reference is what the schema says."""

import re
import sys
from pathlib import Path

import pytest

from ckptstore.manifest import Manifest, descriptions
from ckptstore.manifest.schema import OWN_TABLES, TABLES
from ckptstore.manifest.views import VIEWS
from tests.manifest.made import (
    NOON,
    STORE,
    TIER,
    hexes,
    make_epoch,
    make_layout,
    make_note,
    make_record,
    make_tensors,
    note_key,
)

PAGE = Path(__file__).parents[2] / "docs" / "manifest.md"
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
MARK = "<!-- made by tests/manifest/test_docs.py: python -m tests.manifest.test_docs -->\n"


@pytest.fixture(scope="module")
def manifest():
    with Manifest.open(None, store_uuid=STORE) as opened:
        opened.put_tier(TIER, 0, "local", "file:///ckpts")
        opened.put_run("demo", "demo-1", NOON)
        opened.put_epoch("demo-1", make_epoch(1))
        for step in (100, 200, 300, 400):
            rows = make_tensors(salt=str(step // 200))
            opened.put_record(TIER, "demo-1", make_record(step, run="demo"), make_layout(), rows, 1)
        bad = make_note(make_record(400), 1, "invalid", reason="NaN")
        opened.put_note(TIER, "demo-1", note_key(bad), bad)
        yield opened


def test_the_page_has_queries():
    assert len(QUERIES) >= 12
    assert hexes(1, "x") == hexes(1, "x")


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_runs_and_answers(manifest, query):
    rows = manifest.read(lambda c: c.execute(query).fetchall())
    assert rows or "HAVING" in query


def test_the_query_for_changes_is_right(manifest):
    query = next(q for q in QUERIES if "lag(digest)" in q)
    rows = manifest.read(lambda c: c.execute(query).fetchall())
    assert [(step, changed) for step, changed, _ in rows] == [(100, 1), (200, 1), (300, 0), (400, 1)]


def reference():
    """The reference section, from the schema and its descriptions."""
    with Manifest.open(None, store_uuid=STORE) as manifest:
        parts = ["## Reference\n"]
        for name in [*VIEWS, *TABLES, *OWN_TABLES]:
            columns = manifest.read(lambda c, n=name: c.execute(f"PRAGMA table_info({n})").fetchall())
            parts += [
                f"\n### `{name}`\n\n{descriptions.TABLES[name]}\n\n| column | meaning |\n| --- | --- |\n"
            ]
            parts += [f"| `{column[1]}` | {descriptions.describe(name, column[1])} |\n" for column in columns]
        return "".join(parts)


def test_the_reference_is_what_the_schema_says():
    assert PAGE.read_text().partition(MARK)[2] == reference()


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + reference())
    sys.exit(0)
