"""Trainings in processes of their own: scripts of a few lines, and what they have in common."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import ckptstore

ROOT = Path(__file__).parents[2]
SECONDS = 60.0

_HEAD = """
import os, sys, threading, time
import numpy as np
import ckptstore
from ckptstore.save import lane
from ckptstore.testing import Fault
from tests.saving._process import gated
from tests.saving.made import FULL, state_of
store, backend = gated(sys.argv[1])
run = store.run("train")
"""


def gated(directory: str):
    """A store, and its backend, which a script can make fail."""
    from ckptstore.environment import Environment
    from ckptstore.testing import FaultBackend
    from ckptstore_local import LocalBackend
    from tests.crash._support import store_over

    backend = FaultBackend(LocalBackend(Path(directory)))
    return store_over(backend, Environment()), backend


def run_script(directory: Path, script: str, *, limit: str = "") -> subprocess.CompletedProcess[str]:
    """Runs it to its end: `store`, its `backend` and a `run` are there.

    Args:
        limit: shell commands before, such as ``ulimit -n 256``.
    """
    command = [sys.executable, "-W", "error", "-c", _HEAD + textwrap.dedent(script), str(directory)]
    if limit:
        command = ["bash", "-c", f'{limit} && exec "$0" "$@"', *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["CKPTSTORE_MANIFEST"] = ":memory:"
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def steps_of(directory: Path) -> list[int]:
    """What is there, each of it what was saved."""
    from tests.saving.made import is_state_of

    with ckptstore.open(directory) as store:
        found = store.run("train").checkpoints()
        for checkpoint in found:
            assert is_state_of(checkpoint.load(), checkpoint.step)
        return [checkpoint.step for checkpoint in found]
