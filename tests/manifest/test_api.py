"""What is put comes out, and repeated or late documents change nothing."""

import dataclasses
import math
import subprocess
import sys

import pytest

from ckptstore.errors import DocumentError, NotFoundError
from ckptstore.manifest import LayoutRows, Manifest, ManifestUnusable, TensorRows
from ckptstore.model import history
from ckptstore.model.ids import run_key
from ckptstore.model.record import CommitEnd, IntentDoc
from tests.manifest.made import (
    KEY,
    NOON,
    RUN,
    STORE,
    TIER,
    TIER2,
    attempt_id,
    make_epoch,
    make_layout,
    make_note,
    make_record,
    make_tensors,
    note_key,
    put,
    put_basics,
    put_note,
)


@pytest.fixture
def manifest():
    with Manifest.open(None, store_uuid=STORE) as opened:
        put_basics(opened)
        yield opened


def count(manifest, table):
    return manifest.read(lambda c: c.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_importing_it_imports_no_torch_and_no_sqlite_utils():
    code = (
        "import sys, ckptstore.manifest, ckptstore.manifest.place, ckptstore.manifest.descriptions;"
        "print([m for m in ('torch', 'sqlite_utils', 'boto3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_empty_manifest_answers_everything():
    with Manifest.open(None, store_uuid=STORE) as empty:
        assert empty.runs() == []
        assert empty.checkpoints() == []
        assert empty.history("none") == []
        assert empty.latest("none") is None
        assert empty.sessions("none") == []
        assert empty.known_attempts(TIER, KEY) == {}
        assert empty.known_notes(TIER, KEY) == set()
        assert empty.known_dooms(TIER, KEY) == set()
        assert empty.known_epochs(KEY) == set()
        assert empty.checkpoint_by_prefix("01") == []
        assert empty.find_runs_like("x") == []
        assert empty.tensor_history(KEY, "x") == []
        assert empty.tiers() == []
        assert not empty.has_layout("00")
        with pytest.raises(NotFoundError):
            empty.tensors(attempt_id(1))


def test_runs_carry_their_totals(manifest):
    for step in (1, 2, 3):
        put(manifest, make_record(step))
    put_note(manifest, make_note(make_record(3), 1, "invalid", reason="NaN"))
    manifest.put_run("other", run_key("other"), NOON)
    other, run = sorted(manifest.runs(), key=lambda r: r.checkpoints)
    assert (run.run, run.run_key, run.created_at) == (RUN, KEY, NOON)
    assert (run.checkpoints, run.restorable, run.sessions, run.new_bytes) == (3, 2, 1, 3 * 256)
    assert (run.latest, run.latest_step) == (attempt_id(2), 2)
    assert run.latest_logical_bytes == 256
    assert (other.checkpoints, other.latest, other.new_bytes) == (0, None, 0)


def test_similar_run_names_are_found(manifest):
    for name in ("llama-8b", "llama-70b", "gpt", "ablation/llama-8b-lr3"):
        manifest.put_run(name, run_key(name), NOON)
    assert manifest.find_runs_like("lama-8b")[0] == "llama-8b"
    assert manifest.find_runs_like("GPT") == ["gpt"]
    assert "ablation/llama-8b-lr3" in manifest.find_runs_like("llama-8b")
    assert manifest.find_runs_like("zzz") == []
    assert len(manifest.find_runs_like("llama", limit=2)) == 2


def test_sessions_come_back_as_they_were(manifest):
    second = make_epoch(2, resumed_from=attempt_id(1))
    manifest.put_epoch(KEY, second)
    manifest.put_epoch(KEY, dataclasses.replace(second, host="late"))
    assert manifest.sessions(KEY) == [make_epoch(1), second]
    assert manifest.known_epochs(KEY) == {1, 2}


def test_a_checkpoint_row_says_what_the_record_said(manifest):
    record = make_record(7, tags=("best", "a'b\"c"), metrics={"loss": 0.1, "tokens": 10**9})
    assert put(manifest, record)
    (row,) = manifest.checkpoints(KEY)
    assert (row.run, row.run_key, row.checkpoint, row.attempt) == (
        RUN,
        KEY,
        record.checkpoint,
        record.attempt,
    )
    assert (row.step, row.epoch, row.sequence, row.place) == (7, 1, 7, (1, 7))
    assert row.created_at == record.created_at
    assert (row.session, row.origin, row.host, row.world_size) == (record.session, "save", "node-1", 1)
    assert (row.state, row.restorable, row.is_latest, row.verified_at) == ("ok", True, True, None)
    assert row.metrics == {"loss": 0.1, "tokens": 10**9}
    assert row.tags == ("a'b\"c", "best")
    assert row.timings == {"capture": 0.25, "write": 1.5}
    assert (row.tensors, row.chunks, row.logical_bytes, row.new_bytes, row.reused_bytes) == (
        4,
        8,
        256,
        256,
        0,
    )
    assert (row.pins, row.tiers) == (0, ("local",))


def test_checkpoints_can_be_narrowed_and_turned_round(manifest):
    for step in range(5):
        put(manifest, make_record(step))
    put_note(manifest, make_note(make_record(4), 1, "invalid"))
    assert [c.step for c in manifest.checkpoints()] == [0, 1, 2, 3, 4]
    assert [c.step for c in manifest.checkpoints(newest_first=True, limit=2)] == [4, 3]
    assert [c.step for c in manifest.checkpoints(restorable=False)] == [4]
    assert [c.step for c in manifest.checkpoints(KEY, restorable=True, limit=1)] == [0]
    assert manifest.checkpoints("no such run") == []


def test_a_record_put_twice_is_there_once(manifest):
    assert put(manifest, make_record(1))
    assert not put(manifest, make_record(1))
    assert count(manifest, "replicas") == 1
    assert count(manifest, "checkpoint_tensors") == 4


def test_tensors_and_boxes_are_stored_once_per_layout(manifest):
    for step in range(3):
        put(manifest, make_record(step))
    assert (count(manifest, "layouts"), count(manifest, "tensors"), count(manifest, "boxes")) == (1, 5, 8)
    assert count(manifest, "checkpoint_tensors") == 12
    layout = make_layout()
    assert manifest.has_layout(layout.digest)
    record = make_record(9)
    manifest.put_record(TIER, KEY, record, layout.digest, make_tensors(), 1)
    assert len(manifest.tensors(record.checkpoint)) == 5
    with pytest.raises(NotFoundError, match="no layout"):
        manifest.put_record(TIER, KEY, make_record(10), "00" * 32, make_tensors(), 1)
    assert manifest.known_attempts(TIER, KEY).keys() == {attempt_id(s) for s in (0, 1, 2, 9)}


def test_tensors_come_back_in_order_with_their_ties(manifest):
    put(manifest, make_record(1), salt="s")
    rows = manifest.tensors(attempt_id(1))
    assert [r.name for r in rows] == [*(f"model.layers.{i}.weight" for i in range(4)), "model.head.weight"]
    assert [r.digest for r in rows[:4]] == make_tensors(salt="s").digests
    assert (rows[4].alias_of, rows[4].digest) == ("model.layers.0.weight", rows[0].digest)
    assert rows[0].alias_of is None
    assert (rows[0].shape, rows[0].dtype, rows[0].kind, rows[0].component) == (
        (8, 4),
        "bfloat16",
        "parameter",
        "model",
    )
    assert (rows[0].bytes, rows[0].new_bytes, rows[0].chunks) == (64, 64, 2)


def test_boxes_come_back_in_global_indices(manifest):
    put(manifest, make_record(1))
    boxes = manifest.boxes(attempt_id(1), "model.layers.3.weight")
    assert [(b.offsets, b.shape) for b in boxes] == [((0, 0), (4, 4)), ((4, 0), (4, 4))]
    assert len(manifest.boxes(attempt_id(1))) == 10  # the tied name shows its tensor's boxes
    assert manifest.boxes(attempt_id(1), "none") == []


def test_boxes_of_a_very_large_layout_stay_in_the_store(manifest, monkeypatch):
    monkeypatch.setattr("ckptstore.manifest.ingest.MAX_EXPANDED_BOXES", 7)
    put(manifest, make_record(1))
    layout = manifest.layout(attempt_id(1))
    assert (layout.boxes, layout.boxes_expanded, layout.tensors) == (8, False, 4)
    assert manifest.boxes(attempt_id(1)) == []
    row = manifest.read(lambda c: c.execute("SELECT boxes, boxes_expanded FROM v_tensors LIMIT 1").fetchone())
    assert row == (0, 0)


def test_a_state_of_scalars_and_one_without_tensors_fit(manifest):
    layout = LayoutRows("ab" * 32, 1, ["s"], ["c"], ["int64"], [()], ["parameter"], [0], [()], [()])
    manifest.put_record(TIER, KEY, make_record(1), layout, TensorRows(["00" * 32], [8], [8], [1]), 1)
    assert manifest.tensors(attempt_id(1))[0].shape == ()
    assert manifest.boxes(attempt_id(1))[0].offsets == ()
    nothing = LayoutRows("cd" * 32, 1, [], [], [], [], [], [], [], [])
    manifest.put_record(TIER, KEY, make_record(2), nothing, TensorRows([], [], [], []), 1)
    assert manifest.tensors(attempt_id(2)) == []


def test_names_with_quotes_slashes_and_newlines_come_through(manifest):
    name = "a'b\"c/d\\e\nf\tg%_*?[x]é🙂"
    layout = LayoutRows("ef" * 32, 1, [name], [name], ["int8"], [(1,)], ["buffer"], [0], [(0,)], [(1,)])
    record = make_record(1, metrics={name: 1.5}, tags=(name,), metadata={name: name})
    manifest.put_record(TIER, KEY, record, layout, TensorRows(["00" * 32], [1], [1], [1]), 1)
    (row,) = manifest.checkpoints()
    assert row.metrics == {name: 1.5}
    assert row.tags == (name,)
    assert manifest.tensors(record.checkpoint)[0].name == name
    assert len(manifest.tensor_history(KEY, name)) == 1
    assert manifest.boxes(record.checkpoint, name)[0].tensor == name


def test_a_value_that_sqlite_cannot_hold_is_refused_and_leaves_nothing(manifest):
    with pytest.raises(DocumentError):
        put(manifest, make_record(1, host="\ud800"))
    with pytest.raises(DocumentError):
        put(manifest, make_record(2, sequence=2**70))
    assert manifest.known_attempts(TIER, KEY) == {}


def test_a_record_with_too_few_tensor_rows_is_refused(manifest):
    with pytest.raises(DocumentError, match="has 4"):
        manifest.put_record(TIER, KEY, make_record(1), make_layout(4), make_tensors(3), 1)
    assert manifest.known_attempts(TIER, KEY) == {}
    assert count(manifest, "layouts") == 0


def test_void_and_gone_are_known_and_a_collected_record_is_out(manifest):
    for step in (1, 2):
        put(manifest, make_record(step))
    manifest.put_end(TIER, KEY, CommitEnd(attempt_id(5), "void", "fenced"))
    manifest.put_end(TIER, KEY, CommitEnd(attempt_id(2), "gone", "retention"))
    assert manifest.known_attempts(TIER, KEY) == {
        attempt_id(1): "record",
        attempt_id(2): "gone",
        attempt_id(5): "void",
    }
    assert [c.step for c in manifest.checkpoints()] == [1]
    assert manifest.latest(KEY).step == 1
    assert count(manifest, "checkpoint_tensors") == 4


def test_a_record_read_before_it_was_collected_does_not_come_back(manifest):
    manifest.put_end(TIER, KEY, CommitEnd(attempt_id(1), "gone", ""))
    assert not put(manifest, make_record(1))
    assert manifest.checkpoints() == []


def test_a_layout_goes_with_its_last_record(manifest):
    put(manifest, make_record(1), tensors=4)
    put(manifest, make_record(2, tensors=3), tensors=3)
    manifest.put_end(TIER, KEY, CommitEnd(attempt_id(2), "gone", ""))
    assert (count(manifest, "layouts"), count(manifest, "tensors")) == (1, 5)


def test_dooms_are_what_was_last_listed(manifest):
    put(manifest, make_record(1))
    put(manifest, make_record(2))
    manifest.set_dooms(TIER, KEY, {attempt_id(2), attempt_id(9)})
    assert manifest.known_dooms(TIER, KEY) == {attempt_id(2), attempt_id(9)}
    assert [c.state for c in manifest.checkpoints()] == ["ok", "doomed"]
    assert manifest.latest(KEY).step == 1
    manifest.set_dooms(TIER, KEY, set())
    assert [c.state for c in manifest.checkpoints()] == ["ok", "ok"]


def test_notes_before_their_record_count_when_it_comes(manifest):
    note = make_note(make_record(1), 1, "tag", tag="early")
    put_note(manifest, note)
    put_note(manifest, note)
    assert manifest.known_notes(TIER, KEY) == {note_key(note)}
    assert manifest.checkpoints() == []
    put(manifest, make_record(1))
    assert manifest.checkpoints()[0].tags == ("early",)
    manifest.drop_notes(TIER, KEY, [note_key(note)])
    assert manifest.checkpoints()[0].tags == ()


def test_a_damage_note_with_very_many_keys_keeps_its_reason(manifest):
    put(manifest, make_record(1))
    keys = [f"chunks/ab/{i:064x}" for i in range(5000)]
    put_note(manifest, make_note(make_record(1), 1, "damaged", keys=keys, reason="bit rot"))
    assert manifest.checkpoints()[0].damaged_reason == "bit rot"


def test_keys_that_left_the_listing_can_be_dropped(manifest):
    put(manifest, make_record(1))
    manifest.put_end(TIER, KEY, CommitEnd(attempt_id(2), "void", ""))
    manifest.drop_attempts(TIER, KEY, [attempt_id(1), attempt_id(2), attempt_id(3)])
    assert manifest.known_attempts(TIER, KEY) == {}
    assert manifest.checkpoints() == []
    assert put(manifest, make_record(1))


def test_metrics_are_exact_and_can_be_queried(manifest):
    values = {
        "nan": math.nan,
        "inf": math.inf,
        "minus": -math.inf,
        "big": 10**40,
        "huge": 10**5000,
        "zero": -0.0,
    }
    put(manifest, make_record(1, metrics={**values, "int": 3, "float": 3.0}))
    metrics = manifest.checkpoints()[0].metrics
    assert math.isnan(metrics.pop("nan"))
    assert metrics == {**{k: v for k, v in values.items() if k != "nan"}, "int": 3, "float": 3.0}
    assert (type(metrics["int"]), type(metrics["float"])) == (int, float)
    assert math.copysign(1, metrics["zero"]) == -1
    rows = manifest.read(
        lambda c: {m: (v, e) for m, v, e in c.execute("SELECT metric, value, exact FROM metrics")}
    )
    assert rows["nan"] == (None, "NaN")
    assert rows["inf"] == (math.inf, "Infinity")
    assert rows["big"] == (1e40, str(10**40))
    assert rows["zero"][1] == "-0.0"
    valid = manifest.read(
        lambda c: c.execute("SELECT min(json_valid(metrics)) FROM v_checkpoints").fetchone()[0]
    )
    assert valid == 1


def test_annotated_nan_comes_back(manifest):
    put(manifest, make_record(1))
    put_note(manifest, make_note(make_record(1), 1, "metrics", metrics={"val": math.nan, "n": 2**80}))
    (entry,) = manifest.history(KEY)
    assert math.isnan(entry.facts.metrics["val"])
    assert entry.facts.metrics["n"] == 2**80


def test_going_back_makes_a_checkpoint_latest_again(manifest):
    for step in (1, 2, 3):
        put(manifest, make_record(step))
    manifest.put_epoch(KEY, make_epoch(2, resumed_from=attempt_id(1)))
    assert manifest.latest(KEY).step == 1
    assert [c.step for c in manifest.checkpoints()] == [2, 3, 1]
    assert [c.step for c in manifest.checkpoints() if c.is_latest] == [1]
    put(manifest, make_record(2, session=2))
    assert manifest.latest(KEY).checkpoint == attempt_id(2, session=2)
    put(manifest, make_record(4, session=1))  # the session that was taken over saves late
    assert manifest.latest(KEY).checkpoint == attempt_id(2, session=2)


def test_prefixes_find_checkpoints(manifest):
    for step in (1, 10):
        put(manifest, make_record(step))
    assert manifest.checkpoint_by_prefix(attempt_id(1)[:26]) == [(KEY, attempt_id(1)), (KEY, attempt_id(10))]
    assert manifest.checkpoint_by_prefix(attempt_id(10)[:-2].lower()) == [(KEY, attempt_id(10))]
    assert manifest.checkpoint_by_prefix("0%") == []


def test_a_tensor_is_followed_through_the_run(manifest):
    for step, salt in ((1, "a"), (2, "a"), (3, "b"), (4, "a")):
        put(manifest, make_record(step), salt=salt)
    found = manifest.tensor_history(KEY, "model.layers.2.weight")
    assert [(t.step, t.changed) for t in found] == [(1, True), (2, False), (3, True), (4, True)]
    assert [t.step for t in manifest.tensor_history(KEY, "model.head.weight")] == [1, 2, 3, 4]


def test_pins_are_what_was_last_seen(manifest):
    put(manifest, make_record(1))
    intents = [
        IntentDoc(
            attempt_id(0, session=n), "pin", RUN, "node-1", 1, "ann", NOON, ((KEY, attempt_id(1)),), "paper"
        )
        for n in (5, 6)
    ]
    manifest.set_pins(TIER, intents)
    assert manifest.checkpoints()[0].pins == 2
    assert [(p.kind, p.user, p.attempt) for p in manifest.pins()] == [("pin", "ann", attempt_id(1))] * 2
    manifest.set_pins(TIER, [])
    assert manifest.checkpoints()[0].pins == 0


def test_a_checkpoint_is_restorable_when_one_tier_has_it_good(manifest):
    manifest.put_tier(TIER2, 1, "s3", "s3://bucket/x")
    record = make_record(1)
    copy = dataclasses.replace(record, attempt=attempt_id(1, session=9), origin="replicate")
    put(manifest, record)
    put(manifest, copy, tier=TIER2)
    assert manifest.history(KEY)[0].attempt == record.attempt
    assert manifest.checkpoints()[0].tiers == ("local", "s3")
    put_note(manifest, make_note(record, 1, "damaged", reason="lost"))
    (entry,) = manifest.history(KEY)
    assert (entry.attempt, entry.facts.restorable) == (copy.attempt, True)
    (hot,) = manifest.history(KEY, tier_uuid=TIER)
    assert (hot.attempt, hot.facts.state) == (record.attempt, "damaged")
    manifest.put_end(TIER, KEY, CommitEnd(record.attempt, "gone", ""))
    assert manifest.checkpoints()[0].tiers == ("s3",)
    manifest.drop_tier(TIER2)
    assert manifest.checkpoints() == []
    assert count(manifest, "layouts") == 0


def test_a_tier_that_moves_up_speaks_for_its_checkpoints(manifest):
    manifest.put_tier(TIER2, 1, "s3", "s3://bucket/x")
    record = make_record(1)
    copy = dataclasses.replace(record, attempt=attempt_id(1, session=9))
    put(manifest, record)
    put(manifest, copy, tier=TIER2)
    with manifest.transaction():
        manifest.put_tier(TIER2, 0, "s3", "s3://bucket/x")
        manifest.put_tier(TIER, 1, "local", "file:///x")
    assert manifest.history(KEY)[0].attempt == copy.attempt
    assert [t.name for t in manifest.tiers()] == ["s3", "local"]


def test_a_trimmed_generation_counts(manifest):
    put(manifest, make_record(1))
    trimmed = make_record(1, attempt=attempt_id(1, session=8), generation=1, origin="trim", tensors=2)
    put(manifest, trimmed, tensors=2)
    (row,) = manifest.checkpoints()
    assert (row.generation, row.tensors, row.attempt) == (1, 2, trimmed.attempt)
    assert len(manifest.tensors(row.checkpoint)) == 3
    assert count(manifest, "v_tensors") == 3


def test_dropping_a_run_leaves_nothing_of_it(manifest):
    put(manifest, make_record(1))
    put_note(manifest, make_note(make_record(1), 1, "tag", tag="t"))
    manifest.drop_run(KEY)
    for table in (
        "runs",
        "sessions",
        "checkpoints",
        "replicas",
        "checkpoint_tensors",
        "layouts",
        "boxes",
        "notes",
    ):
        assert count(manifest, table) == 0, table


def test_clear_leaves_the_schema_and_whose_it_is(manifest):
    put(manifest, make_record(1))
    with manifest.transaction():
        manifest.clear()
        put_basics(manifest)
        put(manifest, make_record(2))
    assert [c.step for c in manifest.checkpoints()] == [2]
    assert count(manifest, "store") == 1
    assert count(manifest, "v_checkpoints") == 1


def test_a_failed_transaction_leaves_nothing(manifest):
    put(manifest, make_record(1))
    with pytest.raises(RuntimeError), manifest.transaction():
        put(manifest, make_record(2))
        manifest.clear()
        raise RuntimeError
    assert [c.step for c in manifest.checkpoints()] == [1]
    put(manifest, make_record(3))
    assert [c.step for c in manifest.checkpoints()] == [1, 3]


def test_facts_are_current_inside_the_transaction_after_a_refresh(manifest):
    with manifest.transaction():
        put(manifest, make_record(1))
        manifest.refresh_facts(KEY)
        assert manifest.latest(KEY).step == 1
    manifest.refresh_facts(KEY, everything=True)
    assert manifest.latest(KEY).step == 1


def test_unknown_tiers_and_runs_are_named(manifest):
    with pytest.raises(NotFoundError, match="no tier"):
        put(manifest, make_record(1), tier="nowhere")
    with pytest.raises(NotFoundError, match="no run"):
        manifest.put_epoch("no-run", make_epoch(1))


def test_a_private_copy_is_independent(tmp_path):
    path = tmp_path / "manifest.db"
    with Manifest.open(path, store_uuid=STORE) as original:
        put_basics(original)
        put(original, make_record(1))
        with Manifest.open(path, store_uuid=STORE, read_only=True) as reader, reader.copy_to_memory() as copy:
            put(copy, make_record(2))
            assert [c.step for c in copy.checkpoints()] == [1, 2]
            assert [c.step for c in reader.checkpoints()] == [1]


def test_check_is_content_with_a_good_file(tmp_path):
    with Manifest.open(tmp_path / "manifest.db", store_uuid=STORE) as manifest:
        manifest.check()


def test_a_closed_manifest_says_so(manifest):
    manifest.close()
    manifest.close()
    with pytest.raises(ValueError, match="closed"):
        manifest.runs()


def test_the_error_keeps_its_reason_across_processes():
    import pickle

    error = pickle.loads(pickle.dumps(ManifestUnusable("m", reason="copied")))
    assert (error.reason, error.kind, error.exit_code) == ("copied", "manifest-unusable", 4)
    assert "rebuild" in str(error)


def test_latest_agrees_with_the_model(manifest):
    for step in (1, 2):
        put(manifest, make_record(step))
    assert manifest.latest(KEY) == history.latest(manifest.history(KEY), manifest.sessions(KEY))
