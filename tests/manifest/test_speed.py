"""Counted in SQLite's own steps, not in seconds: a lost index fails here, a slow machine does not."""

import time

import numpy as np

from ckptstore.manifest import Manifest, TensorRows
from tests.manifest.made import KEY, RUN, STORE, TIER, attempt_id, hexes, make_layout, make_record, put_basics

CHECKPOINTS = 400
TENSORS = 500


def timed(action):
    started = time.perf_counter()
    result = action()
    return result, time.perf_counter() - started


def test_answers_do_not_scan_what_is_large(tmp_path):
    layout = make_layout(TENSORS)
    ones = np.ones(TENSORS, dtype=np.int64)
    rows = [TensorRows(hexes(TENSORS, str(i)), ones, ones, ones) for i in range(4)]
    with Manifest.open(tmp_path / "manifest.db", store_uuid=STORE) as manifest:
        put_basics(manifest)
        with manifest.transaction():
            for step in range(CHECKPOINTS):
                manifest.put_record(TIER, KEY, make_record(step), layout, rows[step // 100], 1)
        counted = 0

        def count():
            nonlocal counted
            counted += 1
            return 0

        def work(action):
            """Thousands of SQLite's instructions that it took: the same on every machine."""
            nonlocal counted
            counted = 0
            manifest._connection.set_progress_handler(count, 1000)
            action()
            manifest._connection.set_progress_handler(None, 0)
            return counted

        assert work(manifest.checkpoints) < 200
        assert work(lambda: manifest.tensors(attempt_id(7))) < 60
        assert work(lambda: manifest.tensor_history(KEY, "model.layers.3.weight")) < 100
        assert work(lambda: manifest.known_attempts(TIER, KEY)) < 20
        assert work(lambda: manifest.latest(KEY)) < 5
        assert work(lambda: manifest.checkpoint_by_prefix(attempt_id(7))) < 5
        step = "SELECT * FROM v_tensors WHERE run = ? AND step = 7"
        assert work(lambda: manifest.read(lambda c: c.execute(step, (RUN,)).fetchall())) < 100
        for view in ("v_checkpoints", "v_reuse", "v_tiers", "v_retention", "v_replicas"):
            assert (
                work(lambda v=view: manifest.read(lambda c: c.execute(f"SELECT * FROM {v}").fetchall())) < 300
            )
        # One more save touches its own rows only, however many there are.
        record = make_record(CHECKPOINTS)
        assert work(lambda: manifest.put_record(TIER, KEY, record, layout.digest, rows[0], 1)) < 60
        assert len(manifest.tensor_history(KEY, "model.layers.3.weight")) == CHECKPOINTS + 1
        assert sum(t.changed for t in manifest.tensor_history(KEY, "model.layers.3.weight")) == 5


def test_a_save_of_two_thousand_tensors_is_in_within_a_moment(tmp_path):
    layout, ones = make_layout(2000), np.ones(2000, dtype=np.int64)
    with Manifest.open(tmp_path / "manifest.db", store_uuid=STORE) as manifest:
        put_basics(manifest)
        times = []
        for step in range(6):
            rows = TensorRows(hexes(2000, str(step)), ones, ones, ones)
            _, seconds = timed(
                lambda r=rows, s=step: manifest.put_record(TIER, KEY, make_record(s), layout, r, 1)
            )
            times.append(seconds)
        assert min(times) < 0.3
