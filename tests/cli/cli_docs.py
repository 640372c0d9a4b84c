"""The part of docs/cli.md that is made from the commands themselves.

Run it to bring the page up to date: ``python -m tests.cli.cli_docs``
"""

from __future__ import annotations

from pathlib import Path

import click

from ckptstore.cli.app import COMMANDS, app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BEGIN = "<!-- Made from the commands by tests/cli/cli_docs.py; do not edit between these two comments. -->"
END = "<!-- End of what is made from the commands. -->"


def made() -> str:
    """A section for each command: its help, as the command prints it."""
    root = click.Context(app, info_name="ckptstore", **app.context_settings)
    sections = []
    for name in COMMANDS:
        command = app.get_command(root, name)
        assert command is not None
        context = click.Context(
            command, info_name=name, parent=root, terminal_width=100, max_content_width=100
        )
        sections.append(f"### {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(sections)


def page_with(text: str) -> str:
    """The page, with the commands as they are now."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin
    assert end
    return f"{before}{BEGIN}\n\n{made()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
