from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import clean_environment

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


@needs_matplotlib
def test_a_picture_is_drawn(cli, place, tmp_path):
    answer = cli("-s", place, "plot", "gpt")
    assert (answer.code, answer.out) == (0, "wrote gpt.png: acc, loss\n")
    assert (tmp_path / "gpt.png").read_bytes().startswith(b"\x89PNG")
    document = cli("-s", place, "plot", "gpt", "-o", "x.svg", "--metric", "loss", "--json").json
    assert (document["path"], document["metrics"]) == ("x.svg", ["loss"])
    assert b"<svg" in (tmp_path / "x.svg").read_bytes()


@needs_matplotlib
def test_exit_codes_of_plot(cli, place):
    assert cli("-s", place, "plot", "gtp").code == 13
    assert cli("-s", place, "plot", "gpt", "--metric", "nope").code == 13
    assert cli("-s", place, "plot", "gpt", "-o", "x.txt").code == 2
    assert cli("-s", place, "plot").code == 2
    assert cli("-s", place, "plot", "gpt", "-o", "no/such/folder.png").code == 15


def test_without_matplotlib_it_says_what_to_install(cli, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    answer = cli("-s", place, "plot", "gpt")
    assert answer.code == 1
    assert "hint: pip install 'ckptstore[plot]'" in answer.err


def test_pages_are_written(cli, place, tmp_path):
    document = cli("-s", place, "ui", "--export", "pages", "--json").json
    with sqlite3.connect(document["database"]) as database:
        assert database.execute("select count(*) from v_checkpoints").fetchone() == (4,)
    database.close()
    described = json.loads((tmp_path / "pages" / "metadata.json").read_text(encoding="utf-8"))
    assert described["databases"]["manifest"]["queries"]
    assert document["command"][1:3] == ["-m", "datasette"]
    assert cli("-s", place, "ui", "--export", "pages").code == 14
    (tmp_path / "file").write_text("")
    assert cli("-s", place, "ui", "--export", "file").code == 15


def test_a_server_prints_no_json(cli, place):
    assert cli("-s", place, "ui", "--json").code == 2
    assert cli("-s", place, "ui", "--port", "70000").code == 2


def test_without_datasette_it_says_what_to_install(cli, place, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = cli("-s", place, "ui", "--no-open")
    assert answer.code == 1
    assert "hint: pip install 'ckptstore[ui]'" in answer.err


FAKE = """
import os, sys, time
print(os.getpid(), *sys.argv[1:], flush=True)
time.sleep(60)
"""


@pytest.fixture
def serving(place, tmp_path):
    """`ui` with something in datasette's place; its first line."""
    packages = tmp_path / "packages"
    (packages / "datasette").mkdir(parents=True)
    (packages / "datasette" / "__init__.py").write_text("")
    (packages / "datasette" / "__main__.py").write_text(FAKE)
    (packages / "datasette-0.65.dist-info").mkdir()
    (packages / "datasette-0.65.dist-info" / "METADATA").write_text("Name: datasette\nVersion: 0.65\n")
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptstore", "-s", str(place), "ui", "--port", "9123", "--no-open"],
        env={**clean_environment(), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process, process.stdout.readline().split()
    process.kill()
    process.communicate()


def test_serving_ends_with_its_server_and_leaves_no_folder(serving):
    process, (pid, *words) = serving
    assert words[words.index("--port") + 1] == "9123"
    assert "--open" not in words
    database = words[words.index("--immutable") + 1]
    assert os.path.exists(database)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not os.path.exists(os.path.dirname(database))
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
