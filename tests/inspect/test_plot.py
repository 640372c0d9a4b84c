"""plot: errors without matplotlib; with it, a picture of what is asked for."""

import math

import pytest

from ckptstore.errors import CkptstoreError, NotFoundError, UsageError
from ckptstore.inspect.plot import plot
from tests.inspect import example
from tests.inspect.made import AWKWARD, store

__all__ = ["store"]


def test_the_extra_is_named_when_matplotlib_is_absent(store, tmp_path, no_matplotlib):
    store.run("r").save(1, {"lr": 1}).result()
    no_matplotlib()
    with pytest.raises(CkptstoreError) as error:
        plot(store.run("r"), tmp_path / "x.png")
    assert "ckptstore[plot]" in error.value.hint
    assert not (tmp_path / "x.png").exists()


def test_what_cannot_be_drawn_is_told_before_anything_is_written(store, tmp_path):
    run = store.run("r")
    with pytest.raises(NotFoundError, match="there is no run 'r'"):
        plot(run, tmp_path / "x.png")
    run.save(1, {"lr": 1}, metrics={"loss": 1}).result()
    with pytest.raises(UsageError, match="picture"):
        plot(run, tmp_path / "x.docx")
    with pytest.raises(NotFoundError, match="'acc'") as error:
        plot(run, tmp_path / "x.png", metrics=["acc"])
    assert "loss" in error.value.hint
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_a_run_is_drawn(tmp_path, form):
    pytest.importorskip("matplotlib")
    with example.make(tmp_path / "store") as made:
        target = tmp_path / f"run.{form}"
        assert plot(made.run(example.RUN), target) == ("loss", "val_loss")
        assert plot(made.run(example.RUN), target, metrics=["val_loss"]) == ("val_loss",)
        assert target.stat().st_size > 5000


def test_odd_runs_are_drawn(store, tmp_path):
    pytest.importorskip("matplotlib")
    run = store.run(AWKWARD[7])
    run.save(1, {"lr": 1}).result()
    plot(run, tmp_path / "one.png")
    run.save(1, {"lr": 1}, metrics={"$a^": math.nan, "b": math.inf}).result()
    run.save(-5, {"lr": 1}, metrics={"$a^": 1, AWKWARD[4]: 2}).result()
    plot(run, tmp_path / "odd.png")
