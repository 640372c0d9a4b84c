from __future__ import annotations

import inspect
import re

import click

import ckptstore.errors
from ckptstore.cli.app import COMMANDS, app
from tests.cli.cli_docs import PAGE, page_with

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
