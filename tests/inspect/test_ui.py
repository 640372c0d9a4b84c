"""The pages: a snapshot, metadata that names every column, and the questions."""

import importlib.util
import json
import re
import sqlite3
import urllib.parse

import pytest

from ckptstore.errors import CkptstoreError, UsageError
from ckptstore.inspect import ui
from ckptstore.manifest.questions import QUESTIONS
from tests.inspect import example
from tests.inspect.made import AWKWARD, store

__all__ = ["store"]


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory):
    with example.make(tmp_path_factory.mktemp("ui") / "store") as made:
        yield made


def test_every_question_and_column_is_in_the_metadata_and_runs_over_the_snapshot(lived_in):
    with ui.pages(lived_in) as made:
        document = json.loads(made.metadata.read_text())["databases"][made.database.stem]
        copy = sqlite3.connect(f"file:{made.database}?mode=ro&immutable=1", uri=True)
        tables = copy.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')").fetchall()
        assert {name for (name,) in tables} == set(document["tables"])
        for name, described in document["tables"].items():
            columns = {row[1] for row in copy.execute(f"PRAGMA table_info({name})")}
            assert columns == set(described["columns"])
        assert set(document["queries"]) == {question.name for question in QUESTIONS}
        for question in QUESTIONS:
            canned = document["queries"][question.name]
            link = re.search(r'href="([^"]+)"', canned["description_html"])
            asked = urllib.parse.parse_qsl(link[1].partition("?")[2].replace("&amp;", "&")) if link else []
            params = dict(asked)
            assert set(params) == set(question.parameters)
            rows = copy.execute(canned["sql"], params).fetchall()
            assert rows or question.name == "grown_tensors", question.name
        copy.close()
        command = made.command(port=0)
        assert "--immutable" in command
        assert "--open" not in command
        assert "--open" in made.command(browser=True)
        folder = made.folder
    assert not folder.exists()


def test_names_of_every_kind_make_a_link(store):
    for name in AWKWARD:
        store.run(name).save(1, {name: [1.0]}, metrics={name: 1.0}).result()
    text = json.dumps(ui.metadata(store))
    assert "<script" not in text
    for name in AWKWARD:
        about = ui._canned(QUESTIONS[1], {"run": name, "tensor": '"><b>'})["description_html"]
        assert "<b>" not in about
        link = re.search(r'href="([^"]+)"', about)[1].replace("&amp;", "&").partition("?")[2]
        assert dict(urllib.parse.parse_qsl(link)) == {"run": name, "tensor": '"><b>'}


def test_an_empty_store_has_pages(store):
    with ui.pages(store) as made:
        assert made.database.exists()
    assert "For example" not in json.dumps(ui.metadata(store))


def test_the_extra_is_named_when_datasette_is_absent(store, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CkptstoreError) as error:
        ui.serve(store)
    assert "ckptstore[ui]" in error.value.hint
    with pytest.raises(UsageError):
        ui.serve(store, port=70_000)
