"""The columns say exactly what model.history says over the same documents, in whatever order they came."""

import dataclasses
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.manifest import Manifest
from ckptstore.model import history
from ckptstore.model.ids import ulid
from ckptstore.model.record import CommitEnd, Note
from tests.manifest.made import (
    KEY,
    NOON,
    RUN,
    STORE,
    TIER,
    TIER2,
    attempt_id,
    make_epoch,
    make_record,
    put,
    put_basics,
    put_note,
)

NUMBERS = st.one_of(
    st.floats(allow_nan=False), st.just(float("nan")), st.integers(-(2**70), 2**70), st.booleans().map(int)
)
METRICS = st.dictionaries(st.sampled_from(["loss", "acc", "ü'\""]), NUMBERS, max_size=3)
TAGS = st.sampled_from(["best", "paper", "ä/'"])


@st.composite
def documents(draw):
    sessions = draw(st.integers(1, 3))
    records = []
    for session in range(1, sessions + 1):
        for sequence, step in enumerate(draw(st.lists(st.integers(-5, 5), max_size=3, unique=True)), start=1):
            record = make_record(step, session=session, sequence=sequence, metrics=draw(METRICS))
            records.append(
                dataclasses.replace(record, tags=tuple(draw(st.lists(TAGS, max_size=2, unique=True))))
            )
    for record in list(records):
        for generation in range(1, draw(st.integers(1, 2))):
            attempt = attempt_id(record.step, session=record.epoch, number=generation)
            records.append(dataclasses.replace(record, attempt=attempt, generation=draw(st.integers(0, 1))))
    epochs = [
        make_epoch(n, resumed_from=draw(st.sampled_from([None, *(r.checkpoint for r in records)])))
        for n in range(1, sessions + 2)
    ]
    notes = []
    for i in range(draw(st.integers(0, 8)) if records else 0):
        record = draw(st.sampled_from(records))
        kind, data = draw(
            st.one_of(
                METRICS.map(lambda m: ("metrics", {"metrics": m})),
                st.tuples(st.sampled_from(["tag", "untag"]), TAGS.map(lambda t: {"tag": t})),
                st.tuples(st.sampled_from(["invalid", "valid", "forgotten"]), st.just({"reason": "because"})),
                st.booleans().map(lambda b: ("expiring", {"expiring": b})),
                st.booleans().map(lambda b: ("verified", {"complete": b, "chunks": 3, "bytes": 2**40})),
                st.text(max_size=5).map(lambda t: ("damaged", {"keys": ["a", "b"], "reason": t})),
            )
        )
        about = record.attempt if kind in ("verified", "damaged") else None
        number = draw(st.integers(1, 4))
        at = NOON + draw(st.floats(-1e6, 1e6))
        notes.append(Note(RUN, record.checkpoint, number, ulid(i, b"0" * 10), kind, at, "ann", about, data))
    dooms = {r.attempt for r in records if draw(st.integers(0, 5)) == 0}
    gone = {r.attempt for r in records if draw(st.integers(0, 5)) == 0}
    steps = draw(
        st.permutations([*records, *epochs, *notes, "dooms", *(CommitEnd(a, "gone", "") for a in gone)])
    )
    return records, epochs, notes, dooms, gone, steps, draw(st.integers(1, 5))


def same(a, b):
    """Equal, where NaN equals NaN, and 1 is not 1.0."""
    return repr(a) == repr(b)


def expected(records, notes, dooms, gone):
    entries = [
        history.entry_of(
            r,
            history.derive(
                r.attempt,
                r.metrics,
                r.tags,
                [n for n in notes if n.checkpoint == r.checkpoint],
                doomed=r.attempt in dooms,
            ),
        )
        for r in records
        if r.attempt not in gone
    ]
    return history.counting(entries)


def feed(manifest, steps, dooms, per_transaction):
    for start in range(0, len(steps), per_transaction):
        with manifest.transaction():
            for step in steps[start : start + per_transaction]:
                match step:
                    case "dooms":
                        manifest.set_dooms(TIER, KEY, dooms)
                    case CommitEnd():
                        manifest.put_end(TIER, KEY, step)
                    case Note():
                        put_note(manifest, step)
                    case _ if hasattr(step, "attempt"):
                        put(manifest, step)
                    case _:
                        manifest.put_epoch(KEY, step)


