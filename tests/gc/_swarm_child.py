"""What one process of the swarm does: a writer, a reader or a collector, that others kill and stop.

    python -m tests.gc._swarm_child FOLDER MODULE...

forks such processes on the word of :mod:`tests.gc._swarm`, so that a new one costs no imports
(MODULE: more of them). Each appends to FOLDER/NAME.told what it knows to be true, a JSON document a line, and
leaves what it prints in NAME.log.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import ckptstore
from ckptstore.errors import (
    BusyError,
    CkptstoreError,
    NotFoundError,
    SessionSupersededError,
)
from ckptstore.gc import listing
from ckptstore.gc.collect import collect
from ckptstore.gc.guards import View
from ckptstore.model.retention import Candidate, Keep, decide
from ckptstore.store import Store
from ckptstore.tier import intents
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier
from tests.crash._support import blank_like, make_state, same

POLICY = Keep(last=2, every=6)
TAG_EVERY = 4
SILENT_SECONDS = 1.5
BEAT_SECONDS = 0.2
"""So short that a process that was stopped for a second or two counts as gone."""

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Part:
    """Which process of the swarm this is.

    Attributes:
        name: of its files.
        role: "writer", "reader", "collector" or "finisher".
        run: that a writer trains.
        shared: whether another writer trains it, too.
        runs: that a reader looks at.
        number: the how many-th of its role.
    """

    name: str
    role: str
    url: str
    seed: int
    number: int = 0
    run: str = ""
    shared: bool = False
    runs: tuple[str, ...] = ()


def salt_of(run: str) -> int:
    """So that no two runs have the same states."""
    return int(run.rpartition("-")[2])


class Child:
    """One process: does its part until it is asked to stop."""

    def __init__(self, folder: Path, part: Part) -> None:
        self._folder = folder
        self._part = part
        self._draw = random.Random(f"{part.seed} {part.name}")
        self._told = os.open(folder / f"{part.name}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._store = ckptstore.open(part.url)
        # What took less cannot be taken for gone, and must succeed; a bucket's times are whole seconds.
        self._patience_seconds = SILENT_SECONDS - (1.0 if part.url.startswith("s3:") else 0.1)

    def play(self) -> None:
        with self._store:
            if self._part.role == "finisher":
                self._finish()
                return
            once = {"writer": self._train, "reader": self._read, "collector": self._collect}
            while not self._is_asked_to_stop():
                once[self._part.role]()

    def _is_asked_to_stop(self) -> bool:
        return (self._folder / "stop").exists()

    def _tell(self, did: str, **facts: Any) -> None:
        os.write(self._told, json.dumps({"did": did, **facts}).encode() + b"\n")

    @contextlib.contextmanager
    def _unless_silent(self, what: str) -> Iterator[list[float]]:
        """Errors are allowed to who was away for so long that others had to take it for gone."""
        since = [time.monotonic()]
        try:
            yield since
        except CkptstoreError as error:
            if time.monotonic() - since[0] < self._patience_seconds:
                raise
            self._tell("lost", what=what, error=f"{type(error).__name__}: {error}")

    # --- writers ------------------------------------------------------------------------------

    def _train(self) -> None:
        try:
            with self._unless_silent("save") as since:
                self._session(since)
        except SessionSupersededError:
            assert self._part.shared, "nobody else trains this run"
            self._tell("superseded")

    def _session(self, since: list[float]) -> None:
        part, salt = self._part, salt_of(self._part.run)
        with self._store.run(part.run) as run:
            state = blank_like(make_state(0))
            start = run.restore(state) or 0
            if start:
                assert same(state, make_state(start, salt)), f"restored something else than step {start}"
            pendings: collections.deque[tuple[float, ckptstore.PendingSave]] = collections.deque()

            def settle(count: int) -> None:
                while len(pendings) > count:
                    since[0], pending = pendings[0]
                    made = pending.result()
                    pendings.popleft()
                    self._tell("committed", run=part.run, step=made.step, id=made.id)

            step = start
            while not self._is_asked_to_stop():
                step += 1
                state = make_state(step, salt)
                since[0] = pendings[0][0] if pendings else time.monotonic()
                pendings.append((time.monotonic(), run.save(step, state)))
                state["model"]["hot"][:] = -1.0  # training goes on
                if step % TAG_EVERY == 0 and not part.shared:
                    settle(0)
                    since[0] = time.monotonic()
                    run.tag(step, f"gold-{step}")
                    self._tell("tagged", run=part.run, step=step)
                settle(1)
                time.sleep(self._draw.uniform(0.0, 0.1))
            settle(0)

    # --- readers ------------------------------------------------------------------------------

    def _read(self) -> None:
        time.sleep(self._draw.uniform(0.0, 0.05))
        found = self._store.run(self._draw.choice(self._part.runs)).checkpoints()
        if not found:
            return
        chosen = self._draw.choice([*found[-2:], *found])  # the policy soon lets the second newest go
        with self._unless_silent("read"), contextlib.ExitStack() as held:
            try:
                held.enter_context(chosen.reading())
            except NotFoundError:
                self._tell("too late")
                return
            # From here on whatever is decided waits for this reader.
            time.sleep(self._draw.uniform(0.0, 1.0))
            loaded = chosen.load()
            assert same(loaded, make_state(chosen.step, salt_of(chosen.run))), f"{chosen} is wrong"
            self._tell("read")

    # --- collectors ---------------------------------------------------------------------------

    def _collect(self) -> None:
        time.sleep(self._draw.uniform(0.0, 0.1))
        try:
            collected = full_round(self._store) if self._part.number else own_round(self._store.tier)
        except BusyError:
            self._tell("busy")
        else:
            self._tell("round", collected=collected)

    def _finish(self) -> None:
        """What is left of the dead falls silent; then two rounds that nothing disturbs."""
        time.sleep(SILENT_SECONDS + 2 * BEAT_SECONDS)
        for _ in range(2):
            self._tell("round", collected=full_round(self._store))


def full_round(store: Store) -> int:
    """As cron does it; how many records went."""
    return sum(len(report.collected) for report in store.gc())


def own_round(tier: Tier) -> int:
    """A round on what the policy lets go, in no way agreed with others; how many records went."""
    keys = listing.list_commit_keys(tier)
    records = listing.read_records(tier, keys)
    view = View(tier, records, listing.list_dooms(tier))
    targets: list[Pin] = []
    for run_key in sorted({run_key for run_key, _ in records}):
        entries = view.newest_first(run_key)[::-1]
        facts = [view.facts((run_key, entry.attempt)) for entry in entries]  # after the records: tags count
        candidates = [Candidate(dataclasses.replace(e, facts=f)) for e, f in zip(entries, facts, strict=True)]
        for entry, decision in zip(entries, decide(POLICY, candidates, time.time()), strict=True):
            if not decision.keep:
                targets.append((run_key, entry.attempt))
    return len(collect(tier, targets, reason="swarm").collected)


# --- the process that forks them --------------------------------------------------------------


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        importlib.import_module(name)
    _shorten_silence()
    while line := _read_line():
        what = json.loads(line)
        if "part" in what:
            pid = os.fork()
            if pid == 0:
                _be(folder, Part(**what["part"]))
            answer: Any = pid
        else:
            ended, status = os.waitpid(what["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        os.write(1, json.dumps(answer).encode() + b"\n")


def _shorten_silence() -> None:
    """In every module that has taken one of the limits by name."""
    for name, limit in (("SILENT_SECONDS", SILENT_SECONDS), ("BEAT_SECONDS", BEAT_SECONDS)):
        original = getattr(intents, name)
        for module in list(sys.modules.values()):
            if module.__name__.startswith("ckptstore") and getattr(module, name, None) == original:
                setattr(module, name, limit)


def _read_line() -> str:
    """A line of stdin; read byte by byte, so that nothing waits in a buffer that a fork would copy."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def _be(folder: Path, part: Part) -> NoReturn:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody outlives the test, stopped or not
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(folder / f"{part.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    warnings.simplefilter("error")
    try:
        Child(folder, part).play()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
