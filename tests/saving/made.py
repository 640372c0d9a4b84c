"""A training over a place in memory whose saves can be held: what the tests of two-phase saves share."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

import ckptstore
from ckptstore.errors import OutOfSpaceError
from ckptstore.run import Run
from ckptstore.store import Store
from ckptstore.testing import Fault, FaultBackend
from tests.crash._support import check_objects, make_place, memory_place, store_over

PATIENCE = 10.0
"""Seconds after which something that should have happened never will."""

FULL = OutOfSpaceError("the disk is full (made to)")


def state_of(step: int, count: int = 4, length: int = 30_000) -> dict[str, Any]:
    """Arrays that all differ from step to step: chunks and packs."""
    arrays = {f"w{i}": np.full(length, step * 100 + i, np.float32) for i in range(count)}
    return {"model": {**arrays, "bias": np.full(7, float(step))}, "steps": [step]}


def is_state_of(loaded: Any, step: int, count: int = 4, length: int = 30_000) -> bool:
    """Whether all of it is of that step."""
    wanted = state_of(step, count, length)
    return (
        loaded["steps"] == wanted["steps"]
        and list(loaded["model"]) == list(wanted["model"])
        and all(np.array_equal(loaded["model"][name], array) for name, array in wanted["model"].items())
    )


@dataclasses.dataclass
class Training:
    """A run, and the faults of its storage."""

    backend: FaultBackend
    store: Store
    run: Run

    def hold(self, key: str = "intents/*", *, skip: int = 0) -> threading.Event:
        """The next save waits, before it stores anything, until the event is set; later ones do not.

        Args:
            key: it waits before it puts this one; ``commits/*``: when all is stored but the record.
            skip: so many saves pass before.
        """
        event = threading.Event()
        self.backend.script.append(Fault("hang", op="put", key=key, event=event, skip=skip))
        return event

    def fail(self, key: str = "commits/*", *, skip: int = 0) -> None:
        """The disk is full when the next save puts its record, and not any more when it says so."""
        self.backend.script.append(Fault("error", op="put", key=key, error=FULL, skip=skip))

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """The disk is full for every record in the block."""
        fault = Fault("error", op="put", key="commits/*", error=FULL, times=None)
        self.backend.script.append(fault)
        try:
            yield
        finally:
            self.backend.script.remove(fault)

    def save(self, step: int, **options: Any) -> ckptstore.PendingSave:
        return self.run.save(step, state_of(step), **options)

    def other(self) -> Run:
        """The run as another process sees it."""
        return store_over(self.backend.inner).run(self.run.name)

    @property
    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.other().checkpoints()]

    def check(self) -> list[int]:
        """All that is there is whole and what was saved. Returns the steps."""
        found = self.other().checkpoints()
        for checkpoint in found:
            assert is_state_of(checkpoint.load(), checkpoint.step), f"{checkpoint} is not what was saved"
        check_objects(self.backend.inner)
        return [checkpoint.step for checkpoint in found]


@contextlib.contextmanager
def training(**options: Any) -> Iterator[Training]:
    """A training, and its end: no save is under way after the block.

    Args:
        options: of :meth:`ckptstore.Store.run`.
    """
    with memory_place() as place:
        make_place(place)
        backend = FaultBackend(place)
        store = store_over(backend)
        made = Training(backend, store, store.run("train", **options))
        try:
            yield made
        finally:
            for fault in backend.script:
                if fault.event is not None:
                    fault.event.set()
            assert made.run.wait(PATIENCE)
            store.close()
