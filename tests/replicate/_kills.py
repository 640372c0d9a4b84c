"""A training and a `ckptstore replicate --watch` beside it, both ended at random, and what must hold after.

    python -m tests.replicate._kills [exit SECONDS]

is that command with a short silence limit; with `exit` it leaves by os._exit so many seconds after its start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ckptstore
from ckptstore.model.record import CommitRecord
from ckptstore.store import Store
from ckptstore.tier import intents
from ckptstore.tier.tier import Tier
from tests.crash._support import TRAIN, check_objects, ends, make_state, same
from tests.replicate.made import TOML
from tests.saving import _kills as saving
from tests.saving._killed import EXIT_CODE

KINDS = ("kill", "exit", "call", "stop", "call", "kill", "exit", "kill")
SILENT_SECONDS = 0.3
"""Shorter than the pause between two heartbeats: the living are taken over, too."""

MOST_TEMPORARIES = 16
"""Files that one ended process may leave half-written in a tier."""


def watch(toml: Path, *how: object) -> subprocess.Popen[str]:
    """The sidecar, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CKPTSTORE": str(toml)}
    environment["CKPTSTORE_MANIFEST"] = ":memory:"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.replicate._kills", *map(str, how)],
        cwd=saving.ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_often(root: Path, kills: int, seed: int) -> int:
    """Trains and copies with `kills` ends; after each one everything is checked. Returns the last step."""
    toml = root / "ckptstore.toml"
    toml.write_text(TOML.format(required="async"))
    ckptstore.init(toml, chunk_bytes=saving.CHUNK_BYTES).close()
    with saving.nothing_left(root / "temporary"):
        told = saving.end_often(
            KINDS,
            kills,
            seed,
            functools.partial(_end_once, toml),
            lambda told, wholly: check(toml, told, wholly=wholly),
        )
    _finish(toml, kills)
    return told


def _end_once(toml: Path, told: int, kind: str, draw: random.Random) -> int:
    """One training and one sidecar, both ended. Returns the last step that the training told."""
    sidecar = watch(toml, *(("exit", draw.uniform(0.3, 1.2)) if kind == "exit" else ()))
    try:
        if kind == "stop":
            return _stopped(toml, told, sidecar, draw)
        told = saving.end_once(toml, told, kind, draw)  # the training ends first
        if kind == "exit":
            _ended(sidecar, EXIT_CODE)
        else:
            time.sleep(draw.uniform(0.0, 0.3))  # what it is about is random, and so is when it ends
            sidecar.kill()
            _ended(sidecar, -signal.SIGKILL)
        return told
    finally:
        sidecar.kill()
        sidecar.communicate()


def _stopped(toml: Path, told: int, sidecar: subprocess.Popen[str], draw: random.Random) -> int:
    """Both fall silent, others take over meanwhile, and then they wake."""
    time.sleep(draw.uniform(0.3, 0.8))
    sidecar.send_signal(signal.SIGSTOP)
    other = watch(toml)
    try:
        told = saving.end_once(toml, told, "stop", draw)
        sidecar.send_signal(signal.SIGCONT)
        time.sleep(draw.uniform(0.0, 0.3))
        for process in (sidecar, other):
            process.kill()
            _ended(process, -signal.SIGKILL)
        return told
    finally:
        other.kill()
        other.communicate()


def _ended(process: subprocess.Popen[str], code: int) -> None:
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err, err


def check(toml: Path, told: int, *, wholly: bool) -> int:
    """Each tier alone is whole, what was told is exact, and the debt is what the records say."""
    newest = saving.check(toml, told, wholly=wholly)
    with contextlib.closing(ckptstore.open(toml)) as store:
        hot, cold = store.tiers
        ids = [_checkpoints(tier) for tier in (hot, cold)]
        assert ids[1] <= ids[0], "the cold tier has what the hot one never had"
        owed = store.replication.to(cold).owing()
        assert [item.why for _, _, item in owed] == [""] * len(ids[0] - ids[1])
        check_objects(cold.backend)
        if wholly:
            for tier in store.tiers:
                assert not store.verify(tier=tier.name).problems
    _check_alone(toml.with_name("cold"), wholly)
    return newest


def _check_alone(directory: Path, wholly: bool) -> None:
    """The cold tier, as a host sees it that has nothing else."""
    with contextlib.closing(ckptstore.open(directory)) as store:
        found = store.run(TRAIN).checkpoints()
        for checkpoint in found if wholly else found[-3:]:
            assert checkpoint.state == "ok"
            assert same(checkpoint.load(), make_state(checkpoint.step)), f"{checkpoint} is partial"


def _checkpoints(tier: Tier) -> set[str]:
    return {end.checkpoint for end in ends(tier).values() if isinstance(end, CommitRecord)}


def _finish(toml: Path, kills: int) -> None:
    """One round that nothing disturbs pays all, and little is left of the dead."""
    with contextlib.closing(ckptstore.open(toml)) as store:
        (report,) = store.replication.run([store.tiers[1]])
        assert (report.owed, report.failed, report.skipped) == (0, (), ())
        assert not store.replication.to(store.tiers[1]).owing()
        assert _checkpoints(store.tiers[0]) == _checkpoints(store.tiers[1])
        _check_left(store, kills)
        for tier in store.tiers:
            assert not store.verify(tier=tier.name).problems
    _check_alone(toml.with_name("cold"), True)


def _check_left(store: Store, kills: int) -> None:
    processes = 4 * kills  # a "stop" has two of each kind
    for tier in store.tiers:
        left = list(intents.list_intents(tier))
        assert all(intents.is_alive_here(document, tier.environment) is False for document in left)
        # A training has two saves under way, a copier one attempt a thread.
        assert len(left) <= 4 * processes
        assert len(list(tier.backend.list_temporaries(""))) <= MOST_TEMPORARIES * processes


def main() -> None:
    from ckptstore.cli.app import app

    intents.SILENT_SECONDS = SILENT_SECONDS
    if sys.argv[1:2] == ["exit"]:
        timer = threading.Timer(float(sys.argv[2]), os._exit, (EXIT_CODE,))
        timer.daemon = True
        timer.start()
    app(["replicate", "--watch", "--every", "0.05s"], prog_name="ckptstore")


if __name__ == "__main__":
    main()
