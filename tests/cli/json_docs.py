"""The examples of docs/json.md: real output of the commands, on a small store.

Run it to make them anew: ``python -m tests.cli.json_docs``. Ids and times are then others.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import sys
import tempfile
from pathlib import Path

import numpy as np
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.app import app
from tests.cli.json_shapes import PAGE

_PLACE = re.compile(
    r"^(?:<!-- (ckptstore [^\n]+?) -->"
    r"|`(ckptstore [^\n]+?) --json` prints, for example:\n\n```json\n.+?\n```)$",
    re.MULTILINE | re.DOTALL,
)


def state(step: int) -> dict[str, object]:
    return {
        "model": {"frozen": np.zeros((64, 100), np.float32), "weight": np.full((8, 100), step, np.float32)},
        "progress": {"step": step, "ratio": float("nan")},
    }


def make() -> None:
    """The store that the examples look at."""
    with ckptstore.init("ckpts") as store:
        run = store.run("gpt")
        run.save(10, state(10), metrics={"loss": 3.5}, metadata={"note": "first"}).result()
        run.save(20, state(20), metrics={"loss": 2.5, "acc": 0.5}, tags=["paper"]).result()
        keep = ckptstore.Keep(last=3, every=1000) | ckptstore.Keep.best(1, "loss", "min")
        store.policies.set("gpt", ckptstore.Policy(keep, components={"optimizer": ckptstore.Keep(last=1)}))


def page_with_examples(text: str) -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make()

        def example(found: re.Match[str]) -> str:
            command = found[1] or found[2]
            answer = CliRunner().invoke(app, ["-s", "ckpts", *shlex.split(command)[1:], "--json"])
            printed = answer.stdout.strip().replace(str(Path(folder).resolve()), "/data")
            printed = printed.replace(sys.executable, "/usr/bin/python3")
            printed = printed.replace(f'"host": "{socket.gethostname()}"', '"host": "node17"')
            return f"`{command} --json` prints, for example:\n\n```json\n{printed}\n```"

        return _PLACE.sub(example, text)


if __name__ == "__main__":
    os.environ.pop("CKPTSTORE", None)
    PAGE.write_text(page_with_examples(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
