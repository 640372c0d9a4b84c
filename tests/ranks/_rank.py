"""The processes of a RankPool: one that imports torch once, and the ranks that are forked from it.

python -m tests.ranks._rank ADDRESS FOLDER

It does what it is told on stdin, line by line: ``fork N`` starts rank N, which calls back at ADDRESS;
``reap PID`` waits for a rank's end and answers with its exit code, negative for a signal.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

# What the modules of tests import: read once here, and not once in every rank.
PRELOADED = (
    "torch",
    "torch._dynamo",  # the first step of an optimizer imports it
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "hypothesis",
    "pytest",
    "ckptstore",
    "ckptstore_local",
)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    address, folder = sys.argv[1], Path(sys.argv[2])
    for name in PRELOADED:
        importlib.import_module(name)
    print("ready", flush=True)
    while command := _read_line():
        what, _, number = command.partition(" ")
        if what == "reap":
            _, status = os.waitpid(int(number), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif os.fork() == 0:
            _be_rank(int(number), address, folder)
    os._exit(0)  # at once: what torch does at an interpreter's end takes a second


def _read_line() -> str:
    """A line of stdin; read byte by byte, so that nothing waits in a buffer that a fork would copy."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def _be_rank(number: int, address: str, folder: Path) -> NoReturn:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the tests
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    warnings.filterwarnings("error", module="ckptstore")
    connection = Client(address)
    connection.send((number, os.getpid()))
    server = _Server(connection)
    try:
        while True:
            server.answer(pickle.loads(connection.recv_bytes()))
    except EOFError:
        os._exit(0)  # the pool has closed


class _Server:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._store: Any = None
        self._failed_at: float | None = None

    def answer(self, request: tuple[Any, ...]) -> None:
        """("listen",) starts the ranks' key-value server; ("run", ...) runs a function as one rank."""
        if request[0] == "listen":
            self._send(True, self._listen())
        else:
            self._run(*request[1:])

    def _listen(self) -> int:
        distributed: Any = importlib.import_module("torch.distributed")
        self._store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def _run(self, job: int, port: int | None, rank: int, world: int, timeout: float, work: bytes) -> None:
        self._failed_at = None
        try:
            function, args = pickle.loads(work)
            if port is None:
                self._send(True, function(rank, world, *args))
            else:
                self._send(True, self._run_in_group(job, port, rank, world, timeout, function, args))
        except BaseException as error:  # whatever it is, the test must hear of it
            when = self._failed_at or time.monotonic()
            self._send(False, (traceback.format_exc(), _picklable(error), when))

    def _run_in_group(
        self,
        job: int,
        port: int,
        rank: int,
        world: int,
        timeout: float,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:
        distributed: Any = importlib.import_module("torch.distributed")
        if self._store is None:
            self._store = distributed.TCPStore("127.0.0.1", port, is_master=False)
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore(f"job{job}", self._store),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        try:
            return function(rank, world, *args)
        except BaseException:
            self._failed_at = time.monotonic()  # before the others hear that their group is gone
            raise
        finally:
            distributed.destroy_process_group()

    def _send(self, good: bool, what: Any) -> None:
        # Not `send`: its pickler would hand tensors over in shared memory.
        self._connection.send_bytes(pickle.dumps((good, what)))


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


if __name__ == "__main__":
    main()
