"""Writers, readers and collectors in processes of their own, killed and stopped at random; what must hold.

What a checkpoint holds is a function of its run and step, and each process tells what it knows to be true
(:mod:`tests.gc._swarm_child`); so at the end everything can be checked, whoever was killed when.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.gc.documents import read_plans
from ckptstore.gc.lock import LOCK
from ckptstore.model.ids import run_key
from ckptstore.model.policies import Policy
from ckptstore.model.record import CommitRecord
from ckptstore.store import Store
from ckptstore.tier import commits
from ckptstore.tier.contents import Contents
from ckptstore.tier.policies import write_policy
from ckptstore.tier.tier import Tier
from tests.crash._support import check_objects, make_state, records, same
from tests.gc._swarm_child import POLICY, SILENT_SECONDS, TAG_EVERY, Part, salt_of

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 64 << 10
SHARED = "train/exp-1000"
PATIENCE_SECONDS = 120.0
"""No process takes so long to end when it is asked to: else it waits for somebody who never comes."""


@dataclasses.dataclass(frozen=True)
class Swarm:
    """How many of each, and for how long.

    Attributes:
        seconds: they are struck for so long, and then left alone until each thing was done `least` times.
        sharing: writers that all train one run.
        every: seconds between two strikes, on average.
    """

    seconds: float
    seed: int
    least: int = 1
    writers: int = 8
    sharing: int = 2
    readers: int = 4
    collectors: int = 3
    every: float = 0.25

    def parts(self) -> Iterator[dict[str, Any]]:
        runs = [f"train/exp-{number}" for number in range(self.writers)]
        for number, run in enumerate(runs):
            yield {"role": "writer", "number": number, "run": run}
        for number in range(self.sharing):
            yield {"role": "writer", "number": number, "run": SHARED, "shared": True}
        for role, count in (("reader", self.readers), ("collector", self.collectors)):
            for number in range(count):
                yield {"role": role, "number": number, "runs": runs}


@dataclasses.dataclass
class Outcome:
    """What they did, by what they told.

    Attributes:
        committed: run -> [(step, checkpoint id)] in the order told.
        tagged: (run, step).
        counts: how often each thing was told, and the strikes.
        collected: records that went.
    """

    committed: dict[str, list[tuple[int, str]]]
    tagged: set[tuple[str, int]]
    counts: collections.Counter[str]
    collected: int

    def __str__(self) -> str:
        return f"{self.collected} collected; {dict(self.counts)}"


class Nursery:
    """The process that forks the others; when it ends, they do."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self._folder = folder
        with open(folder / "nursery.log", "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.gc._swarm_child", str(folder), *modules],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._names: dict[int, str] = {}

    def start(self, part: Part) -> int:
        pid: int = self._ask({"part": dataclasses.asdict(part)})
        self._names[pid] = part.name
        return pid

    def ended(self, pid: int) -> int | None:
        """Its exit code; None while it runs."""
        code: int | None = self._ask({"ended": pid})
        return code

    def log(self, pid: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / f"{self._names[pid]}.log").read_text()[-6000:]
        return ""

    def name(self, pid: int) -> str:
        return self._names[pid]

    def _ask(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "nursery.log").read_text()
        return json.loads(answer)

    def close(self) -> None:
        """Ends it and, by that, all that it forked (they have asked for a SIGKILL when it dies)."""
        self._process.kill()
        self._process.communicate()


def play(folder: Path, url: str, swarm: Swarm) -> None:
    """Lets them work while they are struck, then checks all that must hold."""
    print(f"seed {swarm.seed}")
    folder.mkdir()
    with ckptstore.init(url, chunk_bytes=CHUNK_BYTES) as store:
        write_policy(store.tiers, None, Policy.of(POLICY))
    of_s3 = ("boto3", "botocore.httpsession", "ckptstore_s3._client")
    modules = of_s3 if url.startswith("s3:") else ("ckptstore_local",)
    with contextlib.closing(Nursery(folder, modules)) as nursery:
        try:
            strikes = _Play(folder, url, swarm, nursery).run()
            told = _told(folder)
            told.counts.update(strikes)
            _finish(nursery, url, swarm)
            _check(url, told)
        except BaseException as error:
            error.add_note(f"seed {swarm.seed}")
            raise
    print(told)


