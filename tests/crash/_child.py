"""A training that is killed: restores, checks what it got, saves step after step, tells what was committed.

    python -m tests.crash._child DIRECTORY LAST_STEP [KILL_AT]

With KILL_AT it kills itself with SIGKILL at its KILL_AT-th system call below the store (a write is torn in
the middle). Each line on stdout is a step that was committed; `done` is the last.
"""

from __future__ import annotations

import os
import signal
import sys

import ckptstore
import ckptstore_local._sys as calls
from tests.crash._support import TRAIN, blank_like, make_state, same

NAMES = [
    "open",
    "close",
    "fsync",
    "ftruncate",
    "link",
    "lstat",
    "mkdir",
    "preadv",
    "pwrite",
    "rename",
    "scandir",
    "stat",
    "unlink",
]


def kill_at(target: int) -> None:
    """SIGKILL instead of the `target`-th call from now on."""
    count = 0

    def wrapped(name, original):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == target:
                if name == "pwrite":
                    fd, view, offset = args
                    original(fd, view[: len(view) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in NAMES:
        setattr(calls, name, wrapped(name, getattr(calls, name)))


def main() -> None:
    directory, last = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        kill_at(int(sys.argv[3]))
    run = ckptstore.open(directory).run(TRAIN)
    state = blank_like(make_state(0))
    start = run.restore(state) or 0
    if start:
        assert same(state, make_state(start)), f"restored something else than step {start}"
    for step in range(start + 1, last + 1):
        run.save(step, make_state(step)).result()
        print(step, flush=True)
    run.close()
    print("done", flush=True)


if __name__ == "__main__":
    main()
