"""Running what README.md and docs/*.md show.

A fence is told what it is by a comment on the line before it:

``<!-- run -->``                run it: python in the page's one namespace, console lines after ``$ `` by bash
``<!-- run: exit 4 -->``        console only: the last command ends with that code
``<!-- file: name.py -->``      write it to that file
``<!-- not run: why -->``       leave it

A python fence without any is run; a console fence without any is left.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "design").glob("*.md")])

_FENCE = re.compile(r"(?:<!-- *(?P<mark>[^\n]*?) *-->\n)?```(?P<language>\w*)\n(?P<body>.*?)```", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Fence:
    page: pathlib.Path
    line: int
    language: str
    mark: str
    body: str

    @property
    def name(self):
        return f"{self.page.name}:{self.line}"


def fences(page):
    text = page.read_text(encoding="utf-8")
    return [
        Fence(
            page,
            text.count("\n", 0, found.start("body")),
            found["language"],
            found["mark"] or "",
            found["body"],
        )
        for found in _FENCE.finditer(text)
    ]


def run_page(page, directory):
    """Runs the fences of a page in order, in `directory`; returns what the consoles printed, per command."""
    names = {"__name__": "__page__"}
    printed = {}
    for fence in fences(page):
        if fence.mark.startswith("file: "):
            (directory / fence.mark.removeprefix("file: ")).write_text(fence.body, encoding="utf-8")
        elif fence.mark.startswith("not run"):
            continue
        elif fence.language == "python":
            source = "\n" * fence.line + fence.body  # tracebacks then show the page's own line
            exec(compile(source, str(page), "exec"), names)  # noqa: S102
        elif fence.language == "console" and fence.mark.startswith("run"):
            _run_console(fence, directory, printed)
    return printed


def _run_console(fence, directory, printed):
    wanted = int(fence.mark.removeprefix("run: exit ")) if ":" in fence.mark else 0
    commands = [line.removeprefix("$ ") for line in fence.body.splitlines() if line.startswith("$ ")]
    environ = {
        **os.environ,
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "160",
    }
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        expected = wanted if command == commands[-1] else 0
        assert done.returncode == expected, f"{fence.name}: {command}\n{done.stdout}{done.stderr}"
        printed[command] = done.stdout
