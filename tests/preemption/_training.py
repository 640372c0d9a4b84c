"""A training that is asked to end by a signal, saves, and ends by itself.

    python -m tests.preemption._training DIRECTORY HOW

Each line on stdout says how far it is. HOW is "loop", or "child" or "shielded": a forked child, such as a
worker that loads data, is there while the signal is watched.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

import ckptstore
from ckptstore.signals import shield_worker


def main() -> None:
    directory, how = sys.argv[1:]
    state: dict[str, Any] = {"weights": np.zeros(50_000), "step": 0}
    store = ckptstore.open(directory, create=True)
    with store.run("train") as run, run.preemption("SIGTERM", "SIGUSR1", deadline=20.0) as stop:
        start = run.restore(state) or 0
        if how != "loop":
            ready, told = os.pipe()
            worker = os.fork()
            if worker == 0:
                if how == "shielded":
                    shield_worker(0)
                os.write(told, b"!")
                while True:
                    time.sleep(30)
            os.read(ready, 1)
            print("worker", worker, flush=True)
            is_asked = input() == "end"
            ended = status = 0
            while not ended:
                if is_asked:  # again, should it meet one of the same number that is still under way
                    os.kill(worker, signal.SIGTERM)
                    time.sleep(0.05)
                ended, status = os.waitpid(worker, os.WNOHANG if is_asked else 0)
            print("ended", os.waitstatus_to_exitcode(status), "requested", stop.requested, flush=True)
            return
        for step in range(start + 1, start + 10_000):
            state["weights"] += 1
            state["step"] = step
            time.sleep(0.002)
            if step == start + 3:
                run.save(step, state)
                print("training", flush=True)
            if stop.agreed(step):
                report = stop.save(step, state)
                print(report.level, step, report.seconds < 20, flush=True)
                break


if __name__ == "__main__":
    main()
