"""What a process knows of itself, and its sources of time and randomness.

One object, so that tests can give it another clock.
"""

from __future__ import annotations

import dataclasses
import functools
import getpass
import os
import pathlib
import socket
import time
from collections.abc import Callable

from ckptstore.model.ids import ulid


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """Clock, randomness and sleep of one process.

    Attributes:
        now: seconds since the epoch; decides only when to be patient, never what is true.
        monotonic: seconds, for durations and deadlines.
        random_bytes: n -> n random bytes.
        sleep: seconds.
    """

    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = os.urandom
    sleep: Callable[[float], None] = time.sleep

    def new_ulid(self) -> str:
        """A fresh ULID."""
        return ulid(int(self.now() * 1000), self.random_bytes(10))

    @property
    def host(self) -> str:
        """This host's name."""
        return socket.gethostname()

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @property
    def boot_id(self) -> str:
        """Differs after each boot of the host; empty where the system does not tell."""
        return _boot_id()

    @property
    def user(self) -> str:
        """Who runs this, for people."""
        return _user()

    @property
    def author(self) -> str:
        """``user@host:pid``, for notes."""
        return f"{self.user}@{self.host}:{self.pid}"


@functools.cache
def _boot_id() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@functools.cache
def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run under a uid without a name
        return str(os.getuid())
