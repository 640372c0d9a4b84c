"""run.advise: from the documents of a store to advice; and its picture."""

import dataclasses

import pytest

from ckptstore.errors import BackendError, CkptstoreError, NotFoundError, UsageError
from ckptstore.inspect.advice_plot import plot_advice
from ckptstore.model.advice import Failures, Measured, advise
from tests.inspect.made import AWKWARD, store
from tests.inspect.trained import SYNCHRONOUS, Session, train

__all__ = ["store"]

DAY = 86400.0
MTBF = 54 * DAY / 419


def best_loss(advice):
    return round(100 * advice.loss_at(advice.best).total, 1)


def test_times_and_failures_come_from_the_history(store):
    train(store, "gpt", [Session(saves=3), Session(start=4 * 3600, saves=5), Session(start=10 * 3600)])
    advice = store.run("gpt").advise()
    assert advice.run == "gpt"
    assert (advice.pause, advice.background, advice.current) == (5.0, 14.0, 3600.0)
    assert advice.measured == Measured(11, 0, 5.0, 14.0, 3600.0, 8, 36.0)
    assert advice.failures == Failures(13 * 3600 / 2, "sessions", 2, 13 * 3600.0)
    assert advice.best == advice.young
    assert advice.best_steps == round(advice.best / 36)


def test_a_save_in_the_background_is_told_from_one_that_was_waited_for(store):
    run = store.run("gpt")
    run.save(1, {"lr": 0.1}).result()
    run.save(2, {"lr": 0.1}, wait=True)
    run.close()
    advice = store.run("gpt").advise(mtbf="3h")
    assert (advice.measured.saves, advice.measured.synchronous) == (2, 1)
    assert advice.measured.background > 0
    assert store.run("gpt").advise(mtbf="3h", newest=1).measured.background == 0


def test_the_published_figures(store):
    train(store, "sync", [Session(timings=SYNCHRONOUS)])
    run = store.run("sync")
    advice = run.advise(failures=419, days=54, intervals=["5min"])
    assert (round(advice.failures.mtbf), advice.pause, round(advice.best)) == (11135, 60.0, 1156)
    assert best_loss(advice) == 10.4
    assert advice.current == 3600
    assert round(100 * advice.loss_at(3600).total, 1) == 17.8
    assert {choice.loss.interval: round(100 * choice.loss.total, 1) for choice in advice.choices}[300] == 21.3
    fast = run.advise(mtbf=MTBF, pause="5 s", restart="10 min")
    assert round(fast.best) == 334
    loss = fast.loss_at(fast.best)
    assert round(100 * (loss.pauses + loss.rework), 1) == 3.0
    assert (round(100 * loss.restarts, 1), round(100 * loss.useful, 1)) == (5.4, 91.6)
    small = run.advise(failures=419, days=54, machines=1024, of_machines=16384)
    assert round(small.failures.mtbf / 3600, 1) == 49.5
    assert (round(small.best / 60), best_loss(small)) == (77, 2.6)


def test_mtbf_and_restart_are_times_as_people_write_them(store):
    train(store, "gpt", [Session()])
    run = store.run("gpt")
    assert run.advise(mtbf="11135").best == run.advise(mtbf=11135).best
    assert run.advise(mtbf="2.5d", restart="10min").restart == 600
    assert run.advise(mtbf="3h", newest=1).measured.saves == 1


def test_imports_do_not_count(store):
    train(store, "gpt", [Session(saves=1, origin="import", timings={"write": 900.0}), Session(start=60)])
    assert store.run("gpt").advise(mtbf="3h").measured.saves == 3
    train(store, "base", [Session(origin="import")])
    with pytest.raises(NotFoundError, match="'base' has 3 checkpoints, none saved by a training"):
        store.run("base").advise(mtbf="3h")


