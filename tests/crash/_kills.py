"""The loop of real kills, for a short test and for the soak."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ckptstore
from tests.crash._support import TRAIN, check_objects, make_state, same

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 64 << 10
MOST_CALLS = 420
"""More than the system calls of opening, restoring and two saves."""


def start(directory: Path, last: int, kill_at: int | None = None) -> subprocess.Popen[str]:
    """The training in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "tests.crash._child", str(directory), str(last)]
    if kill_at is not None:
        command.append(str(kill_at))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_often(directory: Path, kills: int, seed: int) -> int:
    """Trains with `kills` kills; after each one everything is checked. Returns the last step.

    Every other kill is at a drawn system call, every other at a drawn moment.
    """
    draw = random.Random(seed)
    print(f"seed {seed}")
    ckptstore.init(directory, chunk_bytes=CHUNK_BYTES).close()
    told = killed = 0
    attempts = 0
    while killed < kills:
        attempts += 1
        assert attempts < 3 * kills + 10, "the children end before they can be killed"
        if draw.random() < 0.5:
            child = start(directory, told + 4, draw.randrange(1, MOST_CALLS))
        else:
            child = start(directory, told + 40)
            moment = time.monotonic() + draw.uniform(0.2, 1.2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, moment - time.monotonic()))
            child.kill()
        out, err = child.communicate(timeout=60)
        assert child.returncode in (0, -signal.SIGKILL), f"{err}\nkill {killed}, seed {seed}"
        killed += child.returncode != 0
        lines = out.split()
        told = max([told, *(int(line) for line in lines if line != "done")])
        try:
            told = check(directory, told, wholly=killed % 10 == 0)
        except BaseException as error:
            error.add_note(f"after kill {killed}, seed {seed}")
            raise
    check(directory, told)
    return told


def check(directory: Path, told: int, *, wholly: bool = True) -> int:
    """All that was told is there and whole (the newest only, unless `wholly`). Returns the newest step."""
    with contextlib.closing(ckptstore.open(directory)) as store:
        run = store.run(TRAIN)
        steps = [checkpoint.step for checkpoint in run.checkpoints()]
        assert steps == sorted(set(steps)), "a step was saved twice, or the order is wrong"
        assert steps == list(range(1, len(steps) + 1)), "a step is missing"
        assert len(steps) in (told, told + 1), f"told of {told} steps, found {len(steps)}"
        for step in steps[-4:]:
            assert same(run[step].load(), make_state(step))
        if wholly:
            check_objects(store.tier.backend)
        wanted = () if wholly else [f"{TRAIN}@{step}" for step in steps[-4:]]
        if wholly or wanted:
            assert not store.verify(refs=wanted).problems
        return len(steps)
