"""The protocol of pins, dooms and records, all interleavings of small models, one per property (DESIGN 8).

For each rule there is a mutation, and the search must find a loss with it; without, none.
"""

from __future__ import annotations

import doctest

import pytest

import ckptstore.testing.protocol
from ckptstore.testing.protocol import (
    Collector,
    Found,
    Network,
    Process,
    Reader,
    Saver,
    Trimmer,
    World,
    search,
)

QUIET = [Collector(name, strays=True, alone=True) for name in ("p", "q")]
"""Two full rounds after everybody else has stopped."""


def two() -> World:
    """`a` holds 1 and 2; `z` was saved later and shares 2."""
    return World.of(a={"1.a", "2.a"}, z={"2.a"})


def three() -> World:
    """`a` and `y` share 1; `z` has its own."""
    return World.of(a={"1.a"}, y={"1.a"}, z={"2.z"})


def told(found: Found) -> str:
    return f"{found.loss}: " + "; ".join(found.steps)


# --- with all rules -----------------------------------------------------------------------------------

SAVER = Saver("b", "a", "13")
EMPTY_HANDED = Saver("b", "a", "1")
"""It owns no object: it reuses all."""

SOUND: dict[str, tuple[World, list[Process]]] = {
    "a saver": (two(), [SAVER, Collector("g", "a")]),
    "a saver, a full round": (two(), [SAVER, Collector("g", "a", strays=True)]),
    "a saver that owns nothing": (two(), [EMPTY_HANDED, Collector("g", "a")]),
    "a saver that owns nothing, a full round": (two(), [EMPTY_HANDED, Collector("g", "a", strays=True)]),
    "a saver that is never silent": (two(), [SAVER, Collector("g", "a", patient=True)]),
    "a repeated request": (two(), [SAVER, Collector("g", "a", strays=True), Network("n")]),
    "two repeated requests": (two(), [SAVER, Collector("g", "a"), Network("n"), Network("m")]),
    "a saver and a reader": (two(), [SAVER, Reader("r", "a"), Collector("g", "a", strays=True)]),
    "two savers": (two(), [EMPTY_HANDED, Saver("c", "a", "1"), Collector("g", "a")]),
    "a saver of what another saves": (two(), [SAVER, Saver("c", "z", "24"), Collector("g", "a")]),
    "two collectors": (two(), [EMPTY_HANDED, Collector("g", "a"), Collector("h", "a")]),
    "a collector that takes up": (two(), [SAVER, Collector("g", "a"), Collector("h", strays=True)]),
    "two collectors that want each other's last": (two(), [Collector("g", "a"), Collector("h", "z")]),
    "a trim": (two(), [Trimmer("t", "a", "1"), Reader("r", "a"), SAVER, Collector("g")]),
    "a trim of what is going": (two(), [Trimmer("t", "a", "1"), Collector("g", "a", strays=True)]),
    "a trim killed anywhere": (two(), [Trimmer("t", "a", "1"), Collector("g"), Collector("h", strays=True)]),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_interleaving_loses_anything(name: str) -> None:
    start, processes = SOUND[name]
    found = search(start, processes)
    assert found.loss is None, told(found)


@pytest.mark.parametrize(
    "name",
    [
        "a saver, a full round",
        "a saver that owns nothing, a full round",
        "a repeated request",
        "a trim of what is going",
        "two collectors that want each other's last",
    ],
)
def test_two_quiet_rounds_leave_no_garbage_wherever_all_stop(name: str) -> None:
    """Save for the record that two collectors doomed at once: it stays, and is all that there is."""
    start, processes = SOUND[name]
    found = search(start, processes, rounds=QUIET)
    assert found.loss is None or (name.startswith("two") and found.loss.startswith("['doom")), told(found)


def test_a_listing_that_takes_its_time_is_not_fooled() -> None:
    """While `h` lists, `b` commits behind its back, and then `g` collects what `b` had pinned."""
    behind = [Saver("b", "y", "1"), Collector("g", "y", patient=True)]
    found = search(three(), [*behind, Collector("h", "a", order="bayz", patient=True)])
    assert found.loss is None, told(found)
    assert search(three(), [*behind, Collector("h", "a", {"one look"}, order="bayz")]).loss


# --- with one rule less ---------------------------------------------------------------------------------


@pytest.mark.parametrize("digests", ["13", "1"])
@pytest.mark.parametrize(
    "mutation", ["dooms before intent", "dooms not read", "record not read again", "reuse because it exists"]
)
def test_a_saver_without_a_rule_loses(mutation: str, digests: str) -> None:
    saver = Saver("b", "a", digests, {mutation}, known={"1.a", "2.a"})
    assert search(two(), [saver, Collector("g", "a")]).loss


@pytest.mark.parametrize("digests", ["13", "1"])
@pytest.mark.parametrize(
    "mutation",
    [
        "intents not listed again",
        "records before intents",
        "time alone",
        "no look after the fence",
        "shared objects not asked for",
        "objects before GONE",
        "doom removed early",
    ],
)
def test_a_collector_without_a_rule_loses(mutation: str, digests: str) -> None:
    assert search(two(), [Saver("b", "a", digests), Collector("g", "a", {mutation})]).loss


def test_who_is_not_silent_is_waited_for() -> None:
    mutated = Collector("g", "a", {"pins not asked for"}, patient=True)
    for holder in (SAVER, EMPTY_HANDED, Reader("r", "a")):
        assert search(two(), [holder, mutated]).loss


def test_a_silent_saver_that_owns_no_object_must_be_fenced_too() -> None:
    mutated = Collector("g", "a", {"only owners fenced"})
    assert search(two(), [EMPTY_HANDED, mutated]).loss
    assert search(two(), [SAVER, Collector("g", "a", {"only owners fenced"}, strays=True)]).loss


def test_keys_must_say_who_wrote_them() -> None:
    """What a saver writes anew, for its pin is doomed, must not be what the round deletes."""
    bare = World.of(a={"1", "2"}, z={"2"})
    assert search(bare, [Saver("b", "a", "1", {"bare keys"}), Collector("g", "a")]).loss


def test_with_bare_keys_a_delete_that_comes_late_loses_even_after_everything_has_ended() -> None:
    world = World.of(a={"1"}, z={"2"})
    (round_,) = [Collector("g", "a")]
    while round_.at is not None:
        _, world, round_ = next(round_.moves(world))
    saver = Saver("b", "z", "1", {"bare keys"})
    assert search(world, [saver]).loss is None
    assert search(world, [saver, Network("n")]).loss


def test_a_doom_that_another_round_has_seen_must_not_be_taken_back() -> None:
    taker = Collector("g", "", {"doom taken back"}, patient=True)
    assert search(two(), [Reader("r", "a"), EMPTY_HANDED, Collector("h", "a", patient=True), taker]).loss


def test_void_must_stay() -> None:
    assert search(two(), [SAVER, Collector("g", "a", {"VOID removed"})]).loss


def test_gone_must_stay() -> None:
    """A commit that the network repeats must find GONE there."""
    world = two()
    world.sent.add(("commit", "a", frozenset({"1.a", "2.a"})))
    assert search(world, [Network("n"), Collector("g", "a")]).loss is None
    assert search(world, [Network("n"), Collector("g", "a", {"GONE removed"})]).loss


def test_a_trim_never_deletes_under_a_live_record() -> None:
    assert search(two(), [Trimmer("t", "a", "1", {"trim in place"}), Reader("r", "a")]).loss


def test_guards_are_asked_again() -> None:
    found = search(two(), [Collector("g", "a", {"guard not asked again"}), Collector("h", "z")])
    assert found.loss == "no record is left" or (found.loss or "").startswith("z names"), told(found)


def test_what_has_no_end_yet_is_no_stray() -> None:
    assert search(
        two(), [SAVER, Collector("g", "a", {"strays without an end"}, strays=True, patient=True)]
    ).loss
    assert search(two(), [SAVER, Collector("g", "a", strays=True, patient=True)]).loss is None


def test_the_example_in_the_documentation_is_true() -> None:
    assert doctest.testmod(ckptstore.testing.protocol).attempted == 3
    assert not doctest.testmod(ckptstore.testing.protocol).failed
