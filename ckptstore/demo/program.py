"""The training program of the demonstration, and one process that runs it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import ckptstore
from ckptstore.errors import CkptstoreError

_PATH = ("examples", "gpt", "train.py")
# A launcher's word that this is a restart would make the first start of a training an error.
# One manifest file named for every store would be that of neither of the two.
_NOT_PASSED_ON = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "CKPTSTORE", "CKPTSTORE_MANIFEST")

Say = Callable[[str], None]


def find_program() -> Path:
    """``examples/gpt/train.py``: of the source tree that this package lies in, else as installed with it.

    Raises:
        CkptstoreError: it is not there, or torch is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise CkptstoreError(
            "the demo trains with torch, which is not installed", hint="pip install 'ckptstore[torch]'"
        )
    beside = Path(ckptstore.__file__).resolve().parents[1].joinpath(*_PATH)
    if beside.is_file():
        return beside
    for file in importlib.metadata.files("ckptstore") or ():
        if file.parts[-len(_PATH) :] == _PATH:
            found = Path(str(file.locate())).resolve()
            if found.is_file():
                return found
    raise CkptstoreError(
        f"the demo's training program {'/'.join(_PATH)} is not part of this installation",
        hint="run it from a source tree: make demo",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """What one training is started with; each start goes on where the last one was killed.

    Attributes:
        losses, digest: files that the program writes: one line per step; the digest of the last weights.
        more: further arguments.
    """

    program: Path
    store: Path
    run: str
    steps: int
    save_every: int
    losses: Path
    digest: Path
    more: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """As typed in a shell."""
        return [
            sys.executable,
            *(str(self.program), "--store", str(self.store), "--run", self.run),
            *("--steps", str(self.steps), "--save-every", str(self.save_every)),
            *("--losses", str(self.losses), "--final-weights-digest", str(self.digest), *self.more),
        ]

    def start(self, say: Say) -> Process:
        """Starts a process; its lines go to `say`."""
        return Process(self.command, say)

    def finish(self, say: Say) -> None:
        """Runs to the end.

        Raises:
            CkptstoreError: it did not end well.
        """
        with self.start(say) as process:
            code = process.wait()
        if code != 0:
            raise CkptstoreError(
                f"the training of run {self.run!r} ended with exit code {code}", hint="see its output"
            )


class Process:
    """A running training. Leaving it as a context kills it, if it has not ended."""

    def __init__(self, command: list[str], say: Say) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._failure: Exception | None = None
        self._reader = threading.Thread(target=self._read, args=(say,), name="ckptstore-demo", daemon=True)
        self._reader.start()

    def _read(self, say: Say) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._failure is not None:
                continue  # a full pipe would stop the training for ever
            try:
                say(line.rstrip("\n"))
            except Exception as error:  # noqa: BLE001 - raised where the caller waits
                self._failure = error

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet; raises what `say` raised."""
        if self._failure is not None:
            raise self._failure
        return self._process.poll() is None

    def wait(self) -> int:
        """Waits for the end, and for its last lines; returns the exit code. Raises what `say` raised."""
        while self._reader.is_alive():
            self._reader.join(0.2)
            if self._failure is not None:
                raise self._failure
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL: it gets no chance to finish anything."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
