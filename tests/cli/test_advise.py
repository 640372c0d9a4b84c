from __future__ import annotations

import importlib.util
import sys

import pytest

import ckptstore
from ckptstore.cli import advise as module
from tests.cli.json_shapes import PAGE, check
from tests.inspect.trained import SYNCHRONOUS, Session, train

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


@pytest.fixture
def trained(tmp_path):
    """A store with run "gpt" (two restarts), "sync" (one session, saved for a minute each hour), "new"."""
    where = tmp_path / "trained"
    with ckptstore.init(where) as store:
        train(store, "gpt", [Session(), Session(start=4 * 3600, saves=5), Session(start=10 * 3600)])
        train(store, "sync", [Session(timings=SYNCHRONOUS)])
        train(store, "new", [Session(saves=0)])
    return where


def test_advice_is_told(cli, trained):
    answer = cli("-s", trained, "advise", "sync", "--mtbf", "11135", "--interval", "5min")
    assert answer.code == 0, answer
    assert answer.out == (
        "sync: save every 19.3 min, about 32 steps\n"
        "  pause         1 min (median of 3 saves)\n"
        "  saved every   1 h (median of 2 intervals)\n"
        "  fails every   3.09 h (as given)\n"
        "  restart       0 s\n"
        "  Young, Daly   19.3 min, 19.6 min\n"
        "\n"
        "   EVERY  PAUSES  REWORK  RESTARTS    LOST  USEFUL\n"
        "   5 min  20.0 %   1.3 %     0.0 %  21.3 %  78.7 %  asked\n"
        "  10 min  10.0 %   2.7 %     0.0 %  12.7 %  87.3 %\n"
        "19.3 min   5.2 %   5.2 %     0.0 %  10.4 %  89.6 %  best\n"
        "  30 min   3.3 %   8.1 %     0.0 %  11.4 %  88.6 %\n"
        "     1 h   1.7 %  16.2 %     0.0 %  17.8 %  82.2 %  current\n"
        "     2 h   0.8 %  32.3 %     0.0 %  33.2 %  66.8 %\n"
        "\n"
        "17.8 % of all time is lost now, 10.4 % at best\n"
        "note: 3 of the newest 3 saves were synchronous: their whole time counts as pause\n"
        "note: restarts count as 0 s: pass restart= (--restart), the time until training goes on\n"
    )


def test_failures_are_counted_from_the_sessions(cli, trained):
    out = cli("-s", trained, "advise", "gpt", "--restart", "10min").out
    assert "fails every   6.5 h (2 restarts in 13 h)" in out
    assert "written in    14 s more, in the background (median of 11 saves)" in out
    assert "planned ones too" in out


def test_failures_are_taken_from_a_larger_cluster(cli, trained):
    words = "--failures 419 --days 54 --machines 1024 --of-machines 16384 --pause 60 --background 0"
    out = cli("-s", trained, "advise", "gpt", *words.split()).out
    assert "gpt: save every 77.1 min" in out
    assert "pause         1 min (as given)" in out
    assert "fails every   49.5 h (419 failures in 54 d; for 1024 of 16384 machines)" in out
    assert "2.6 % at best" in out


def test_what_is_good_already_is_left(cli, trained):
    best = cli("-s", trained, "advise", "sync", "--mtbf", "30h", "--json").json["best"]
    assert best == pytest.approx(3600, rel=0.01)
    assert "leave it as it is" in cli("-s", trained, "advise", "sync", "--mtbf", "30h").out


def test_without_two_saves_in_a_row_the_best_alone_is_told(cli, trained, tmp_path):
    with ckptstore.open(trained) as store:
        train(store, "one", [Session(saves=1)])
    out = cli("-s", trained, "advise", "one", "--mtbf", "3h").out
    assert out.startswith("one: save every 5.48 min\n")
    assert "at the best interval 3.2 % of all time is lost" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("gtp", 13, "there is no run 'gtp'"),
        ("new --mtbf 3h", 13, "has no checkpoints yet"),
        ("sync", 2, "was never restarted"),
        ("gpt --mtbf soon", 2, "mtbf must be a length of time"),
        ("gpt --mtbf 3h --failures 2 --days 1", 2, "not both"),
        ("gpt --days 54", 2, "go together"),
        ("gpt --machines 4", 2, "go together"),
        ("gpt --newest 0", 2, "0 is not in the range"),
        ("gpt --interval 1s", 2, "cannot be saved every 1 s"),
        ("gpt --plot advice.docx", 2, "no picture"),
        ("", 2, "RUN"),
    ],
)
def test_exit_codes_of_advise(cli, trained, words, code, message):
    answer = cli("-s", trained, "advise", *words.split())
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err


@pytest.mark.parametrize("words", ["gpt", "sync --mtbf 3h --interval 2h", "gpt --failures 3 --days 2"])
def test_the_document_is_as_documented(cli, trained, words):
    check(cli("-s", trained, "advise", *words.split(), "--json").json, "Advice")


@needs_matplotlib
def test_a_picture_is_drawn(cli, trained, tmp_path):
    answer = cli("-s", trained, "advise", "gpt", "--plot", "advice.png")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "wrote advice.png")
    assert (tmp_path / "advice.png").read_bytes().startswith(b"\x89PNG")
    document = cli("-s", trained, "advise", "gpt", "--plot", "advice.svg", "--json").json
    check(document, "Advice")
    assert document["plot"] == "advice.svg"
    assert cli("-s", trained, "advise", "gpt", "--plot", "no/such/advice.png").code == 15


def test_without_matplotlib_it_says_what_to_install(cli, trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    answer = cli("-s", trained, "advise", "gpt", "--plot", "advice.png")
    assert answer.code == 1
    assert "hint: pip install 'ckptstore[plot]'" in answer.err


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.104, "10.4 %"), (0.01, "1.0 %"), (0.0079, "0.8 %"), (0.000479, "0.048 %"), (0, "0.0 %")],
)
def test_shares_are_shown(share, text):
    assert module._percent(share) == text


def test_the_page_shows_what_is_printed(cli, trained):
    page = (PAGE.parent / "how-often.md").read_text(encoding="utf-8")
    command, _, printed = page.partition("```console\n$ ckptstore ")[2].partition("```")[0].partition("\n")
    assert cli("-s", trained, *command.split()).out == printed