@settings(max_examples=150, deadline=None)
@given(documents())
def test_facts_equal_the_models_whatever_the_order_of_documents(made):
    records, epochs, notes, dooms, gone, steps, per_transaction = made
    with Manifest.open(None, store_uuid=STORE) as manifest:
        manifest.put_tier(TIER, 0, "local", "file:///x")
        manifest.put_run(RUN, KEY, NOON)
        feed(manifest, steps, dooms, per_transaction)
        wanted = expected(records, notes, dooms, gone)
        assert same(manifest.history(KEY), wanted)
        assert same(manifest.history(KEY, tier_uuid=TIER), wanted)
        assert manifest.sessions(KEY) == epochs
        assert same(manifest.latest(KEY), history.latest(wanted, epochs))
        ordered = [e.checkpoint for e in history.effective_order(wanted, epochs)]
        assert [c.checkpoint for c in manifest.checkpoints(KEY)] == ordered
        for row, entry in zip(
            manifest.checkpoints(KEY), history.effective_order(wanted, epochs), strict=True
        ):
            assert same(row.metrics, dict(entry.facts.metrics))
            assert (row.tags, row.state, row.restorable) == (
                entry.facts.tags,
                entry.facts.state,
                entry.facts.restorable,
            )
            assert (row.verified_at, row.damaged_reason) == (
                entry.facts.verified_at,
                entry.facts.damaged_reason,
            )
        dump = everything(manifest)
        with manifest.transaction():
            manifest.refresh_facts(KEY, everything=True)
        assert everything(manifest) == dump


def everything(manifest):
    """All that can be asked, without the row numbers that depend on the order of arrival."""
    views = (
        "v_checkpoints",
        "v_tensors",
        "v_reuse",
        "v_replicas",
        "v_tiers",
        "v_retention",
        "metrics",
        "tags",
    )
    return manifest.read(
        lambda c: {
            view: sorted(
                json.dumps(row)
                for row in c.execute(f"SELECT * FROM {view}" if view[1] == "_" else VALUES[view])
            )
            for view in views
        }
    )


VALUES = {
    "metrics": "SELECT checkpoint, metric, value, exact FROM metrics JOIN checkpoints USING (checkpoint_id)",
    "tags": "SELECT checkpoint, tag FROM tags JOIN checkpoints USING (checkpoint_id)",
}


@settings(max_examples=50, deadline=None)
@given(documents(), st.randoms(use_true_random=False))
def test_a_rebuild_in_another_order_gives_the_same_answers(made, random):
    *_, dooms, _, steps, per_transaction = made
    again = [*steps]
    random.shuffle(again)
    # What reads GONE cannot be read as a record any more: a rebuild never sees it.
    ended = {s.attempt for s in steps if isinstance(s, CommitEnd)}
    again = [
        s for s in again if not (hasattr(s, "checkpoint") and not isinstance(s, Note) and s.attempt in ended)
    ]
    with Manifest.open(None, store_uuid=STORE) as manifest:
        put_basics(manifest)
        feed(manifest, steps, dooms, per_transaction)
        before = everything(manifest)
        with manifest.transaction():
            manifest.clear()
            put_basics(manifest)
            feed(manifest, again, dooms, len(again))
        assert everything(manifest) == before


def test_a_note_that_two_tiers_hold_counts_once():
    with Manifest.open(None, store_uuid=STORE) as manifest:
        put_basics(manifest)
        manifest.put_tier(TIER2, 1, "s3", "s3://x")
        put(manifest, make_record(1))
        note = Note(RUN, attempt_id(1), 1, ulid(1, b"0" * 10), "tag", NOON, "ann", None, {"tag": "x"})
        put_note(manifest, note)
        put_note(manifest, note, tier=TIER2)
        assert manifest.checkpoints()[0].tags == ("x",)
