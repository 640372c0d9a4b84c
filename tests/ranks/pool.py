"""Real ranks for tests: processes that live as long as the test session, with gloo between them.

def total(rank, world, factor):                       # a function of a module, as it is pickled
    mine = torch.tensor([rank * factor])
    torch.distributed.all_reduce(mine)
    return mine.item()

def test_sums(rank_pool):
    assert rank_pool.run(total, 10, world=4) == [60] * 4
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAX_RANKS = 8
GRACE_SECONDS = 10.0
"""How long the others may go on once a rank has failed: most wait for it, in a collective."""

_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "CKPTSTORE_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_SHOWN_OUTPUT = 8000
_TRACE_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended.

    Attributes:
        value: what the function returned.
        error: what it raised; None as well if that cannot be pickled.
        failure: None if it returned; else how it failed: a traceback, an exit code, where it hung.
        when: it failed, in seconds of the monotonic clock of this machine.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    failure: str | None = None
    when: float = 0.0


class RanksFailedError(AssertionError):
    """Some ranks failed; the message says which and how, the first to fail first.

    Attributes:
        outcomes: of all ranks, in rank order.
    """

    def __init__(self, outcomes: list[Outcome]) -> None:
        failed = sorted((o for o in outcomes if o.failure is not None), key=lambda o: o.when)
        super().__init__("\n".join(f"rank {o.rank} of {len(outcomes)} {o.failure}" for o in failed))
        self.outcomes = outcomes


@dataclasses.dataclass(eq=False, slots=True)
class _Rank:
    number: int
    pid: int
    connection: Connection
    log: Path
    exit_code: int | None = None

    def output_since(self, position: int) -> str:
        with self.log.open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace")[-_SHOWN_OUTPUT:].strip()


class RankPool:
    """Up to eight processes, started when first asked for, of which each call uses the first `world`.

    Torch is imported once, by the process that all ranks are forked from. A rank that dies or hangs ends
    them all, and the next call starts new ones. What a rank prints is shown when it fails.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._parent: subprocess.Popen[str] | None = None
        self._listener: Listener | None = None
        self._ranks: list[_Rank] = []
        self._port: int | None = None
        self._jobs = 0

    def run(
        self, function: Callable[..., Any], *args: Any, world: int = 4, timeout: float = 60.0
    ) -> list[Any]:
        """What ``function(rank, world, *args)`` returns on each rank, torch.distributed being initialized.

        Args:
            function: of a module; it and `args` are pickled.
            timeout: seconds, for the call and for each collective.

        Raises:
            RanksFailedError: a rank raised, died or hung.
        """
        return _values(self.outcomes(function, *args, world=world, timeout=timeout))

    def run_plain(
        self, function: Callable[..., Any], *args: Any, world: int = 4, timeout: float = 60.0
    ) -> list[Any]:
        """As :meth:`run`, without any process group."""
        return _values(self.outcomes(function, *args, world=world, timeout=timeout, plain=True))

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 4,
        timeout: float = 60.0,
        plain: bool = False,
    ) -> list[Outcome]:
        """As :meth:`run`, but nothing is raised: for tests in which ranks are to fail or die."""
        work = pickle.dumps((function, args))
        self._grow(world)
        ranks = self._ranks[:world]
        starts = [rank.log.stat().st_size for rank in ranks]
        self._jobs += 1
        port = None if plain else self._store_port()
        for rank in ranks:
            _send(rank, ("run", self._jobs, port, rank.number, world, timeout, work))
        answers = self._answers(ranks, timeout)
        outcomes = [self._outcome(rank, answers, start) for rank, start in zip(ranks, starts, strict=True)]
        if any(rank.number not in answers or rank.exit_code is not None for rank in ranks):
            self.restart()
        return outcomes

    def restart(self) -> None:
        """Ends all ranks; the next call starts new ones."""
        ranks, self._ranks, self._port = self._ranks, [], None
        for rank in ranks:
            rank.connection.close()
            if rank.exit_code is None:
                os.kill(rank.pid, signal.SIGKILL)
                self._exit_code(rank)

    def close(self) -> None:
        """Ends all processes."""
        self.restart()
        if self._parent is not None:
            self._parent.communicate()
            self._parent = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._folder.cleanup()

    # --- processes ----------------------------------------------------------------------------

    def _grow(self, world: int) -> None:
        if not 0 < world <= MAX_RANKS:
            raise ValueError(f"a pool has 1 to {MAX_RANKS} ranks, not {world}")
        if self._parent is None:
            self._start_parent()
        assert self._listener is not None
        missing = range(len(self._ranks), world)
        for number in missing:
            self._tell(f"fork {number}")
        started = []
        for _ in missing:
            connection = self._listener.accept()
            number, pid = connection.recv()
            started.append(_Rank(number, pid, connection, Path(self._folder.name) / f"{number}.log"))
        self._ranks += sorted(started, key=lambda rank: rank.number)

    def _start_parent(self) -> None:
        folder = Path(self._folder.name)
        self._listener = Listener(str(folder / "socket"), family="AF_UNIX", backlog=MAX_RANKS)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks._rank", str(folder / "socket"), str(folder)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._hear() == "ready"

    def _tell(self, line: str) -> None:
        assert self._parent is not None
        assert self._parent.stdin is not None
        print(line, file=self._parent.stdin, flush=True)

    def _hear(self) -> str:
        assert self._parent is not None
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()

    def _exit_code(self, rank: _Rank) -> int:
        if rank.exit_code is None:
            self._tell(f"reap {rank.pid}")
            rank.exit_code = int(self._hear())
        return rank.exit_code

    def _store_port(self) -> int:
        """Where the ranks' key-value server listens; it lies in rank 0 and lives as long as that."""
        if self._port is None:
            _send(self._ranks[0], ("listen",))
            good, port = pickle.loads(self._ranks[0].connection.recv_bytes())
            assert good, port
            self._port = int(port)
        return self._port

    # --- answers ------------------------------------------------------------------------------

    def _answers(self, ranks: list[_Rank], timeout: float) -> dict[int, Any]:
        """By rank number: (good, what), or None for one that died; none for one that hangs."""
        answers: dict[int, Any] = {}
        waiting = {rank.connection: rank for rank in ranks}
        end = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(end - time.monotonic(), 0.0))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank.number] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank.number] = None
                if answers[rank.number] is None or not answers[rank.number][0]:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():
            os.kill(rank.pid, signal.SIGUSR1)  # it prints where it is
        return answers

    def _outcome(self, rank: _Rank, answers: dict[int, Any], start: int) -> Outcome:
        number = rank.number
        if number not in answers:
            time.sleep(_TRACE_SECONDS)  # a signal handler prints where it is: no event tells when it has
            return Outcome(number, None, None, f"hung\n{rank.output_since(start)}", time.monotonic())
        if answers[number] is None:
            code = self._exit_code(rank)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome(number, None, None, f"died: {how}\n{rank.output_since(start)}")
        good, what = answers[number]
        if good:
            return Outcome(number, what)
        trace, error, when = what
        return Outcome(number, None, error, f"raised\n{trace}{rank.output_since(start)}", when)


def _send(rank: _Rank, request: tuple[Any, ...]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has died meanwhile: reading its answer says so
        rank.connection.send_bytes(pickle.dumps(request))


def _values(outcomes: list[Outcome]) -> list[Any]:
    if any(outcome.failure is not None for outcome in outcomes):
        raise RanksFailedError(outcomes)
    return [outcome.value for outcome in outcomes]


@functools.cache
def shared_pool() -> RankPool:
    """The one pool of this test process; ends with it."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool
