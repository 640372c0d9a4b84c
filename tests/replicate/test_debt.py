"""What a tier is owed, by the records of all tiers."""

from __future__ import annotations

import dataclasses

from ckptstore.model.history import Entry, derive
from ckptstore.model.record import EpochDoc, Note
from ckptstore.replicate.debt import debt

HOT, WARM, COLD = "hot", "warm", "cold"


def entry(step, *, kind=None, generation=0, doomed=False):
    checkpoint = f"c{step}"
    notes = []
    if kind is not None:
        notes.append(Note("r", checkpoint, 1, "u", kind, 0.0, "me", f"a{step}", {"reason": "why"}))
    facts = derive(f"a{step}", {}, (), notes, doomed=doomed)
    return Entry(checkpoint, f"a{step}", generation, step, 1, step, float(step), facts)


def tier(*entries):
    return {found.checkpoint: found for found in entries}


def said(owed):
    return [(item.entry.step, item.source, item.why) for item in owed]


def test_newest_first_from_the_hottest_tier_that_has_it():
    replicas = {HOT: tier(entry(2), entry(3)), WARM: tier(entry(1), entry(2)), COLD: tier()}
    assert said(debt(replicas, [HOT, WARM], COLD, [])) == [(3, HOT, ""), (2, HOT, ""), (1, WARM, "")]
    assert said(debt(replicas, [HOT], WARM, [])) == [(3, HOT, "")]
    assert said(debt({HOT: tier(entry(1))}, [HOT], COLD, [])) == [(1, HOT, "")]


def test_what_was_gone_back_to_is_newest():
    epoch = EpochDoc("r", 2, "s", "h", "b", 1, 0.0, "c1", True, "")
    replicas = {HOT: tier(entry(1), entry(2)), COLD: tier()}
    assert [item.entry.step for item in debt(replicas, [HOT], COLD, [epoch])] == [1, 2]


def test_damaged_and_invalid_ones_are_named_and_doomed_ones_are_not():
    bad = [entry(1, kind="damaged"), entry(2, kind="invalid"), entry(3, kind="forgotten")]
    replicas = {HOT: tier(*bad, entry(4, doomed=True)), COLD: tier()}
    assert said(debt(replicas, [HOT], COLD, [])) == [(2, HOT, "invalid: why"), (1, HOT, "damaged: why")]


def test_a_good_copy_of_a_colder_tier_stands_in_for_a_damaged_one():
    replicas = {HOT: tier(entry(1, kind="damaged")), WARM: tier(entry(1)), COLD: tier()}
    assert said(debt(replicas, [HOT, WARM], COLD, [])) == [(1, WARM, "")]


def test_a_later_generation_is_owed_and_an_earlier_one_is_not():
    later, earlier = entry(1, generation=2), entry(1, generation=1)
    assert said(debt({HOT: tier(later), COLD: tier(earlier)}, [HOT], COLD, [])) == [(1, HOT, "")]
    assert said(debt({HOT: tier(earlier), COLD: tier(later)}, [HOT], COLD, [])) == []


def test_what_its_retention_would_drop_is_passed_over():
    seen = []

    def last_two(entries):
        seen.append([found.step for found in entries])
        return {found.checkpoint for found in entries[-2:]}

    replicas = {HOT: tier(*map(entry, (1, 2, 3))), COLD: tier(entry(4))}
    owed = debt(replicas, [HOT], COLD, [], last_two)
    assert said(owed)[0] == (3, HOT, "")
    assert [item.why for item in owed[1:]] == ["superseded: its retention keeps newer ones"] * 2
    assert seen == [[1, 2, 3, 4]]
    assert dataclasses.is_dataclass(owed[0])