class _Play:
    """The part in which they are killed, stopped and woken."""

    def __init__(self, folder: Path, url: str, swarm: Swarm, nursery: Nursery) -> None:
        self._folder = folder
        self._url = url
        self._swarm = swarm
        self._nursery = nursery
        self._draw = random.Random(swarm.seed)
        self._parts: dict[int, dict[str, Any]] = {}
        self._asleep: dict[int, float] = {}
        self._killed: set[int] = set()
        self._started = 0

    def run(self) -> collections.Counter[str]:
        strikes: collections.Counter[str] = collections.Counter()
        for part in self._swarm.parts():
            self._start(part)
        started = time.monotonic()
        while (passed := time.monotonic() - started) < self._swarm.seconds or not self._have_worked():
            assert passed < self._swarm.seconds + PATIENCE_SECONDS, (
                f"too little is done: {_told(self._folder)}"
            )
            time.sleep(self._draw.uniform(0, 2 * self._swarm.every))
            self._wake(time.monotonic())
            self._look()
            if passed < self._swarm.seconds:  # afterwards all come to work
                strikes[self._strike()] += 1
        self._wake(None)
        (self._folder / "stop").touch()
        self._join()
        return strikes

    def _have_worked(self) -> bool:
        """All have come to work: else nothing was tested."""
        told = _told(self._folder)
        runs = {part["run"] for part in self._swarm.parts() if part["role"] == "writer"}
        return (
            told.committed.keys() == runs
            and told.collected >= self._swarm.least
            and all(told.counts[did] >= self._swarm.least for did in ("read", "tagged", "round"))
        )

    def _start(self, part: dict[str, Any]) -> None:
        self._started += 1
        name = f"{self._started}-{part['role']}-{part['number']}"
        pid = self._nursery.start(Part(name=name, url=self._url, seed=self._swarm.seed, **part))
        self._parts[pid] = part

    def _strike(self) -> str:
        pid = self._draw.choice(sorted(self._parts, key=self._nursery.name))
        if self._draw.random() < 0.5:
            os.kill(pid, signal.SIGKILL)
            self._asleep.pop(pid, None)
            self._killed.add(pid)
            self._start(self._parts.pop(pid))
            return "killed"
        if pid not in self._asleep:
            os.kill(pid, signal.SIGSTOP)
            self._asleep[pid] = time.monotonic() + self._draw.uniform(0.05, 2.5 * SILENT_SECONDS)
        return "stopped"

    def _wake(self, now: float | None) -> None:
        for pid, until in list(self._asleep.items()):
            if now is None or until <= now:
                os.kill(pid, signal.SIGCONT)
                del self._asleep[pid]

    def _look(self) -> None:
        """None ends that was not killed."""
        for pid in self._parts:
            code = self._nursery.ended(pid)
            assert code is None, f"{self._nursery.name(pid)} ended with {code}:\n{self._nursery.log(pid)}"
        self._killed = {pid for pid in self._killed if self._nursery.ended(pid) is None}

    def _join(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        left = {*self._parts, *self._killed}
        while left:
            for pid in sorted(left):
                code = self._nursery.ended(pid)
                if code is None:
                    continue
                left.discard(pid)
                wanted = -signal.SIGKILL if pid in self._killed else 0
                name = self._nursery.name(pid)
                assert code == wanted, f"{name} ended with {code}:\n{self._nursery.log(pid)}"
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(1)  # they write where they are
                raise AssertionError(
                    "these do not end:\n" + "\n".join(self._nursery.log(pid) for pid in sorted(left))
                )
            time.sleep(0.02)


def _finish(nursery: Nursery, url: str, swarm: Swarm) -> None:
    """Two quiet rounds."""
    pid = nursery.start(Part(name="finisher", role="finisher", url=url, seed=swarm.seed))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (code := nursery.ended(pid)) is None:
        assert time.monotonic() < deadline, "the last rounds do not end"
        time.sleep(0.02)
    assert code == 0, nursery.log(pid)


def _told(folder: Path) -> Outcome:
    told = Outcome(collections.defaultdict(list), set(), collections.Counter(), 0)
    for path in sorted(folder.glob("*.told")):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # killed in the middle of the word
            fact = json.loads(line)
            told.counts[fact["did"]] += 1
            if fact["did"] == "committed":
                told.committed[fact["run"]].append((fact["step"], fact["id"]))
            elif fact["did"] == "tagged":
                told.tagged.add((fact["run"], fact["step"]))
            elif fact["did"] == "round":
                told.collected += fact["collected"]
    return told


# --- what must hold -------------------------------------------------------------------------------


def _check(url: str, told: Outcome) -> None:
    with contextlib.closing(ckptstore.open(url)) as store:
        for run, committed in told.committed.items():
            _check_run(store, run, committed, {step for name, step in told.tagged if name == run})
        assert not store.verify().problems
        check_objects(store.tier.backend)
        _check_nothing_left(store.tier)


def _check_run(store: Store, run: str, committed: list[tuple[int, str]], tagged: set[int]) -> None:
    found = store.run(run).checkpoints()
    for checkpoint in found:
        assert checkpoint.state == "ok", f"{checkpoint} after all has ended"
        assert same(checkpoint.load(), make_state(checkpoint.step, salt_of(run))), (
            f"{checkpoint} is not exact"
        )
    alive = {checkpoint.id for checkpoint in found}
    for step, checkpoint_id in committed:
        end = commits.read_commit(store.tier, run_key(run), checkpoint_id)
        assert end is not None, f"{run} step {step} was committed and is lost"
        assert isinstance(end, CommitRecord) == (checkpoint_id in alive)
        assert isinstance(end, CommitRecord) or end.kind == "gone", f"{run} step {step} was committed: {end}"
    _check_policy(run, [checkpoint.step for checkpoint in found], {step for step, _ in committed}, tagged)


def _check_policy(run: str, alive: list[int], committed: set[int], tagged: set[int]) -> None:
    """Exactly what the policy keeps is there: reckoned anew, from what was told."""
    (distance,) = POLICY.every
    steps = set(alive)
    exact = {step for step in committed if step % distance == 0}
    assert exact <= steps, f"{run}: {sorted(exact - steps)} went although every {distance} stays"
    assert tagged <= steps, f"{run}: {sorted(tagged - steps)} went although they are tagged"
    if run == SHARED:  # what a superseded writer saves late is older than its step tells
        return
    newest = set(sorted(steps | committed)[-POLICY.last :])
    assert newest <= steps, f"{run}: {sorted(newest - steps)} went although it is among the newest"
    lowest = {min(s for s in steps if s // distance == bucket) for bucket in {s // distance for s in steps}}
    kept = newest | lowest | {step for step in steps if step % TAG_EVERY == 0}  # not all tags were told
    assert steps <= kept, f"{run}: {sorted(steps - kept)} should have gone"


def _check_nothing_left(tier: Tier) -> None:
    named = {key for record in records(tier) for key in Contents(tier, record).object_sizes}
    there = {info.key for kind in ("chunks/", "packs/") for info in tier.backend.list(kind)}
    assert there == named, f"{len(there - named)} objects that nobody names are left"
    assert "planned" not in {plan.state for plan in read_plans(tier)}
    assert not tier.exists(LOCK)
    for prefix in ("dooms/", "intents/", "parts/", "damage/"):
        left = [info.key for info in tier.backend.list(prefix)]
        assert not left, f"{len(left)} left: {left[:3]}"
    assert not list(tier.backend.list_temporaries(""))
