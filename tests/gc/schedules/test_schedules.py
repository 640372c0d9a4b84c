"""Real savers, readers and rounds through drawn schedules: every call is a point to go on, die or stall at.

A failure names its seed and prints its schedule; the seed makes it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from ckptstore.errors import CkptstoreError
from ckptstore.testing.faults import SimulatedCrash
from ckptstore.tier.intents import Pin
from ckptstore_memory import MemoryBackend
from tests.crash._support import copy_of, make_place, memory_place
from tests.gc.schedules.made import (
    Scheduler,
    Steady,
    Stepped,
    Told,
    check,
    full_round,
    light_round,
    read,
    save,
    threads_away,
    trim_small,
)

SEEDS = 25
Past = tuple[MemoryBackend, dict[int, Pin]]
"""A store, and (run key, attempt) of the states that are in it."""

IN_ORDER = {"r": [5, 102, 103], "another": [203, 204]}


@pytest.fixture(scope="module")
def past() -> Iterator[Past]:
    """Run r: steps 2 and 3, which share a chunk, and, in a later session, step 5."""
    with pytest.MonkeyPatch.context() as monkeypatch, memory_place() as place:
        threads_away(monkeypatch)
        make_place(place)
        told = Told()
        save(Steady(place), told, "r", [2, 3], [])
        save(Steady(place), told, "r", [5], [])
        (run_key,) = {info.key.split("/")[1] for info in place.list("commits/")}
        yield place, {number: (run_key, attempt) for attempt, number in told.committed.items()}


def drawn(
    past: Past,
    seed: int,
    who: Sequence[str] = (),
    *,
    crashes: float | None = None,
    stalls: float | None = None,
) -> Scheduler:
    """One schedule of some savers, readers and rounds, and what must hold after it.

    Args:
        who: these and no others.
        crashes, stalls: as for the scheduler; drawn unless given.
    """
    before, pins = past
    draw = random.Random(seed)
    scheduler = Scheduler(
        seed,
        crashes=draw.choice([0, 0, 0.003]) if crashes is None else crashes,
        stalls=draw.choice([0, 0, 0.005]) if stalls is None else stalls,
    )
    told = Told()
    with copy_of(before) as place:

        def over(name: str) -> Stepped:
            return Stepped(place, scheduler, name)

        savers: dict[str, Callable[[], object]] = {
            "saver": lambda: save(over("saver"), told, "r", [102, 103], [("r", 2)]),
            "other saver": lambda: save(over("other saver"), told, "another", [203, 204], [("r", 3)]),
        }
        rounds: dict[str, Callable[[], object]] = {
            "light": lambda: light_round(over("light"), pins[2]),
            "light too": lambda: light_round(over("light too"), pins[3], pins[2]),
            "full": lambda: full_round(over("full"), 1),
            "full too": lambda: full_round(over("full too"), 2),
        }
        others: dict[str, Callable[[], object]] = {
            "reader": lambda: read(over("reader"), told, "r", 2),
            "trimmer": lambda: trim_small(over("trimmer"), pins[2]),
        }
        if not who:
            who = [
                *draw.sample(sorted(savers), draw.randint(1, 2)),
                *draw.sample(sorted(rounds), draw.randint(1, 2)),
            ]
            who += draw.choice([[], [], ["reader"], ["trimmer"], ["reader", "trimmer"]])
        works = {name: work for name, work in (savers | rounds | others).items() if name in who}
        try:
            errors = scheduler.run(works)
            strange = {
                name: error
                for name, error in errors.items()
                if not isinstance(error, (CkptstoreError, SimulatedCrash))
            }
            assert not strange
            check(
                place, told, [later_than(run, told) for run in IN_ORDER if run == "r" or told_of(run, told)]
            )
        except BaseException as error:
            error.add_note(f"seed {seed}: {scheduler}")
            raise
    return scheduler


def told_of(run: str, told: Told) -> list[int]:
    return [number for number in IN_ORDER[run] if number in told.committed.values()]


def later_than(run: str, told: Told) -> set[int]:
    """The newest state of a run that is known to be committed, and later ones, which may be."""
    order = IN_ORDER[run]
    newest = (told_of(run, told) or order[:1])[-1]
    return set(order[order.index(newest) :])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    threads_away(monkeypatch)


@pytest.mark.parametrize("part", range(4))
def test_whatever_the_schedule_nothing_is_lost(past: Past, alone: None, part: int) -> None:
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        drawn(past, seed)
