"""Every exit code that a command of this release can end with, and what it says then."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ckptstore
from ckptstore import catalog
from ckptstore.errors import BackendError, BusyError, OutOfSpaceError
from ckptstore.manifest import Manifest
from ckptstore_local import LocalBackend
from tests.cli.conftest import Answer, clean_environment


def error_of(answer):
    error = answer.json["error"]
    assert set(error) == {"kind", "message", "hint", "exit_code"}
    assert error["exit_code"] == answer.code
    return error


def check(cli, code, kind, *args):
    """The code, the text on stderr, nothing on stdout; and with --json the object too."""
    plain = cli(*args)
    assert plain.code == code, plain
    assert plain.out == ""
    first = plain.err.splitlines()[-2 if "hint: " in plain.err else -1]
    assert first.startswith("error: ")
    document = cli(*args, "--json")
    assert document.code == code
    assert error_of(document)["kind"] == kind
    assert error_of(document)["message"] in plain.err.replace("\n  ", "\n")
    assert "Traceback" not in plain.err + document.err
    return plain


@pytest.mark.parametrize(
    "args",
    [
        ["nope"],
        ["ls", "--nope"],
        ["show"],
        ["tag", "x"],
        ["ls", "-n", "0"],
        ["ls", "-n", "x"],
        ["ls", "--all", "x"],
    ],
    ids=" ".join,
)
def test_2_usage(cli, place, args):
    answer = check(cli, 2, "usage", "-s", place, *args)
    assert "hint: " in answer.err


def test_a_mistyped_command_names_similar_ones(cli):
    assert "similar: verify" in cli("verfy").err


def test_no_command_shows_help_and_is_a_usage_error(cli):
    answer = cli()
    assert answer.code == 2
    assert "init" in answer.out + answer.err


def test_10_no_store_named(cli):
    answer = check(cli, 10, "no-store", "ls")
    assert "ckptstore init" in answer.err


def test_10_no_store_there(cli, tmp_path):
    check(cli, 10, "no-store", "-s", tmp_path / "nothing", "ls")
    (tmp_path / "mount point").mkdir()
    check(cli, 10, "no-store", "-s", tmp_path / "mount point", "ls")
    check(cli, 10, "no-store", "-s", tmp_path / "no.toml", "ls")
    assert list((tmp_path / "mount point").iterdir()) == []


def test_11_busy(cli, place, monkeypatch):
    def busy(self, ref):
        raise BusyError("held by another process", hint="wait")

    monkeypatch.setattr(ckptstore.Store, "checkpoint", busy)
    check(cli, 11, "busy", "-s", place, "show", "gpt@10")


def test_a_locked_manifest_does_not_stop_ls(cli, place, monkeypatch):
    monkeypatch.setattr(catalog, "_BUSY_SECONDS", 0.1)
    monkeypatch.setitem(Manifest.open.__func__.__kwdefaults__, "busy_seconds", 0.1)
    locker = sqlite3.connect(place / "manifest.db", isolation_level=None)
    try:
        locker.execute("BEGIN EXCLUSIVE")
        answer = cli("-s", place, "ls", "gpt", "--json")
    finally:
        locker.close()
    assert answer.code == 0
    assert [row["step"] for row in answer.json["checkpoints"]] == [10, 20, 30]


def test_13_no_such_ref(cli, place):
    check(cli, 13, "no-such-ref", "-s", place, "show", "gpt@15")


def test_14_conflict(cli, place):
    check(cli, 14, "conflict", "-s", place, "tag", "gpt@10", "paper")


def test_15_backend_unavailable(cli, place, monkeypatch):
    def failing(self, prefix):
        raise BackendError("the server does not answer", hint="see whether it runs")

    monkeypatch.setattr(LocalBackend, "list", failing)
    check(cli, 15, "backend", "-s", place, "ls")


def test_16_out_of_space(cli, place, monkeypatch):
    def full(*args, **kwargs):
        raise OutOfSpaceError("no space left on /disk", hint="free some")

    monkeypatch.setattr("ckptstore.tier.notes.add_note", full)
    check(cli, 16, "out-of-space", "-s", place, "tag", "gpt@10", "x")


def test_17_another_store_than_configured(cli, place, tmp_path):
    (tmp_path / "ckptstore.toml").write_text(
        'store_uuid = "00000000-0000-4000-8000-000000000000"\n[[tiers]]\nurl = "ckpts"\n'
    )
    check(cli, 17, "wrong-store", "ls")


def test_20_format_too_new(cli, place):
    marker = place / "ckptstore.json"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 2'))
    answer = check(cli, 20, "format-too-new", "-s", place, "ls")
    assert "upgrade" in answer.err


def test_4_a_marker_that_cannot_be_read(cli, place):
    (place / "ckptstore.json").write_text("{")
    check(cli, 4, "document-damaged", "-s", place, "ls")


def test_2_an_unknown_scheme_lists_what_is_installed(cli):
    answer = check(cli, 2, "unknown-scheme", "-s", "s4://bucket/x", "ls")
    assert "file" in answer.err


def test_1_a_mistake_in_the_program_has_no_traceback_unless_asked_for(cli, place, monkeypatch):
    def broken(self):
        raise KeyError("oops")

    monkeypatch.setattr(ckptstore.Store, "runs", broken)
    answer = check(cli, 1, "internal", "-s", place, "ls")
    assert "-vv" in answer.err
    assert "Traceback" in cli("-s", place, "ls", "-vv").err
    assert "Traceback" in cli("-s", place, "ls", env={"CKPTSTORE_DEBUG": "1"}).err


def test_130_interrupted(cli, place, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(ckptstore.Store, "runs", interrupted)
    answer = cli("-s", place, "ls")
    assert answer.code == 130
    assert "Traceback" not in answer.err


def test_141_a_reader_that_goes_away_ends_it_quietly(place, tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m ckptstore -s {place} ls --all; echo $? >&2",
        shell=True,
        stdout=_closed_pipe(),
        stderr=subprocess.PIPE,
        env=clean_environment(),
        text=True,
        check=False,
    )
    assert done.stderr == "141\n"


def _closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


# --- a user who may only read ---------------------------------------------------------------------------

# Everything is imported before the rights are given up: the interpreter may be out of reach afterwards.
_AS_READER = """
import json, os, sys
from click.testing import CliRunner
from ckptstore.cli.app import app
own, others, *commands = sys.argv[1:]
def call(place, command):
    result = CliRunner().invoke(app, ["-s", place, *json.loads(command)])
    return result.exit_code, result.stdout, result.stderr
