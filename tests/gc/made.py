"""Stores for the tests of collecting: a run of a few checkpoints that share most of their chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ckptstore.backend import Backend
from ckptstore.gc.collect import Report, collect
from ckptstore.model.ids import Attempt, run_key
from ckptstore.model.record import CommitRecord, IntentKind
from ckptstore.tier import commits, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Intent, Pin
from ckptstore.tier.tier import Tier
from ckptstore_memory import MemoryBackend, _places
from tests.crash._support import (
    TRAIN,
    Model,
    make_place,
    make_state,
    memory_place,
    quiet,
    records,
    store_over,
)

RUN_KEY = run_key(TRAIN)


def save_steps(place: Backend, steps: Sequence[int], run: str = TRAIN) -> dict[int, Pin]:
    """Saves these steps in one session; step -> (run key, attempt)."""
    pins: dict[int, Pin] = {}
    with store_over(place) as store, store.run(run) as training:
        for step in steps:
            made = training.save(step, make_state(step)).result()
            pins[step] = (run_key(run), made.id)
    return pins


@contextlib.contextmanager
def trained(*steps: int) -> Iterator[tuple[MemoryBackend, dict[int, Pin]]]:
    """A store with these steps saved."""
    with memory_place() as place:
        make_place(place)
        yield place, save_steps(place, steps)


def open_tier(place: Backend) -> Tier:
    return Tier.open(place, quiet())


def gc(place: Backend, *targets: Pin, **options: object) -> Report:
    """A round, as another process runs it."""
    return collect(open_tier(place), targets, reason="test", **options)  # type: ignore[arg-type]


def model_of(pins: dict[int, Pin], *steps: int, run: str = TRAIN) -> Model:
    """What must be in the store: exactly these."""
    model = Model()
    for step in steps:
        model.saved(run, step, make_state(step), pins[step][1])
    return model


def garbage(place: Backend) -> set[str]:
    """Objects that no live record names."""
    tier = open_tier(place)
    named = {key for record in records(tier) for key in Contents(tier, record).object_sizes}
    return {info.key for kind in ("chunks/", "packs/") for info in place.list(kind)} - named


def ends_as(place: Backend, pin: Pin) -> str:
    """What stands at a commit key: "commit", "gone", "void" or "nothing"."""
    found = commits.read_commit(open_tier(place), *pin)
    return "nothing" if found is None else "commit" if isinstance(found, CommitRecord) else found.kind


def announce(place: Backend, kind: IntentKind, *pins: Pin, run: str = TRAIN, step: int = 7) -> Intent:
    """An intent of somebody else, without a heartbeat."""
    tier = open_tier(place)
    attempt = str(Attempt(tier.environment.new_ulid(), step, 1))
    return Intent.announce(tier, kind, attempt, run, pins)


def age(place: MemoryBackend, intent: Intent | str, seconds: float) -> None:
    """Makes an intent look as if it had last been heard of so long ago, by the tier's clock."""
    key = layout.intent_key(intent if isinstance(intent, str) else intent.document.attempt)
    objects = _places[place._name]
    content, modified = objects[key]
    objects[key] = (content, modified - seconds)
