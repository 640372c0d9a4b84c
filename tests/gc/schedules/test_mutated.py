"""The same schedules over code from which one rule is taken out: they must find the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

import ckptstore.gc.collect
import ckptstore.gc.rounds
from ckptstore.errors import CkptstoreError
from ckptstore.gc import holders, listing, standing
from ckptstore.gc.listing import Announced
from ckptstore.gc.standing import Standing
from ckptstore.gc.strays import Strays
from ckptstore.model.record import CommitEnd, CommitRecord, IntentKind
from ckptstore.tier import commits, layout
from ckptstore.tier.intents import Intent, Pin
from ckptstore.tier.tier import Tier
from tests.gc.schedules import made, test_schedules
from tests.gc.schedules.test_schedules import Past, alone, drawn, past

__all__ = ["alone", "past"]

SEEDS = 300


def dooms_before_the_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = Intent.announce
    alive: dict[str, list[Pin]] = {}

    def mutated(
        tier: Tier, kind: IntentKind, attempt: str, run: str, pins: Iterable[Pin], reason: str = ""
    ) -> Intent:
        pinned = list(pins)
        alive[attempt] = [pin for pin in pinned if not tier.exists(layout.doom_key(*pin))]
        return announce(tier, kind, attempt, run, pinned, reason)

    def surviving(self: Intent) -> dict[Pin, CommitRecord]:
        read = {pin: commits.read_commit(self._tier, *pin) for pin in alive[self.document.attempt]}
        return {pin: record for pin, record in read.items() if isinstance(record, CommitRecord)}

    monkeypatch.setattr(Intent, "announce", staticmethod(mutated))
    monkeypatch.setattr(Intent, "surviving", surviving)


def records_before_intents(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutated(
        tier: Tier, _now: float, *, before: Mapping[Pin, bool], known: dict[Pin, CommitRecord], **_: Any
    ) -> Standing:
        keys = listing.list_commit_keys(tier, before)
        listing.read_records(tier, keys, known)
        return Standing(listing.read_intents(tier), keys, [])

    everywhere(monkeypatch, "stand", mutated)


def time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch, "fence", lambda *_args: [])
    sound = holders.holders

    def mutated(
        tier: Tier, intents: Iterable[Announced], keys: Mapping[Pin, bool], now: float, **_: Any
    ) -> dict[Pin, str]:
        return sound(tier, intents, keys, now, count_silent=False)

    everywhere(monkeypatch, "holders", mutated)


def only_owners_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = listing.is_decided

    def mutated(tier: Tier, announced: Announced, keys: Mapping[Pin, bool]) -> bool:
        mine = f".{announced.document.attempt}."
        owns = any(mine in info.key for kind in ("chunks/", "packs/") for info in tier.listing(kind))
        return not owns or sound(tier, announced, keys)

    monkeypatch.setattr(listing, "is_decided", mutated)


def pins_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch, "holders", lambda *_args, **_options: {})


def shared_objects_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckptstore.gc.collect, "subtract", lambda *_args: None)


def void_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = made.light_round

    def mutated(backend: made.Process, *targets: Pin) -> Any:
        report = sound(backend, *targets)
        tier = Tier.open(backend, backend.environment)
        for pin in listing.list_commit_keys(tier):
            end = commits.read_commit(tier, *pin)
            if isinstance(end, CommitEnd) and end.kind == "void":
                backend.delete([layout.commit_key(*pin)])
        return report

    monkeypatch.setattr(test_schedules, "light_round", mutated)


def strays_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strays, "_is_over", lambda self, attempt: not self._has_record.get(attempt))


def everywhere(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    for module in (ckptstore.gc.collect, ckptstore.gc.rounds, holders, standing):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)


BOTH = ("other saver", "light too")
MUTATIONS: list[tuple[Any, Sequence[str], float, int]] = [
    (dooms_before_the_intent, BOTH, 0, 256),
    (records_before_intents, BOTH, 0, 51),
    (pins_not_asked_for, BOTH, 0, 4),
    (time_alone, BOTH, 0.02, 0),
    (only_owners_fenced, BOTH, 0.02, 0),
    (void_removed, BOTH, 0.02, 141),
    (shared_objects_not_asked_for, ["light"], 0, 0),
    (strays_without_an_end, ["other saver", "full"], 0, 11),
]
"""Rule that is taken out, who takes part, how often they stall, and a seed that was found, to begin with."""


@pytest.mark.parametrize(
    ("mutate", "who", "stalls", "first"), MUTATIONS, ids=lambda value: getattr(value, "__name__", "")
)
def test_without_a_rule_a_schedule_loses(
    past: Past, alone: None, mutate: Any, who: Sequence[str], stalls: float, first: int
) -> None:
    for seed in range(first, first + SEEDS):
        with pytest.MonkeyPatch.context() as monkeypatch:
            mutate(monkeypatch)
            with contextlib.suppress(CkptstoreError):  # of a round afterwards, which meets what is damaged
                try:
                    drawn(past, seed, who, stalls=stalls, crashes=0)
                except AssertionError as error:
                    if " names " in str(error):
                        print(f"{mutate.__name__}: seed {seed}: {error}")
                        return
    pytest.fail(f"{SEEDS} schedules lose nothing")
