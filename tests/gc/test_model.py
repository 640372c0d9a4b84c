"""The protocol of pins, dooms and records as a small model, all interleavings (DESIGN part 8).

Savers, a reader and collectors are generators over one store in memory; each `yield` is a point where any
other process may run, or this one may crash for good. The search visits every reachable order of steps. For
each rule there is a mutation, and the search must find a loss with it; without, none.

Keys carry the attempt that wrote them, as in the store: attempt `b` reuses `a`'s object by naming it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

import pytest

Process = Callable[["World"], Iterator[None]]


@dataclasses.dataclass
class World:
    """The tier: documents and objects, as sets and maps of short names.

    Attributes:
        commits: attempt -> keys that its record names, or "VOID" or "GONE".
        intents: attempt -> the attempt that it pins, and whether it is a saver's.
        silent: savers that the collector may take for gone (they may only be slow).
        lost: what has gone wrong.
    """

    commits: dict[str, frozenset[str] | str]
    objects: set[str]
    intents: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    dooms: set[str] = dataclasses.field(default_factory=set)
    plans: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    lost: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        for attempt, record in self.commits.items():
            if not isinstance(record, str) and not record <= self.objects:
                self.lost.append(f"{attempt} names {sorted(record - self.objects)}")


# --- processes ----------------------------------------------------------------------------------


def saver(rules: set[str], attempt: str = "b", base: str = "a", own: str | None = "b1") -> Process:
    """Pins `base`, reuses its objects if the pin survives, commits."""

    def run(world: World) -> Iterator[None]:
        def announce() -> None:
            world.intents[attempt] = (base, True)

        def read_doom() -> bool:
            return base in world.dooms

        if "doom before intent" in rules:
            doomed = read_doom()
            yield
            announce()
            yield
        else:
            announce()
            yield
            doomed = read_doom()
            yield
        record = world.commits.get(base)
        if "reuse because it exists" in rules:
            reused = frozenset({"a1"} & world.objects)
        elif doomed and "ignores dooms" not in rules:
            reused = frozenset()
        elif "record not re-read" in rules:
            reused = frozenset({"a1"})
        else:
            reused = frozenset() if record is None or isinstance(record, str) else record
        yield
        named = set(reused)
        if own is not None:
            world.objects.add(own)
            named.add(own)
            yield
        if attempt not in world.commits:  # create-if-absent
            world.commits[attempt] = frozenset(named)
        yield
        world.intents.pop(attempt, None)

    return run


def reader(results: list[str]) -> Process:
    """Reads `a`; whatever happens it has all of it, or says that it is gone."""

    def run(world: World) -> Iterator[None]:
        world.intents["r"] = ("a", False)
        yield
        if "a" in world.dooms:
            world.intents.pop("r")
            return
        yield
        record = world.commits["a"]
        if isinstance(record, str):
            world.intents.pop("r")
            return
        for key in sorted(record):
            yield
            if key not in world.objects:
                world.lost.append(f"the reader of a, which it holds, lost {key}")
        world.intents.pop("r")

    return run


def collector(rules: set[str], targets: frozenset[str] = frozenset("a"), name: str = "g") -> Process:
    """A round on given records."""

    def run(world: World) -> Iterator[None]:
        intents: dict[str, tuple[str, bool]] = {}
        listed: dict[str, frozenset[str] | str] = {}

        def list_intents() -> None:
            intents.clear()
            intents.update(world.intents)

        def list_records() -> None:
            listed.clear()
            listed.update(world.commits)

        unfinished = dict(world.plans)
        if "intents not listed again" in rules:
            list_intents()
            yield
        for target in sorted(targets):
            if not isinstance(world.commits[target], str):
                world.dooms.add(target)
                yield
        doomed = set(world.dooms)
        yield
        if "records before intents" in rules:
            list_records()
            yield
            list_intents()
            yield
        else:
            if "intents not listed again" not in rules:
                list_intents()
                yield
            list_records()
            yield
        fenced = False
        for attempt, (pin, is_saver) in sorted(intents.items()):
            if pin in doomed and is_saver and attempt not in listed and "patient" not in rules:
                if "time alone" in rules:
                    intents.pop(attempt)
                    continue
                if "only owners are fenced" in rules and not any(k[0] == attempt for k in world.objects):
                    intents.pop(attempt)
                    continue
                if attempt not in world.commits:  # it has been silent for long: VOID, if absent
                    world.commits[attempt] = "VOID"
                fenced = True
                yield
        if fenced and "no listing after the fence" not in rules:
            list_records()
            yield
        pinned = {
            pin for attempt, (pin, is_saver) in intents.items() if not is_saver or attempt not in listed
        }
        if fenced and "no listing after the fence" in rules:
            pinned = {pin for pin, is_saver in intents.values() if not is_saver}
        going = {d for d in doomed if not isinstance(listed[d], str)}
        if "pins are not asked for" not in rules:
            going -= pinned
        named = {key for d in going for key in listed[d]} | {k for keys in unfinished.values() for k in keys}
        alive = {key for a, r in listed.items() if a not in going and not isinstance(r, str) for key in r}
        garbage = frozenset(named if "shared objects are not asked for" in rules else named - alive)
        world.plans[name] = garbage
        yield
        if "objects before GONE" in rules:
            for key in sorted(garbage):
                world.objects.discard(key)
                yield
        if "doom taken back" in rules:
            world.dooms -= going
            yield
        for record in sorted(going):
            world.commits[record] = "GONE"
            yield
            if "GONE removed" in rules:
                del world.commits[record]
                yield
        for key in sorted(garbage):
            world.objects.discard(key)
            yield
        for record in sorted(doomed):
            if isinstance(world.commits.get(record, "GONE"), str):
                world.dooms.discard(record)
                yield
        for plan in (name, *unfinished):
            world.plans.pop(plan, None)

    return run


def early_doom_remover(world: World) -> Iterator[None]:
    """Somebody who tidies dooms whose record is still there."""
    yield
    world.dooms.clear()
    yield


def void_remover(world: World) -> Iterator[None]:
    """Somebody who tidies VOIDs away."""
    for attempt in [a for a, r in world.commits.items() if r == "VOID"]:
        del world.commits[attempt]
    yield


# --- the search -----------------------------------------------------------------------------------


def losses(processes: list[Process], *, crashes: bool = True, limit: int = 400_000) -> list[str]:
    """The first loss that any interleaving leads to; empty if there is none.

    Depth first over schedules, each replayed from the start; states that were seen are not entered again. A
    process that crashes is one that is never scheduled any more: a schedule's every prefix is checked.
    """
    seen: set[object] = set()
    stack: list[tuple[int, ...]] = [()]
    while stack:
        schedule = stack.pop()
        world = start()
        running = [process(world) for process in processes]
        steps = [0] * len(running)
        alive = [True] * len(running)
        for turn in schedule:
            try:
                next(running[turn])
                steps[turn] += 1
            except StopIteration:
                alive[turn] = False
        world.check()
        if world.lost:
            return [world.lost[0], str(schedule)]
        state = (
            tuple(steps),
            tuple(alive),
            tuple(
                sorted((k, v if isinstance(v, str) else tuple(sorted(v))) for k, v in world.commits.items())
            ),
            tuple(sorted(world.objects)),
            tuple(sorted(world.intents.items())),
            tuple(sorted(world.dooms)),
            tuple(repr(sorted(locals_of(process).items())) for process in running),
        )
        if state in seen:
            continue
        seen.add(state)
        assert len(seen) < limit, "the model has grown too large for a test"
        stack.extend((*schedule, turn) for turn in range(len(running)) if alive[turn])
    return []


def locals_of(process: Iterator[None]) -> dict[str, object]:
    """What a process remembers, for telling states apart."""
    frame = getattr(process, "gi_frame", None)
    if frame is None:
        return {}
    skipped = ("world", "rules", "list_intents", "list_records", "announce", "read_doom")
    return {
        name: sorted(value, key=repr) if isinstance(value, (set, frozenset)) else copy.copy(value)
        for name, value in frame.f_locals.items()
        if name not in skipped
    }


def start() -> World:
    """`a` holds a1 and a2; `z` was saved later and shares a2."""
    return World({"a": frozenset({"a1", "a2"}), "z": frozenset({"a2"})}, {"a1", "a2"})


def test_no_interleaving_loses_anything() -> None:
    for own in ("b1", None):
        assert not losses([saver(set(), own=own), collector(set())])
    assert not losses([reader([]), collector(set())])
    assert not losses([saver(set()), reader([]), collector(set())])


def test_two_collectors_do_not_harm_each_other() -> None:
    assert not losses([collector(set(), name="g"), collector(set(), name="h"), saver(set(), own=None)])


def test_two_savers_do_not_confuse_a_collector() -> None:
    assert not losses([saver(set(), own=None), saver(set(), "c", own=None), collector(set())])


def test_a_later_round_takes_up_what_a_crashed_one_left() -> None:
    """The first collector may stop anywhere; the second knows of its dooms and plans only."""
    assert not losses([collector(set()), collector(set(), frozenset(), "h"), saver(set())])


@pytest.mark.parametrize("own", ["b1", None])
@pytest.mark.parametrize(
    ("savers", "collectors"),
    [
        ("doom before intent", None),
        ("ignores dooms", None),
        ("reuse because it exists", None),
        ("record not re-read", None),
        (None, "intents not listed again"),
        (None, "records before intents"),
        (None, "time alone"),
        (None, "no listing after the fence"),
        (None, "shared objects are not asked for"),
        (None, "objects before GONE"),
        (None, "doom taken back"),
    ],
)
def test_without_a_rule_there_is_a_loss(savers: str | None, collectors: str | None, own: str | None) -> None:
    found = losses([saver({savers or ""}, own=own), collector({collectors or ""})])
    assert found, f"nothing is lost without the rule: {savers or collectors}"


@pytest.mark.parametrize("own", ["b1", None])
def test_who_is_not_silent_is_waited_for(own: str | None) -> None:
    assert not losses([saver(set(), own=own), collector({"patient"})])
    assert losses([saver(set(), own=own), collector({"patient", "pins are not asked for"})])
    assert losses([reader([]), collector({"pins are not asked for"})])


def test_a_silent_saver_that_owns_no_object_must_be_fenced_too() -> None:
    assert losses([saver(set(), own=None), collector({"only owners are fenced"})])


@pytest.mark.parametrize("remover", [early_doom_remover, void_remover])
def test_dooms_and_voids_must_stay(remover: Process) -> None:
    assert losses([saver(set()), collector(set()), remover])


def test_gone_must_stay() -> None:
    """A saver whose record is collected while its own PUT is repeated by the network must find GONE there."""

    def late_put(world: World) -> Iterator[None]:
        record = frozenset({"a1", "a2"})
        yield
        if "a" not in world.commits:
            world.commits["a"] = record
        yield

    assert not losses([late_put, collector(set())])
    assert losses([late_put, collector({"GONE removed"})])
