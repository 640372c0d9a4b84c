"""History against the simplest implementations that say the same."""

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.model import history
from ckptstore.model.history import Entry, Facts, derive
from ckptstore.model.record import EpochDoc, Note
from tests.model.made import QUICK, attempt, session


def facts(restorable=True, metrics=None):
    plain = derive("a", metrics or {}, (), (), doomed=False)
    return dataclasses.replace(plain, restorable=restorable, state="ok" if restorable else "damaged")


def epoch(number, resumed_from=None, rewound=False):
    return EpochDoc("r", number, session(number), "h", "b", 1, 0.0, resumed_from, rewound, "")


numbers = st.one_of(
    st.sampled_from([0, 1, 1.0, -1.5, math.nan, math.inf, -math.inf, 2, 2.5]), st.integers(-3, 3), st.floats()
)


@st.composite
def histories(draw):
    """Saves of sessions that take over from one another, zombies among them, and what they resumed from."""
    entries, epochs = [], []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        source = draw(st.sampled_from([None, "absent", *(e.checkpoint for e in entries)]))
        epochs.append(epoch(number, source, draw(st.booleans())))
        for sequence in range(1, draw(st.integers(0, 3)) + 1):
            step = draw(st.sampled_from([10, 20, 30]))
            metrics = draw(
                st.one_of(numbers, numbers, st.none()).map(lambda n: {} if n is None else {"loss": n})
            )
            own = facts(draw(st.booleans()), metrics)
            name = attempt(number, step, sequence)
            entries.append(Entry(name, name, 0, step, number, sequence, 0.0, own))
    return draw(st.permutations(entries)), draw(st.permutations(epochs))


def reference_order(entries, epochs):
    """Plays the run: events by (epoch, place); the last event of a checkpoint says where it stands."""
    events = [((e.epoch, e.sequence), e.checkpoint) for e in entries]
    events += [((doc.number, 0), doc.resumed_from) for doc in epochs]
    known = {entry.checkpoint: entry for entry in entries}
    order = []
    for _, name in sorted((place, name) for place, name in events if name in known):
        if name in order:
            order.remove(name)
        order.append(name)
    return [known[name] for name in order]


@settings(QUICK, max_examples=400)
@given(histories())
def test_order_is_that_of_the_last_event_of_each_checkpoint(drawn):
    entries, epochs = drawn
    assert history.effective_order(entries, epochs) == reference_order(entries, epochs)


@settings(QUICK, max_examples=400)
@given(histories())
def test_latest_is_the_last_restorable_in_that_order(drawn):
    entries, epochs = drawn
    ordered = [e for e in reference_order(entries, epochs) if e.facts.restorable]
    assert history.latest(entries, epochs) == (ordered[-1] if ordered else None)


@settings(QUICK, max_examples=400)
@given(histories(), st.sampled_from([10, 20, 30, 40]))
def test_a_step_is_its_last_restorable_checkpoint_else_its_last(drawn, step):
    entries, epochs = drawn
    here = [e for e in reference_order(entries, epochs) if e.step == step]
    good = [e for e in here if e.facts.restorable]
    assert history.at_step(entries, epochs, step) == (good or here or [None])[-1]


def reference_best(entries, mode):
    winner = None
    for entry in sorted(entries, key=lambda e: (e.epoch, e.sequence)):
        value = entry.facts.metrics.get("loss")
        if not entry.facts.restorable or value is None or math.isnan(value):
            continue
        if winner is None:
            winner = entry
            continue
        other = winner.facts.metrics["loss"]
        if (value <= other) if mode == "min" else (value >= other):
            winner = entry
    return winner


@settings(QUICK, max_examples=400)
@given(histories(), st.sampled_from(["min", "max"]))
def test_best_is_the_extreme_metric_nan_never_wins_and_ties_go_to_the_newer(drawn, mode):
    entries, _ = drawn
    assert history.best(entries, "loss", mode) == reference_best(entries, mode)


def test_best_tells_large_whole_numbers_apart():
    entries = [
        Entry(attempt(1, 1, n), attempt(1, 1, n), 0, n, 1, n, 0.0, facts(True, {"loss": value}))
        for n, value in enumerate([2**62 + 1, 2**62], 1)
    ]
    assert history.best(entries, "loss", "max").step == 1


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    ("losses", "winner"),
    [([math.nan, 1.0], 2), ([1.0, math.nan], 1), ([math.nan, 1.0, math.nan, 1.0], 4), ([math.nan], None)],
)
def test_nan_never_wins_wherever_it_stands(losses, winner, mode):
    entries = [
        Entry(attempt(1, n, n), attempt(1, n, n), 0, n, 1, n, 0.0, facts(True, {"loss": loss}))
        for n, loss in enumerate(losses, 1)
    ]
    assert getattr(history.best(entries, "loss", mode), "step", None) == winner


def test_best_wants_a_mode_and_has_no_default():
    with pytest.raises(UsageError, match="mode"):
        history.best([], "loss", "minimum")
    with pytest.raises(TypeError):
        history.best([], "loss")


