from __future__ import annotations

import inspect
import re

import click
import pytest

import ckptstore.errors
from ckptstore.cli.app import COMMANDS, app
from tests.cli.cli_docs import PAGE, page_with
from tests.cli.conftest import state_at

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_commands_say():
    assert page_with(TEXT) == TEXT, "bring it up to date: python -m tests.cli.cli_docs"


def test_every_command_and_option_is_on_the_page():
    for name in COMMANDS:
        section = TEXT.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        for parameter in app.get_command(None, name).params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert all(option in section for option in parameter.opts), (name, parameter.opts)


def test_every_exit_code_of_an_error_is_in_the_table():
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|", TEXT, re.MULTILINE))
    classes = [
        value
        for _, value in inspect.getmembers(ckptstore.errors, inspect.isclass)
        if hasattr(value, "exit_code")
    ]
    assert {str(value.exit_code) for value in classes} | {"0", "130", "141"} <= set(table)


def fields_of(heading: str) -> set[str]:
    """The names in the first column of the table under a heading."""
    section = TEXT.partition(f"\n#### {heading}\n")[2]
    assert section, heading
    table = re.split(r"\n\n(?!\|)", section.partition("\n#")[0].strip())
    rows = re.findall(r"^\| (`.+?`) \|", "\n".join(table), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("heading", "args", "part"),
    [
        ("A run", ["ls"], lambda d: d["runs"][0]),
        ("A checkpoint", ["ls", "gpt"], lambda d: d["checkpoints"][0]),
        ("A record that cannot be read", ["ls", "gpt"], lambda d: d["unreadable"][0]),
        ("What `show` adds", ["show", "gpt@10", "--tensors", "--values"], None),
        ("A tensor", ["show", "gpt@10", "--tensors"], lambda d: d["tensors_list"][0]),
        ("A verification", ["verify"], None),
        ("A problem", ["verify"], lambda d: d["problems"][0]),
        ("An examination", ["doctor"], None),
        ("An error", ["show", "gpt@15"], lambda d: d["error"]),
        ("A new store", ["init", "new"], None),
        ("A rebuilt manifest", ["rebuild"], None),
    ],
)
def test_the_json_shapes_are_as_documented(cli, place, store, heading, args, part):
    store.run("gpt").save(40, state_at(40)).result()
    path = next(path for path in (place / "commits").rglob("*-40-*.mp"))
    path.write_bytes(path.read_bytes()[:-9])
    cli("-s", place, "rebuild")
    document = cli("-s", place, *args, "--json").json
    found = part(document) if part else document
    names = set(found)
    if heading == "What `show` adds":
        names -= fields_of("A checkpoint")
    assert names == fields_of(heading)
