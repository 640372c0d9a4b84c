"""Saves without threads: the same numbers make the same calls in the same order."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


class InlinePool:
    """A :class:`ckptstore.pool.Pool` that makes each call as it is submitted."""

    threads = 1

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.error: BaseException | None = None

    @property
    def is_ending(self) -> bool:
        return self.error is not None

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.error is None:
            try:
                call(*args, **kwargs)
            except BaseException as error:
                self.error = error

    def drain(self) -> None:
        if self.error is not None:
            raise self.error

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None


class InlineLane:
    """A :class:`ckptstore.save.lane.Lane` whose jobs have ended when `submit` returns."""

    unfinished = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._pid = os.getpid()

    @property
    def is_mine(self) -> bool:
        return self._pid == os.getpid()

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def wait_below(self, _count: int, _timeout: float | None = None) -> bool:
        return True


_POOLS = (
    "ckptstore.save.write.Pool",
    "ckptstore.save.room.Pool",
    "ckptstore.save.copying.Pool",
    "ckptstore.load.fetch.Pool",
)


def lanes_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves end within the call of save, though they are captured as always."""
    monkeypatch.setattr("ckptstore.run_capture.Lane", InlineLane)


def all_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is started by saving or loading."""
    lanes_inline(monkeypatch)
    for name in _POOLS:
        monkeypatch.setattr(name, InlinePool)