def test_a_run_that_tells_nothing(store):
    with pytest.raises(NotFoundError, match="there is no run 'gtp'"):
        store.run("gtp").advise()
    train(store, "new", [Session(saves=0)])
    with pytest.raises(NotFoundError, match="'new' has no checkpoints yet"):
        store.run("new").advise()
    train(store, "old", [Session(timings={})])
    with pytest.raises(NotFoundError, match="no saves that tell how long"):
        store.run("old").advise()
    train(store, "gpt", [Session()])
    with pytest.raises(UsageError, match="'gpt' was never restarted") as error:
        store.run("gpt").advise()
    assert "--mtbf 3h" in error.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mtbf": "soon"}, "mtbf must be a length of time"),
        ({"mtbf": 0}, "mtbf must be a positive"),
        ({"mtbf": "3h", "restart": "-5"}, "restart must be"),
        ({"mtbf": "3h", "pause": "x"}, "pause must be"),
        ({"mtbf": "3h", "background": "x"}, "background must be"),
        ({"mtbf": "3h", "intervals": ["x"]}, "an interval must be"),
        ({"mtbf": "3h", "newest": 0}, "newest must be"),
        ({"mtbf": "3h", "failures": 3, "days": 1}, "not both"),
        ({"failures": 3}, "go together"),
        ({"days": 3}, "go together"),
        ({"failures": 3, "days": 0}, "days must be"),
        ({"failures": 3, "days": float("nan")}, "days must be"),
        ({"failures": 0, "days": 3}, "0 failures in 3 d tell no mean time"),
        ({"mtbf": "3h", "machines": 3}, "go together"),
        ({"mtbf": "3h", "of_machines": 3}, "go together"),
        ({"mtbf": "3h", "machines": 0, "of_machines": 3}, "impossible"),
    ],
)
def test_nonsense_is_refused(store, options, message):
    train(store, "gpt", [Session()])
    with pytest.raises(UsageError, match=message):
        store.run("gpt").advise(**options)


# --- the picture ---------------------------------------------------------------------------------

MEASURED = Measured(20, 0, 5.0, 20.0, 3600.0, 19, 2.0)
ADVICE = advise("gpt", MEASURED, Failures(MTBF, "given"), restart=600.0)


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_advice_is_drawn(tmp_path, form):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"advice.{form}"
    plot_advice(ADVICE, target)
    assert target.stat().st_size > 5000


def test_the_picture_marks_current_and_best(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []

    def figure(*args, **options):
        drawn.append(Figure(*args, **options))
        return drawn[0]

    from ckptstore.inspect import advice_plot

    advice_plot._draw(figure, ADVICE)
    axis = drawn[0].axes[0]
    words = [text.get_text() for text in axis.texts]
    assert any(text.startswith("best: 5.56 min\n") for text in words)
    assert any(text.startswith("current: 1 h\n") for text in words)
    total = next(line for line in axis.lines if line.get_label() == "lost in all")
    lowest = min(zip(total.get_ydata(), total.get_xdata(), strict=True))
    assert lowest[0] == pytest.approx(100 * ADVICE.loss_at(ADVICE.best).total, rel=1e-3)
    assert lowest[1] == pytest.approx(ADVICE.best, rel=0.1)


@pytest.mark.parametrize(
    "advice",
    [
        advise(AWKWARD[7], MEASURED, Failures(MTBF, "given"), intervals=[30.0, 9e5]),
        advise(AWKWARD[3], dataclasses.replace(MEASURED, background=4000.0), Failures(MTBF, "given")),
        advise("gpt", dataclasses.replace(MEASURED, interval=None), Failures(1e9, "given")),
        advise("gpt", dataclasses.replace(MEASURED, pause=1e-4, background=0.0), Failures(10.0, "given")),
        advise("gpt", dataclasses.replace(MEASURED, pause=1e4), Failures(10.0, "given")),
    ],
)
def test_odd_advice_is_drawn(advice, tmp_path):
    pytest.importorskip("matplotlib")
    plot_advice(advice, tmp_path / "x.png")


def test_what_cannot_be_drawn_is_told(tmp_path, no_matplotlib):
    with pytest.raises(UsageError, match="no picture"):
        plot_advice(ADVICE, tmp_path / "x.txt")
    with pytest.raises(BackendError, match="cannot be written"):
        plot_advice(ADVICE, tmp_path / "no" / "x.png")
    no_matplotlib()
    with pytest.raises(CkptstoreError) as error:
        plot_advice(ADVICE, tmp_path / "x.png")
    assert "ckptstore[plot]" in error.value.hint
