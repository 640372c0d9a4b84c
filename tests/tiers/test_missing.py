"""Saving while a colder tier is missing."""

from __future__ import annotations

import contextlib

import pytest

import ckptstore
from ckptstore.errors import StoreNotFoundError
from tests.crash._support import make_state
from tests.tiers._support import RUN, make_store


@pytest.mark.parametrize("required", ["async", "commit"])
def test_no_save_counts_without_the_tier_that_it_must_reach(tmp_path, required):
    """A disk that is not mounted must not turn "commit" into "async"."""
    make_store(tmp_path)
    toml = tmp_path / "ckptstore.toml"
    toml.write_text(toml.read_text().replace("manual", required))
    (tmp_path / "cold").rename(tmp_path / "away")
    (tmp_path / "cold").mkdir()
    with contextlib.closing(ckptstore.open(toml)) as store:
        if required == "commit":
            with pytest.raises(StoreNotFoundError, match="'cold' is missing"):
                store.run(RUN).save(2, make_state(2)).result()
        with store.run(RUN, offline=required == "commit") as run:
            run.save(2, make_state(2)).result()


def test_facts_are_written_where_a_tier_is_left(tmp_path, caplog):
    """Training goes on; the tier that missed one is named."""
    make_store(tmp_path)
    with contextlib.closing(ckptstore.open(tmp_path / "ckptstore.toml")) as store:
        run = store.run(RUN)
        checkpoint = run.latest
        (tmp_path / "cold").rename(tmp_path / "away")
        run.annotate(checkpoint, metrics={"late": 1.0})
        assert "tier cold does not know" in caplog.text
        assert run.latest.metrics["late"] == 1.0