def test_a_late_save_of_a_zombie_sorts_below_what_the_new_session_saved():
    old = Entry("a", "a", 0, 10, 1, 1, 0.0, facts())
    new = Entry("b", "b", 0, 20, 2, 1, 0.0, facts())
    zombie = Entry("c", "c", 0, 30, 1, 2, 0.0, facts())
    epochs = [epoch(1), epoch(2, "a")]
    assert [e.checkpoint for e in history.effective_order([old, new, zombie], epochs)] == ["c", "a", "b"]
    # and below what the new session went on from, even before it saved
    assert history.latest([old, zombie], epochs).checkpoint == "a"


def test_after_a_rewind_what_was_gone_back_to_is_latest_until_the_next_save():
    a, b = (Entry(n, n, 0, s, 1, s, 0.0, facts()) for n, s in (("a", 1), ("b", 2)))
    epochs = [epoch(1), epoch(2, "a", True)]
    assert history.latest([a, b], epochs) == a
    c = Entry("c", "c", 0, 3, 2, 1, 0.0, facts())
    assert history.latest([a, b, c], epochs) == c


@QUICK
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(["p", "q", "r"])),
        unique=True,
        max_size=8,
    )
)
def test_the_counting_record_is_the_highest_generation_then_the_lowest_attempt(drawn):
    entries = [Entry(name, tries, gen, 1, ord(name), 1, 0.0, facts()) for name, gen, tries in drawn]
    expected = []
    for name in sorted({entry.checkpoint for entry in entries}):
        own = [entry for entry in entries if entry.checkpoint == name]
        top = max(entry.generation for entry in own)
        expected.append(min((entry for entry in own if entry.generation == top), key=lambda e: e.attempt))
    assert history.counting(entries) == expected


# --- facts ---------------------------------------------------------------------------------------


@st.composite
def note_lists(draw):
    found = []
    for n in range(draw(st.integers(0, 8))):
        kind = draw(
            st.sampled_from(
                [
                    "metrics",
                    "tag",
                    "untag",
                    "invalid",
                    "valid",
                    "forgotten",
                    "expiring",
                    "verified",
                    "damaged",
                ]
            )
        )
        data = {
            "metrics": {"metrics": {draw(st.sampled_from("xy")): draw(st.integers(0, 3))}},
            "tag": {"tag": draw(st.sampled_from("tu"))},
            "untag": {"tag": draw(st.sampled_from("tu"))},
            "invalid": {"reason": draw(st.sampled_from(["", "bad data"]))},
            "expiring": {"expiring": draw(st.booleans())},
            "verified": {"complete": draw(st.booleans())},
            "damaged": {"reason": "flipped"},
        }.get(kind, {})
        about = draw(st.sampled_from(["mine", "other"])) if kind in ("verified", "damaged") else None
        # Two writers at once may take one number; the ULID then decides.
        number = draw(st.integers(1, 5))
        found.append(
            Note(
                "r", "c", number, session(draw(st.integers(0, 9)) * 10 + n), kind, float(n), "a", about, data
            )
        )
    return draw(st.permutations(found))


def reference_facts(notes, doomed):
    """What a person would do, reading the notes aloud in their order."""
    ordered = sorted(notes, key=lambda note: (note.number, note.ulid))
    mine = [n for n in ordered if n.kind == "damaged" or (n.kind == "verified" and n.data["complete"])]
    mine = [n for n in mine if n.attempt == "mine"]
    validity = [n for n in ordered if n.kind in ("invalid", "valid")]
    expiring = [n for n in ordered if n.kind == "expiring"]
    damaged = bool(mine) and mine[-1].kind == "damaged"
    invalid = bool(validity) and validity[-1].kind == "invalid"
    forgotten = any(n.kind == "forgotten" for n in ordered)
    tags = {"first"}
    metrics = {"x": 9}
    for note in ordered:
        if note.kind == "tag":
            tags.add(note.data["tag"])
        if note.kind == "untag":
            tags.discard(note.data["tag"])
        if note.kind == "metrics":
            metrics = {**metrics, **note.data["metrics"]}
    states = [
        ("doomed", doomed or forgotten),
        ("damaged", damaged),
        ("invalid", invalid),
        ("expiring", bool(expiring) and expiring[-1].data["expiring"]),
        ("ok", True),
    ]
    return Facts(
        state=next(name for name, applies in states if applies),
        restorable=not (doomed or forgotten or damaged or invalid),
        damaged=damaged,
        damaged_reason="flipped" if damaged else None,
        invalid_reason=(validity[-1].data["reason"] or "marked invalid") if invalid else None,
        doomed=doomed,
        forgotten=forgotten,
        verified_at=mine[-1].at if mine and mine[-1].kind == "verified" else None,
        metrics=metrics,
        tags=tuple(sorted(tags)),
    )


@settings(QUICK, max_examples=500)
@given(note_lists(), st.booleans())
def test_facts_are_what_the_notes_say_in_their_order(notes, doomed):
    assert derive("mine", {"x": 9}, ["first"], notes, doomed=doomed) == reference_facts(notes, doomed)


@QUICK
@given(st.lists(st.fractions(-5, 5), min_size=1, max_size=6))
def test_best_needs_no_order_of_its_input(values):
    entries = [
        Entry(attempt(1, n, n), attempt(1, n, n), 0, n, 1, n, 0.0, facts(True, {"m": float(Fraction(v))}))
        for n, v in enumerate(values, 1)
    ]
    assert history.best(entries, "m", "min") == history.best(entries[::-1], "m", "min")
