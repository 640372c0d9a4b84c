"""A training with two saves under way at any time, that is killed: restores, checks, goes on, tells.

    python -m tests.saving._killed DIRECTORY LAST_STEP [exit SECONDS | call NUMBER]

With `exit` it leaves by os._exit so many seconds after its first save; with `call` it kills itself at that
system call below the store. Each line on stdout is a step that it knows to be committed; `done` is the last.
"""

from __future__ import annotations

import collections
import os
import sys
import threading

import ckptstore
from tests.crash._child import kill_at
from tests.crash._support import TRAIN, blank_like, make_state, same

EXIT_CODE = 7


def tell(pendings: collections.deque[ckptstore.PendingSave], count: int) -> None:
    """Tells those at the front that are committed; waits for some until at most `count` are left."""
    while pendings and (len(pendings) > count or pendings[0].done):
        print(pendings.popleft().result().step, flush=True)


def main() -> None:
    directory, last = sys.argv[1], int(sys.argv[2])
    how, when = (sys.argv[3], float(sys.argv[4])) if len(sys.argv) > 3 else ("", 0.0)
    if how == "call":
        kill_at(int(when))
    run = ckptstore.open(directory).run(TRAIN)
    state = blank_like(make_state(0))
    start = run.restore(state) or 0
    if start:
        assert same(state, make_state(start)), f"restored something else than step {start}"
    if how == "exit":
        timer = threading.Timer(when, os._exit, (EXIT_CODE,))
        timer.daemon = True
        timer.start()
    pendings: collections.deque[ckptstore.PendingSave] = collections.deque()
    for step in range(start + 1, last + 1):
        state = make_state(step)
        pendings.append(run.save(step, state))
        state["model"]["hot"][:] = -1.0  # training goes on
        state["optimizer"]["moment"][:] = 0
        tell(pendings, 4)
    tell(pendings, 0)
    run.close()
    print("done", flush=True)


if __name__ == "__main__":
    main()
