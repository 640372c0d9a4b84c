from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

import ckptstore
from ckptstore.cli.app import COMMANDS
from ckptstore.cli.completion import Typed
from tests.cli.conftest import clean_environment

WORD_BREAKS = " \t\n\"'@><=;|&(:"


@pytest.fixture
def tab(process):
    """What bash is offered for a line; a value per item, as (kind, value)."""

    def call(line, breaks=WORD_BREAKS, **env):
        answer = process(
            env={
                "_CKPTSTORE_COMPLETE": "bash_complete",
                "COMP_LINE": line,
                "COMP_POINT": str(len(line)),
                "COMP_WORDBREAKS": breaks,
                **env,
            }
        )
        assert (answer.code, answer.err) == (0, "")
        return [tuple(item.split(",", 1)) for item in answer.out.splitlines() if item]

    return call


def values(items):
    return [value for _, value in items]


def test_commands_and_options_are_offered(tab):
    assert values(tab("ckptstore ")) == list(COMMANDS)
    assert values(tab("ckptstore un")) == ["undelete", "untag", "unpin"]
    assert "--exit-code" in values(tab("ckptstore diff --"))
    assert values(tab("ckptstore query x --format ")) == ["table", "json", "csv", "nl"]


def test_runs_and_refs_come_from_the_store(tab, place):
    assert values(tab(f"ckptstore -s {place} plot ")) == ["gpt", "other"]
    assert values(tab(f"ckptstore -s {place} show ")) == ["gpt@latest", "other@latest"]
    assert values(tab(f"ckptstore show -s {place} gpt@")) == [
        "latest", "paper", "30", "20", "10", "min:acc", "max:acc", "min:loss", "max:loss",
    ]  # fmt: skip
    assert values(tab("ckptstore show gpt@pa", CKPTSTORE=str(place))) == ["paper"]
    assert values(tab("ckptstore diff gpt@10 gpt@2", CKPTSTORE=str(place))) == ["20"]
    assert values(tab("ckptstore show gpt@min:l", CKPTSTORE=str(place))) == ["loss"]
    assert tab("ckptstore import m.npz o", CKPTSTORE=str(place)) == [("part", "other@")]
    assert values(tab("ckptstore ls o", CKPTSTORE=str(place)))[0] == "other"


def test_without_the_word_breaks_the_whole_is_given_back(tab, place):
    assert values(tab("ckptstore show gpt@min:l", breaks=" \t\n", CKPTSTORE=str(place))) == ["gpt@min:loss"]


def test_files_are_left_to_the_shell(tab):
    assert [kind for kind, _ in tab("ckptstore import ")] == ["file"]
    assert [kind for kind, _ in tab("ckptstore export x ")] == ["file"]
    assert [kind for kind, _ in tab("ckptstore -s ")] == ["file"]


def test_what_is_not_there_is_no_error(tab, tmp_path):
    assert tab("ckptstore show ") == []
    assert tab(f"ckptstore -s {tmp_path / 'nothing'} show g") == []
    (tmp_path / "ckptstore.json").write_text("rubbish")
    assert tab(f"ckptstore -s {tmp_path} show g") == []


def test_odd_names_are_escaped(tab, tmp_path):
    with ckptstore.init(tmp_path / "odd", chunk_bytes=4096) as store:
        for name in ("my run", "it's $x;名", "new\nline"):
            store.run(name).save(1, {"x": np.zeros(1)}, tags=["a b"]).result()
    env = {"CKPTSTORE": str(tmp_path / "odd")}
    assert values(tab("ckptstore plot ", **env)) == [r"it\'s\ \$x\;名", r"my\ run"]
    assert values(tab("ckptstore show my\\ run@a", **env)) == [r"a\ b"]
    assert values(tab('ckptstore show "my run@a', **env)) == ["my run@a b"]


@pytest.mark.parametrize(
    ("line", "words", "last", "quote"),
    [
        ("c show", ("c",), "show", ""),
        ("c show ", ("c", "show"), "", ""),
        (r"c a\ b", ("c",), "a b", ""),
        ("c 'a b' \"c d", ("c", "a b"), "c d", '"'),
        ("c ''", ("c",), "", ""),
        ("c '' x", ("c", ""), "x", ""),
        ("c \\", ("c",), "", ""),
        ("", (), "", ""),
    ],
)
def test_a_line_is_divided_as_bash_does(line, words, last, quote):
    assert Typed.read(line) == Typed(words, last, quote)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed(cli, shell, tmp_path):
    answer = cli("completion", shell)
    assert answer.code == 0
    assert "_CKPTSTORE_COMPLETE" in answer.out
    if shutil.which(shell):
        (tmp_path / "script").write_text(answer.out)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)
    assert cli("completion", "tcsh").code == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_takes_the_answers(cli, place, tmp_path):
    import os
    import sys

    (tmp_path / "script").write_text(cli("completion", "bash").out)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ckptstore"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m ckptstore \"$@\"\n")
    program.chmod(0o755)
    script = """
    source ./script
    COMP_WORDBREAKS=$' \\t\\n"@><=;|&(:'
    COMP_LINE="ckptstore show gpt@p" COMP_POINT=20 COMP_WORDS=(ckptstore show gpt @ p) COMP_CWORD=4
    _ckptstore_completion ckptstore p @
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True, text=True, cwd=tmp_path, check=True,
        env={**clean_environment(), "PATH": path, "CKPTSTORE": str(place)},
    )  # fmt: skip
    assert done.stdout == "paper\n"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_are_answered(process, place, shell):
    answer = process(
        env={
            "_CKPTSTORE_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": "ckptstore show gpt@" if shell == "zsh" else "ckptstore show",
            "COMP_CWORD": "2" if shell == "zsh" else "gpt@",
            "CKPTSTORE": str(place),
        }
    )
    assert answer.code == 0
    assert "gpt@paper" in answer.out
