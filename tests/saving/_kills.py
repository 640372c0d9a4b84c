"""The loop of real kills during overlapping saves, for a short test and for the soak."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ckptstore
from tests.crash._support import TRAIN, check_objects, make_state, same
from tests.saving._killed import EXIT_CODE

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 64 << 10
MOST_CALLS = 700
UNTOLD = 4
"""So many steps may be committed that the training had not told: those it had not looked at yet."""

MANY = 10_000
KINDS = ("kill", "call", "exit", "stop")


def start(directory: Path, temporary: Path, last: int, *how: object) -> subprocess.Popen[str]:
    """The training in a process of its own, whose temporary files would lie in `temporary`."""
    command = [sys.executable, "-W", "error", "-m", "tests.saving._killed", str(directory), str(last)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    environment.pop("CKPTSTORE_MANIFEST", None)  # as a training has it: a file in the store
    return subprocess.Popen(
        [*command, *map(str, how)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def nothing_left(temporary: Path) -> Iterator[None]:
    """No temporary file, and no shared memory of ours, is left by what happens in the block."""
    temporary.mkdir()
    before = _shared()
    yield
    assert list(temporary.iterdir()) == []
    # Tests beside this one use folders and files of their own there, for a moment: only what stays counts.
    deadline = time.monotonic() + 60
    while (left := _shared() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _shared() -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        names = (name for name in os.listdir("/dev/shm") if "ckptstore" in name)
        return {name for name in names if not name.startswith("ckptstore-test-")}
    return set()


def kill_often(directory: Path, kills: int, seed: int) -> int:
    """Trains with `kills` ends of all kinds; after each one everything is checked. Returns the last step."""
    ckptstore.init(directory, chunk_bytes=CHUNK_BYTES).close()
    with nothing_left(directory.with_name("temporary")):
        return end_often(
            KINDS,
            kills,
            seed,
            functools.partial(end_once, directory),
            lambda told, wholly: check(directory, told, wholly=wholly),
        )


def end_often(
    kinds: Sequence[str],
    kills: int,
    seed: int,
    end: Callable[[int, str, random.Random], int],
    check: Callable[[int, bool], int],
) -> int:
    """Ends a training `kills` times, in turn in these ways, and checks after each. Returns the last step.

    Args:
        end: (last step told, way, draw) -> the last step told.
        check: (last step told, whether all is looked at) -> the newest step.
    """
    draw = random.Random(seed)
    print(f"seed {seed}")
    told = 0
    for number in range(kills):
        kind = kinds[number % len(kinds)]
        try:
            told = end(told, kind, draw)
            told = check(told, number % 10 == 0 or number == kills - 1)
        except BaseException as error:
            error.add_note(f"end {number} ({kind}), seed {seed}")
            raise
    return told


def end_once(directory: Path, told: int, kind: str, draw: random.Random) -> int:
    """One training, ended that way. Returns the last step that it, or who took over from it, told."""
    temporary = directory.with_name("temporary")
    if kind == "call":
        child = start(directory, temporary, told + MANY, "call", draw.randrange(1, MOST_CALLS))
        return max(told, _told(child, -signal.SIGKILL))
    if kind == "exit":
        child = start(directory, temporary, told + MANY, "exit", draw.uniform(0.0, 0.4))
        return max(told, _told(child, EXIT_CODE))
    child = start(directory, temporary, told + MANY)
    try:
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first, child.communicate()[1]
        time.sleep(draw.uniform(0.0, 0.4))
        if kind == "kill":
            child.kill()
            return max(int(first), _told(child, -signal.SIGKILL))
        child.send_signal(signal.SIGSTOP)
        # It is silent for longer than anybody waits: another takes over, and then it wakes.
        other = start(directory, temporary, MANY, "exit", 0.5)
        after = _told(other, EXIT_CODE)
        child.send_signal(signal.SIGCONT)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 1, err
        assert "SessionSupersededError" in err, err
        return max([told, int(first), after, *(int(line) for line in out.split())])
    finally:
        child.kill()
        child.communicate()


def _told(child: subprocess.Popen[str], code: int) -> int:
    out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    return max([0, *(int(line) for line in out.split())])


def check(directory: Path, told: int, *, wholly: bool) -> int:
    """The newest is no older than what was told, little newer, and exact. Returns its step."""
    with contextlib.closing(ckptstore.open(directory)) as store:
        run = store.run(TRAIN)
        found = run.checkpoints()
        latest = run.latest
        newest = 0 if latest is None else latest.step
        assert told <= newest <= told + UNTOLD, f"told of step {told}, found {newest}"
        for checkpoint in found if wholly else found[-3:]:
            assert checkpoint.state == "ok"
            assert same(checkpoint.load(), make_state(checkpoint.step)), f"{checkpoint} is not what was saved"
        if wholly:
            check_objects(store.tier.backend)
            assert not store.verify().problems
        return newest
