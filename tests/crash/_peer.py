"""Another process on the same store: does what it is told on stdin, line by line, and answers in JSON.

python -m tests.crash._peer DIRECTORY
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.errors import CkptstoreError
from tests.crash._support import TRAIN, blank_like, make_state, same

ROOT = Path(__file__).parents[2]


class Peer:
    """The other process, as a test holds it."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.crash._peer", str(directory)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.communicate(timeout=60)

    def ask(self, what: str, *arguments: Any) -> Any:
        """Its answer; an error's kind comes as {"error": kind}."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()


def answer(run: Any, what: str, arguments: list[Any]) -> Any:
    match what:
        case "save":
            step, salt = arguments
            return run.save(step, make_state(step, salt)).result().id
        case "restore":
            state = blank_like(make_state(0))
            step = run.restore(state)
            salt = state["optimizer"]["steps"][1]
            return step if step is None or same(state, make_state(step, salt)) else "mixture"
        case "load":
            return run[arguments[0]].load()["optimizer"]["steps"]
        case "start":
            return run.start(exclusive=arguments[0]).number
        case "steps":
            return [checkpoint.step for checkpoint in run.checkpoints()]
        case "latest":
            return run.latest.id
        case "rewind":
            return run.rewind(arguments[0]).id
        case "tag":
            return run.tag(*arguments)
        case "annotate":
            return run.annotate(arguments[0], metrics=arguments[1])
    raise ValueError(what)


def main() -> None:
    run = ckptstore.open(sys.argv[1]).run(TRAIN)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            told = answer(run, what, arguments)
        except CkptstoreError as error:
            told = {"error": error.kind, "hint": error.hint, "message": error.message}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
