"""Taking note of signals: a flag and a time, without taking them from whoever handled them before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable
from types import FrameType, TracebackType
from typing import Any

from ckptstore.errors import UsageError

_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
_TO_GROUPS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def signal_of(name: str | signal.Signals) -> signal.Signals:
    """A signal that can be waited for, by its name.

    Raises:
        UsageError: there is none of that name, or no program can take note of it.
    """
    text = name.name if isinstance(name, signal.Signals) else name
    known = {found.name for found in signal.valid_signals() if isinstance(found, signal.Signals)} - {
        *_UNCATCHABLE,
        *_FAULTS,
    }
    if text in known:
        return signal.Signals[text]
    hint = f"signals are {', '.join(sorted(known))}"
    if text in _UNCATCHABLE:
        raise UsageError(f"{text} ends or stops a process at once: none can take note of it", hint=hint)
    if text in _FAULTS:
        raise UsageError(f"{text} tells of a fault in this process, after which it cannot go on", hint=hint)
    raise UsageError(f"there is no signal {text!r} here", hint=hint)


class SignalWatch:
    """Takes note of signals while it is entered; what handled them before is called after it, and restored.

    The handler takes no lock and writes nothing: it keeps a time and a count. Watches nest: an inner one
    passes its signals on to the outer one. A default action (ending the process, ``KeyboardInterrupt``) and
    "ignore" are no handlers to call: while the watch is entered they do not happen. A forked child, such as a
    worker that loads data, takes no note: SIGTERM does there what it did before, for that is how its parent
    ends it; other signals, which reach it only because they go to a whole process group, do not end it.

    Args:
        monotonic: seconds; called in the handler.

    Attributes:
        count: signals that came.
        first: the first of them, and `first_at` when it came; None before.
    """

    def __init__(self, signals: Iterable[str | signal.Signals], monotonic: Callable[[], float]) -> None:
        self._signals = tuple(dict.fromkeys(signal_of(name) for name in signals))
        self._monotonic = monotonic
        self._former: dict[int, Any] = {}
        self._pid = 0  # whose signals count; 0 outside the block
        self._was_entered = False
        self.count = 0
        self.first: signal.Signals | None = None
        self.first_at: float | None = None

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals can be handled in the main thread only",
                hint="enter the block there, around the training loop",
            )
        if self._was_entered:
            raise UsageError(
                "this block was entered before", hint="make a new one for each: run.preemption(...)"
            )
        former: dict[int, Any] = {number: signal.getsignal(number) for number in self._signals}
        foreign = [number.name for number in self._signals if former[number] is None]
        if foreign:
            raise UsageError(
                f"{', '.join(foreign)} is handled by something outside Python, which could not be put back",
                hint="choose another signal",
            )
        self._former.update(former)
        self._pid, self._was_entered = os.getpid(), True
        for number in self._signals:
            signal.signal(number, self._take_note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pid = 0
        for number in self._signals:
            # Whoever took the signal over meanwhile keeps it, and passes it on through us.
            if signal.getsignal(number) == self._take_note:
                signal.signal(number, self._former.pop(number))

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        former = self._former.get(number, signal.SIG_DFL)
        if os.getpid() == self._pid:
            if self.first_at is None:
                self.first_at = self._monotonic()
                self.first = signal.Signals(number)
            self.count += 1
            if former is signal.default_int_handler:
                return
        elif former is signal.SIG_DFL and (number == signal.SIGTERM or not self._pid):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if callable(former):
            former(number, frame)


def shield_worker(_worker: int = 0) -> None:
    """For ``DataLoader(worker_init_fn=shield_worker)``: signals to the process group do not end the worker.

    torchrun and Slurm send signals to whole process groups. A worker that ends by one raises an error in the
    training that it loads data for, before that can save. With this it ends when its parent ends it
    (SIGTERM from it; exit code 0, as of torch's own handler) or, by torch, when its parent is gone.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who sent a signal
        return
    numbers = {signal.Signals[name] for name in _TO_GROUPS}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # threads begun later inherit it
    arguments = (numbers, os.getppid())
    threading.Thread(target=_heed_parent, args=arguments, name="signals", daemon=True).start()


def _heed_parent(numbers: Collection[signal.Signals], parent: int) -> None:
    while True:
        info = signal.sigwaitinfo(numbers)
        if info.si_signo == signal.SIGTERM and info.si_pid == parent:
            os._exit(0)
