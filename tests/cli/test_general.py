"""What holds for every command: options, help, streams, imports, speed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import click
import pytest

import ckptstore
from ckptstore.cli.app import COMMANDS, app
from tests.cli.conftest import clean_environment


def test_version(process):
    answer = process("--version")
    assert (answer.code, answer.out, answer.err) == (0, f"ckptstore {ckptstore.__version__}\n", "")


def test_the_installed_script_is_the_same_command():
    import importlib.metadata

    (script,) = (
        point
        for point in importlib.metadata.entry_points(group="console_scripts")
        if point.name == "ckptstore"
    )
    assert script.value == "ckptstore.cli:main"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(cli, name):
    answer = cli(name, "--help")
    assert answer.code == 0
    assert re.search(rf"Examples:\n +ckptstore .*{name}", answer.out)
    assert "--json" in answer.out
    command = app.get_command(None, name)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help or parameter.hidden, parameter


def test_the_root_help_lists_every_command_with_a_line(cli):
    answer = cli("-h")
    assert answer.code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z]", answer.out, re.MULTILINE), name
    assert "Examples:\n    ckptstore init ckpts" in answer.out


@pytest.mark.parametrize("where", ["before", "after", "around"])
def test_general_options_may_stand_before_and_after_the_command(cli, place, where):
    options = ["-s", place, "--json"]
    args = {
        "before": [*options, "ls"],
        "after": ["ls", *options],
        "around": ["--json", "ls", "-s", place],
    }[where]
    assert [row["run"] for row in cli(*args).json["runs"]] == ["gpt", "other"]


def test_the_later_store_counts(cli, place, tmp_path):
    assert cli("-s", tmp_path / "nothing", "ls", "-s", place).code == 0


def test_logs_go_to_stderr_as_much_as_wanted(cli, place):
    noisy = cli("-s", place, "-v", "tag", "gpt@10", "a")
    damaged = place / "manifest.db"
    damaged.write_bytes(b"not a database at all, whatever it says")
    warned = cli("-s", place, "ls", "--json")
    assert "warning: " in warned.err
    assert json.loads(warned.out)
    damaged.write_bytes(b"not a database at all, whatever it says")
    assert cli("-q", "ls", "-s", place).err == ""
    assert noisy.code == 0


def test_results_hold_no_escape_codes_where_no_terminal_is(cli, place):
    for args in (["ls"], ["ls", "gpt"], ["show", "gpt@latest"], ["doctor"]):
        assert "\x1b" not in cli("-s", place, *args).out


def on_a_terminal(place, *args, **environment):
    """What the command writes to a terminal of 80 columns."""
    import os
    import pty

    parent, child = pty.openpty()
    env = {**clean_environment(), "COLUMNS": "80", "TERM": "xterm", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptstore", "-s", str(place), *args], stdout=child, stderr=child, env=env
    )
    os.close(child)
    written = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:
            break
        if not piece:
            break
        written += piece
    os.close(parent)
    process.wait()
    return written.decode()


def test_a_terminal_gets_colors_and_no_line_wider_than_it(place, store):
    store.run("gpt").invalidate(30, "a reason that is so long that it cannot fit into any line " * 3)
    text = on_a_terminal(place, "ls", "gpt", NO_COLOR="")
    assert "\x1b[33minvalid" in text
    lines = re.sub(r"\x1b\[[0-9]*m", "", text).splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "…" in text
    plain = on_a_terminal(place, "ls", "gpt", NO_COLOR="1")
    assert "\x1b" not in plain
    assert max(map(len, on_a_terminal(place, "ls", "gpt", "--long").splitlines())) > 80


def test_output_survives_an_encoding_that_lacks_the_characters(process, tmp_path):
    with ckptstore.init(tmp_path / "s", chunk_bytes=4096) as store:
        store.run("名前 é").save(1, {"x": 1}).result()
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    assert process("-s", tmp_path / "s", "ls", env=ascii_only).code == 0
    answer = process("-s", tmp_path / "s", "ls", "--json", env=ascii_only)
    assert answer.json["runs"][0]["run"] == "名前 é"


_ALL_COMMANDS = """
import sys, time
from click.testing import CliRunner
before = time.perf_counter()
from ckptstore.cli.app import app
place = sys.argv[1]
def call(*args):
    result = CliRunner().invoke(app, ["-s", place, *args])
    assert result.exit_code == 0, (args, result.output)
call("--help"); call("--version"); call("ls"); call("ls", "gpt")
call("show", "gpt@latest", "--tensors", "--values")
call("verify"); call("rebuild"); call("tag", "gpt@10", "x"); call("untag", "gpt@10", "x")
call("pin", "gpt@10"); call("unpin", "gpt@10")
call("invalidate", "gpt@10", "--reason", "x"); call("invalidate", "gpt@10", "--undo")
call("doctor"); call("init", place + "2"); call("demo", "--help")
started = time.perf_counter()
call("ls", "gpt")
print(time.perf_counter() - started)
assert "torch" not in sys.modules
assert "boto3" not in sys.modules
"""


def test_no_command_but_the_training_of_demo_imports_torch(place):
    done = subprocess.run(
        [sys.executable, "-c", _ALL_COMMANDS, str(place)],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0  # generous: a busy machine; some 20 ms otherwise


def test_two_processes_that_look_while_one_saves(place, store, process):
    import threading

    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(process("-s", place, "ls", "gpt", "--json")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    run = store.run("gpt")
    for step in range(100, 110):
        run.save(step, {"x": step}).result()
    for thread in threads:
        thread.join()
    assert [answer.code for answer in answers] == [0, 0, 0], answers
