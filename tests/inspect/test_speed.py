"""A small benchmarks/manifest.py: counted in SQLite's steps, so that no slow machine fails it."""

import pytest

import ckptstore
from benchmarks.manifest import fill_store, name_of
from ckptstore.manifest import query as guarded
from ckptstore.manifest.questions import QUESTIONS

CHECKPOINTS, TENSORS = 300, 200


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    with ckptstore.init(tmp_path_factory.mktemp("speed") / "store") as store:
        fill_store(store, CHECKPOINTS, TENSORS, 2)
        yield store


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.name)
def test_no_question_goes_through_all_tensors_of_all_checkpoints(filled, question, monkeypatch):
    looks = 0

    def look(_self):
        nonlocal looks
        looks += 1
        return 0

    monkeypatch.setattr(guarded, "_STEPS_BETWEEN_LOOKS", 1000)
    monkeypatch.setattr(guarded._Run, "_look", look)
    values = {"run": name_of(0), "tensor": "model.layers.7.weight", "metric": "loss"}
    params = {name: values[name] for name in question.parameters}
    rows = list(guarded.run_query(filled.catalog.manifest, question.sql, params))
    assert rows or question.name in ("unrestorable", "grown_tensors", "missing_components")
    # One visit of each of the 60,000 tensor rows alone would take more.
    assert looks < 150
