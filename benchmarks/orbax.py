"""Orbax's side of each benchmark: jax and torch do not share a process well, so it has one of its own.

Its environment is `.venv/orbax` beside the one that runs this (`make bench` makes it), or the Python that the
variable CKPTSTORE_BENCH_ORBAX names. Without it Orbax is skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.states import State

_VARIABLE = "CKPTSTORE_BENCH_ORBAX"
_TIMEOUT_SECONDS = 600
Shapes = dict[str, Any]


class OrbaxMissing(Exception):
    """There is no environment with Orbax."""


def python() -> Path:
    """The Python that has Orbax.

    Raises:
        OrbaxMissing: there is none.
    """
    named = os.environ.get(_VARIABLE)
    path = Path(named) if named else Path(sys.prefix) / "orbax" / "bin" / "python"
    if not path.exists():
        raise OrbaxMissing(f"no {path}: `make bench` makes it")
    return path


def shapes_of(state: State) -> Shapes:
    """The state with each tensor's shape in its place."""
    return {
        key: shapes_of(value) if isinstance(value, dict) else list(value.shape)
        for key, value in state.items()
    }


def ask(task: str, folder: Path, **details: Any) -> dict[str, Any]:
    """Runs one task of `benchmarks.orbax_worker` below `folder` and returns its answer.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    # The package is taken from where this file lies: the environment of Orbax knows nothing of it.
    home = Path(__file__).parent.parent
    done = subprocess.run(
        [python(), "-m", "benchmarks.orbax_worker"],
        input=json.dumps({"task": task, "folder": str(folder.absolute()), **details}),
        capture_output=True,
        text=True,
        cwd=home,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"Orbax's process ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