for command in commands:
    call(own, command)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print(json.dumps([call(others, command) for command in commands]))
"""


@pytest.fixture
def reader(monkeypatch):
    """Calls the command as somebody who may read a store, but not write it."""
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-reader-"))
    folder.chmod(0o755)
    for place in (folder / "own", folder / "others"):
        with ckptstore.init(place, chunk_bytes=4096) as store:
            store.run("gpt").save(10, {"x": list(range(10))}, metrics={"loss": 1.5}).result()
    paths = [folder / "others", *(folder / "others").rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def call(*commands):
        done = subprocess.run(
            [
                *(sys.executable, "-c", _AS_READER, str(folder / "own"), str(folder / "others")),
                *(json.dumps(command) for command in commands),
            ],
            env={**clean_environment(), "HOME": "/nonexistent"},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [Answer(*answer) for answer in json.loads(done.stdout)]

    yield call
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
    shutil.rmtree(folder)


def test_12_a_reader_may_look_and_verify_but_not_mark(reader):
    listed, shown, verified, rebuilt, looked, tried, *refused = reader(
        ["ls", "gpt", "--json"],
        ["show", "gpt@10", "--values"],
        ["verify", "--json"],
        ["rebuild"],
        ["doctor", "--no-write"],
        ["doctor", "--json"],
        ["tag", "gpt@10", "x"],
        ["pin", "gpt@10"],
        ["invalidate", "gpt@10", "--reason", "x"],
        ["tag", "gpt@10", "x", "--json"],
    )
    assert listed.code == 0, listed
    assert listed.json["checkpoints"][0]["metrics"] == {"loss": 1.5}
    assert shown.code == 0, shown
    assert (verified.code, verified.json["marked"]) == (0, False)
    assert rebuilt.code == 0, rebuilt
    assert looked.code == 0, looked
    assert tried.code == 1
    findings = {finding["name"]: finding["status"] for finding in tried.json["findings"]}
    assert findings["write"] == "fail"
    assert findings["records"] == "ok"
    for answer in refused:
        assert answer.code == 12, answer
        assert answer.err.startswith("error: ")
    assert error_of(refused[-1])["kind"] == "permission"
