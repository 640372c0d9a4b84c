"""Python's collector of reference cycles, held off while many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Holders:
    """How many hold it off, and whether it was on before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_enabled = False

    def enter(self) -> None:
        with self.lock:
            if not self.count:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.count += 1

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if not self.count and self.was_enabled:
                gc.enable()


_of_process = [_Holders()]


def _begin_anew() -> None:
    """In a forked child: the threads that held it off are not there."""
    (before,) = _of_process
    _of_process[:] = [_Holders()]
    if before.count and before.was_enabled:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def held_off() -> Iterator[None]:
    """No collection begins by itself meanwhile, in any thread; also a decorator.

    A full one looks at every object of the process, for 0.2 s and more where torch is imported, and the
    objects that describe 10,000 tensors set off one or two. It would find nothing: they are all in use. What
    the program has left behind is collected soon after, so this is for what takes milliseconds.
    """
    (holders,) = _of_process
    holders.enter()
    try:
        yield
    finally:
        holders.leave()
