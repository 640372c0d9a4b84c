"""Saves without threads: the same numbers make the same calls in the same order."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


class InlinePool:
    """A :class:`ckptstore.pool.Pool` that makes each call as it is submitted."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._error: BaseException | None = None

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._error is None:
            try:
                call(*args, **kwargs)
            except BaseException as error:
                self._error = error

    def drain(self) -> None:
        if self._error is not None:
            raise self._error

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
