from __future__ import annotations

import dataclasses
import threading

import pytest

from ckptstore.metrics.definitions import BLOCKED_BUCKETS
from ckptstore.metrics.figures import Figures, unix_seconds
from tests.metrics.made import COMMITTED, FAILED, LOST, PHASES, RESTORED, SKIPPED


def values(figures, name):
    """Labels (without run and rank 0) -> value, of the samples with that name."""
    found = {}
    for family in figures.families():
        for sample in family.samples:
            if family.name + sample.suffix == f"ckptstore_{name}":
                labels = tuple(v for k, v in sample.labels if k != "run" and (k, v) != ("rank", "0"))
                assert labels not in found
                found[labels] = sample.value
    return found


@pytest.fixture
def figures():
    return Figures()


def test_a_committed_save(figures):
    figures.saved(COMMITTED)
    assert values(figures, "last_success_timestamp_seconds") == {(): 1795953600.5}
    assert values(figures, "last_save_step") == {(): 500}
    assert values(figures, "last_save_blocked_seconds") == {(): 0.25}
    assert values(figures, "last_save_phase_seconds") == {(phase,): s for phase, s in PHASES.items()}
    tier, new = COMMITTED.tier, COMMITTED.new_bytes
    expected = {(tier, "new"): new, (tier, "reused"): COMMITTED.reused_bytes}
    assert values(figures, "last_save_bytes") == expected
    assert values(figures, "saved_bytes_total") == expected
    assert values(figures, "saves_total") == {("committed",): 1, ("failed",): 0, ("skipped",): 0}
    assert values(figures, "save_failures_total") == {}


def test_counters_add_up_and_gauges_do_not(figures):
    figures.saved(COMMITTED)
    later = dataclasses.replace(
        COMMITTED,
        step=600,
        committed_at="2026-11-29T12:01:00.000Z",
        new_bytes=5,
        tier="s3://b",
        seconds={"write": 2.0},
    )
    figures.saved(later)
    assert values(figures, "last_save_step") == {(): 600}
    assert values(figures, "last_success_timestamp_seconds") == {(): 1795953660.0}
    # What the save before had, and this one has not, is gone.
    assert values(figures, "last_save_phase_seconds") == {("write",): 2.0}
    assert set(values(figures, "last_save_bytes")) == {("s3://b", "new"), ("s3://b", "reused")}
    assert values(figures, "saved_bytes_total")["/data/ckpts", "new"] == COMMITTED.new_bytes
    assert values(figures, "saved_bytes_total")["s3://b", "new"] == 5
    assert values(figures, "save_phase_seconds_sum")["write",] == PHASES["write"] + 2.0
    assert values(figures, "save_phase_seconds_count")["write",] == 2


def test_a_failure_changes_nothing_of_the_last_success(figures):
    figures.saved(COMMITTED)
    figures.saved(FAILED)
    figures.saved(dataclasses.replace(FAILED, error_kind="deadline", step=600))
    assert values(figures, "save_failures_total") == {("out-of-space",): 1, ("deadline",): 1}
    assert values(figures, "saves_total") == {("committed",): 1, ("failed",): 2, ("skipped",): 0}
    assert values(figures, "last_save_step") == {(): 500}
    assert values(figures, "save_blocked_seconds_count") == {(): 3}


def test_a_skipped_save_is_no_pause_of_nothing(figures):
    figures.saved(SKIPPED)
    assert values(figures, "saves_total") == {("committed",): 0, ("failed",): 0, ("skipped",): 1}
    assert values(figures, "save_blocked_seconds_count") == {}


@pytest.mark.parametrize("bound", BLOCKED_BUCKETS)
def test_a_bucket_counts_what_is_up_to_its_bound(figures, bound):
    for seconds in (bound, bound * 1.0001):
        figures.saved(dataclasses.replace(COMMITTED, blocked_seconds=seconds))
    buckets = values(figures, "save_blocked_seconds_bucket")
    assert buckets[str(float(bound)),] == 1
    assert buckets["+Inf",] == 2
    assert list(buckets.values()) == sorted(buckets.values())
    assert values(figures, "save_blocked_seconds_sum")[()] == pytest.approx(2.0001 * bound)


def test_restores(figures):
    figures.restored(RESTORED)
    figures.restored(LOST)
    assert values(figures, "restores_total") == {("restored",): 1, ("failed",): 1}
    assert values(figures, "restore_failures_total") == {("chunk-damaged",): 1}
    assert values(figures, "restore_seconds_sum") == {(): 2.5}
    assert values(figures, "restored_bytes_total") == {("/data/ckpts",): 1000}


def test_the_sum_over_ranks_counts_bytes_once(figures):
    for rank in range(4):
        figures.saved(dataclasses.replace(COMMITTED, rank=rank, world_size=4))
    assert values(figures, "saved_bytes_total")["/data/ckpts", "new"] == COMMITTED.new_bytes
    assert len(values(figures, "last_save_step")) == 4


def test_runs_are_told_apart(figures):
    figures.saved(COMMITTED)
    figures.saved(dataclasses.replace(COMMITTED, run="other"))
    [family] = [f for f in figures.families() if f.name == "ckptstore_last_save_step"]
    assert [dict(sample.labels)["run"] for sample in family.samples] == ["gpt", "other"]


def test_nothing_is_lost_between_threads(figures):
    def tell():
        for _ in range(50):
            figures.saved(COMMITTED)
            figures.families()

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(figures, "saves_total")["committed",] == 200


def test_a_time_of_a_broken_clock_is_a_number():
    assert unix_seconds("2026-11-29T12:00:00.000Z") == 1795953600.0
    assert unix_seconds("-1e+20") == -1e20
