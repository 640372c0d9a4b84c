"""A load takes each chunk and table from the first tier that has it good, and says what was not."""

from __future__ import annotations

import contextlib
import logging
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptstore
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    BackendError,
    ChunkDamagedError,
    DamageError,
    NotFoundError,
    PartlyRestoredError,
    PermissionDeniedError,
)
from ckptstore.inspect.diff import diff
from ckptstore.load.fetch import Fetcher
from ckptstore.load.host import HostShare
from ckptstore.load.plan import Want
from ckptstore.load.sources import Sources
from ckptstore.model.boxes import Box
from ckptstore.save import tables
from ckptstore.testing import Fault
from ckptstore.transfer.exporting import export
from tests.crash._support import blank_like, same
from tests.tiers._support import (
    RUN,
    SPOILERS,
    STATE,
    clone,
    copy_in,
    flip,
    flip_chunk,
    latest,
    make_store,
    object_of,
    objects,
    open_store,
    record_key,
    short,
    table_objects,
    with_faults,
)

AWAY = {
    "does not answer": None,
    "refuses": PermissionDeniedError("access denied (made to)"),
    "times out": BackendError("no reply in 60 s (made to)", transient=True),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    make_store(root)
    return root


@pytest.fixture
def saved(tmp_path: Path, template: Path) -> Path:
    clone(template, tmp_path)
    return tmp_path


@pytest.fixture
def with_table_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `saved`, every table an object of its own."""
    monkeypatch.setattr(tables, "INLINE_BYTES", 0)
    make_store(tmp_path)
    return tmp_path


def restored(checkpoint: Checkpoint) -> Any:
    """The report of a restore, which was exact."""
    target = blank_like(STATE)
    report = checkpoint.restore(target)
    assert same(target, STATE)
    assert sum(report.bytes_by_tier.values()) == report.bytes_read
    return report


@pytest.mark.parametrize("how", SPOILERS)
@pytest.mark.parametrize("prefix", ["chunks/", "packs/"])
def test_bad_objects_of_the_hot_tier_come_from_the_cold_one(saved, caplog, how, prefix):
    spoiled = objects(latest(saved), "hot", prefix)
    for key in spoiled:
        SPOILERS[how](saved / "hot" / key)
    report = restored(latest(saved))
    lines = [line for line in report.damaged if line.startswith("tier 'hot', ")]
    assert len(lines) == len(report.damaged) == len(spoiled)
    assert all(any(key in line for line in lines) for key in spoiled)
    assert report.rescued_chunks >= len(spoiled)
    assert report.bytes_by_tier["cold"] > 0
    assert report.bytes_by_tier["hot"] > 0
    warned = [record.message for record in caplog.records if "another tier is asked" in record.message]
    assert len(warned) == len(spoiled)
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.message in warned)


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_every_way_of_reading_finds_the_good_copy(saved, tmp_path, how):
    for prefix in ("chunks/", "packs/"):
        for key in objects(latest(saved), "hot", prefix):
            SPOILERS[how](saved / "hot" / key)
    checkpoint = latest(saved)
    assert same(checkpoint.load(), STATE)
    for name, stored in latest(saved).tensors.items():
        part = STATE
        for key in name.split("."):
            part = part[key]
        assert np.array_equal(stored[...], part), name
    export(latest(saved), tmp_path / "out.safetensors", component="model")
    hot = load_file(tmp_path / "out.safetensors")["hot"]
    assert np.array_equal(hot, STATE["model"]["hot"])
    assert objects(latest(saved), "hot", "chunks/")  # a load mends nothing
    with pytest.raises((ChunkDamagedError, PartlyRestoredError)):
        only(saved, "hot").restore(blank_like(STATE))


def only(root: Path, name: str) -> Checkpoint:
    """The checkpoint as it is in one tier alone."""
    checkpoint = latest(root)
    copy = copy_in(checkpoint, name)
    checkpoint.__dict__["copies"], checkpoint.tier = [copy], copy.tier
    return checkpoint


def test_a_good_load_asks_only_the_hot_tier(saved):
    checkpoint = latest(saved)
    cold = with_faults(checkpoint, "cold")
    report = restored(checkpoint)
    assert report.bytes_by_tier == {"hot": report.bytes_read}
    assert (report.damaged, report.rescued_chunks, cold.log) == ((), 0, [])


def test_nothing_is_read_twice_but_what_was_bad(saved):
    whole = restored(latest(saved)).bytes_read
    flip_chunk(saved, latest(saved), "hot", "model.frozen")
    report = restored(latest(saved))
    assert report.bytes_by_tier == {"hot": whole, "cold": STATE["model"]["frozen"].nbytes}
    assert report.rescued_chunks == 1


def test_what_a_short_pack_still_holds_is_read_there(saved):
    pack = object_of(latest(saved), "hot", "model.small.1")
    short(saved / "hot" / pack)
    report = restored(latest(saved))
    assert report.rescued_chunks == 1
    assert report.bytes_by_tier["cold"] < 1000


@pytest.mark.parametrize(
    ("table", "how"),
    [
        ("layout", "flipped"),
        ("tree", "short"),
        ("digests", "missing"),
        ("locations", "flipped"),
        ("locations", "missing"),
        ("keys", "short"),
    ],
)
def test_a_bad_table_comes_from_the_next_copy(with_table_objects, table, how):
    saved = with_table_objects
    key = table_objects(latest(saved), "hot", table)[0]
    SPOILERS[how](saved / "hot" / key)
    report = restored(latest(saved))
    assert any(key in line for line in report.damaged)
    if table in ("layout", "tree", "digests"):
        assert report.bytes_by_tier == {"hot": report.bytes_read}
    else:
        assert report.bytes_by_tier == {"cold": report.bytes_read}


def test_bad_tables_of_both_are_named_with_both(with_table_objects):
    saved = with_table_objects
    for name in ("hot", "cold"):
        (key,) = table_objects(latest(saved), name, "digests")
        flip(saved / name / key)
    with pytest.raises(DamageError, match=r"digests table .* tier 'hot'.* tier 'cold'"):
        latest(saved).restore(blank_like(STATE))


@pytest.mark.parametrize("how", SPOILERS)
def test_the_record_of_another_copy_does(saved, how):
    checkpoint, metadata = latest(saved), latest(saved).metadata
    SPOILERS[how](saved / "hot" / record_key(checkpoint, "hot"))
    assert checkpoint.metadata == metadata
    assert checkpoint.record.step == 1
    report = restored(checkpoint)
    assert report.bytes_by_tier == {"cold": report.bytes_read}


def test_gone_everywhere_is_gone(saved):
    checkpoint = latest(saved)
    for name in ("hot", "cold"):
        (saved / name / record_key(checkpoint, name)).unlink()
    with pytest.raises(NotFoundError, match="run 'train/exp 1' step 1: the checkpoint is gone"):
        checkpoint.restore(blank_like(STATE))


@pytest.mark.parametrize("error", AWAY.values(), ids=AWAY)
def test_a_tier_that_is_away_is_not_waited_for_again(saved, error):
    checkpoint = latest(saved)
    hot = with_faults(checkpoint, "hot", Fault("error", times=None, error=error))
    report = restored(checkpoint)
    assert report.bytes_by_tier == {"cold": report.bytes_read}
    assert len(report.damaged) == 1
    assert report.damaged[0].startswith("tier 'hot' does not give it")
    if not isinstance(error, PermissionDeniedError):
        assert {(call.op, call.key[:8]) for call in hot.log} == {("put", "intents/")}
        assert len(hot.log) == 4, "one operation, as often as it is retried"


def test_a_tier_that_goes_away_in_between_costs_each_thread_one_wait(saved, monkeypatch):
    monkeypatch.setattr("ckptstore.load.fetch.default_threads", lambda _: 2)
    checkpoint = latest(saved)
    _ = checkpoint.contents.layout
    hot = with_faults(checkpoint, "hot", Fault("error", op="read_into", times=None))
    report = restored(checkpoint)
    assert report.bytes_by_tier == {"cold": report.bytes_read}
    assert len(report.damaged) == 1
    assert len([call for call in hot.log if call.op == "read_into"]) <= 2 * 4


def test_a_tier_that_was_away_is_asked_again_before_anything_is_lost(saved):
    flip_chunk(saved, latest(saved), "cold", "model.frozen")
    checkpoint = latest(saved)
    with_faults(checkpoint, "hot", Fault("error", op="put", key="intents/*", times=4))
    report = restored(checkpoint)
    assert report.bytes_by_tier["hot"] == STATE["model"]["frozen"].nbytes


def test_one_bad_block_is_no_silent_tier(saved):
    checkpoint = latest(saved)
    pack = object_of(checkpoint, "hot", "model.small.1")
    bad_block = BackendError("input/output error (made to)")
    with_faults(checkpoint, "hot", Fault("error", op="read_into", key=pack, times=None, error=bad_block))
    report = restored(checkpoint)
    assert report.bytes_by_tier["hot"] > report.bytes_by_tier["cold"] > 0


def test_copies_that_are_bad_in_different_chunks_make_a_whole(saved):
    flip_chunk(saved, latest(saved), "hot", "model.frozen")
    flip_chunk(saved, latest(saved), "hot", "model.small.1")
    flip_chunk(saved, latest(saved), "cold", "model.hot")
    flip_chunk(saved, latest(saved), "cold", "model.small.2")
    report = restored(latest(saved))
    assert report.rescued_chunks == 2


def test_what_is_good_is_not_overwritten_by_what_lies_beside_it_elsewhere(saved):
    """Three chunks side by side in one pack: the outer ones are bad here, the middle one is bad there."""
    flip_chunk(saved, latest(saved), "hot", "model.small.0")
    flip_chunk(saved, latest(saved), "hot", "model.small.2")
    flip_chunk(saved, latest(saved), "cold", "model.small.1")
    assert restored(latest(saved)).rescued_chunks == 2


def test_stored_tensors_travel_to_other_processes(saved):
    flip_chunk(saved, latest(saved), "hot", "model.frozen")
    tensors = ckptstore.open(saved / "ckptstore.toml").run(RUN).latest.tensors
    assert np.array_equal(tensors["model.frozen"][...], STATE["model"]["frozen"])
    travelled = pickle.loads(pickle.dumps(tensors))
    assert np.array_equal(travelled["model.frozen"][3:7], STATE["model"]["frozen"][3:7])


@pytest.mark.parametrize("tensor", ["model.hot", "model.small.1"])
def test_bad_in_both_is_an_error_that_names_both(saved, tensor):
    keys = [flip_chunk(saved, latest(saved), name, tensor) for name in ("hot", "cold")]
    with pytest.raises((ChunkDamagedError, PartlyRestoredError)) as caught:
        latest(saved).restore(blank_like(STATE))
    for said in (f"'{tensor}'", "tier 'hot'", "tier 'cold'", *keys):
        assert said in str(caught.value)
    with pytest.raises(ChunkDamagedError):
        latest(saved).load()


def test_bad_here_and_silent_there_may_be_good_later(saved):
    flip_chunk(saved, latest(saved), "hot", "model.frozen")
    checkpoint = latest(saved)
    with_faults(checkpoint, "cold", Fault("error", op="read_into", times=None))
    with pytest.raises(BackendError, match=r"'model.frozen'.*tier 'hot'.*tier 'cold'"):
        checkpoint.load()


def test_three_tiers_are_asked_in_order(tmp_path):
    make_store(tmp_path, ("hot", "warm", "cold"))
    frozen = flip_chunk(tmp_path, latest(tmp_path), "hot", "model.frozen")
    flip_chunk(tmp_path, latest(tmp_path), "hot", "model.hot")
    for key in objects(latest(tmp_path), "warm", "chunks/"):
        if key[:40] == frozen[:40]:  # the same chunk, under a name of its own
            (tmp_path / "warm" / key).unlink()
    report = restored(latest(tmp_path))
    frozen_bytes = STATE["model"]["frozen"].nbytes
    assert report.bytes_by_tier["cold"] == frozen_bytes
    assert report.bytes_by_tier["warm"] > 0
    assert len(report.damaged) == 3


def test_a_lost_disk_is_restored_from_the_cold_tier(saved):
    shutil.rmtree(saved / "hot")
    report = restored(latest(saved))
    assert report.bytes_by_tier == {"cold": report.bytes_read}


def test_a_run_resumes_through_a_damaged_hot_tier(saved):
    flip_chunk(saved, latest(saved), "hot", "model.frozen")
    with open_store(saved) as store, store.run(RUN) as run:
        target = blank_like(STATE)
        assert run.restore(target) == 1
        assert same(target, STATE)
        assert run.restored.rescued_chunks == 1


def test_the_other_tier_is_pinned_while_it_is_read(saved):
    flip_chunk(saved, latest(saved), "hot", "model.frozen")
    checkpoint = latest(saved)
    cold = with_faults(checkpoint, "cold")
    restored(checkpoint)
    made = [call.op for call in cold.log]
    assert [call.key[:8] for call in cold.log if call.op == "put"] == ["intents/"]
    assert made.index("put") < made.index("read_into") < made.index("delete")
    assert not [path for path in (saved / "cold" / "intents").iterdir() if path.is_file()]


def test_a_read_only_cold_tier_is_read_without_a_pin(saved):
    flip_chunk(saved, latest(saved), "hot", "model.frozen")
    checkpoint = latest(saved)
    with_faults(checkpoint, "cold", Fault("error", op="put", error=PermissionDeniedError("no"), times=None))
    assert restored(checkpoint).rescued_chunks == 1


def test_a_copy_of_another_state_is_refused(tmp_path):
    make_store(tmp_path, steps=(1, 2))
    flip_chunk(tmp_path, latest(tmp_path), "hot", "model.frozen")
    with open_store(tmp_path) as store:
        run = store.run(RUN)
        sources = Sources([copy_in(run[2], "hot"), copy_in(run[1], "cold")], "run 'x' step 2")
        copy, _ = sources.first
        with pytest.raises(ChunkDamagedError, match="is not that of attempt"):
            fetch_all(Fetcher(copy.tier, sources.contents))


def test_differences_are_measured_through_a_damaged_hot_tier(tmp_path):
    make_store(tmp_path, steps=(1, 2))
    for key in objects(latest(tmp_path), "hot", "chunks/"):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "hot" / key).unlink()
    with open_store(tmp_path) as store:
        run = store.run(RUN)
        found = diff(run[1], run[2], values=True)
    assert {change.name for change in found.tensors} >= {"model.hot"}


def fetch_all(fetcher: Fetcher) -> dict[str, np.ndarray]:
    _, contents = fetcher._sources.first
    wants = {}
    for index, tensor in enumerate(contents.layout.tensors):
        raw = np.zeros(tensor.shape, f"u{tensor.dtype.itemsize}")
        wants[tensor.name] = Want(index, Box.whole(tensor.shape), raw)
    fetcher.fetch(list(wants.values()))
    return {name: want.raw for name, want in wants.items()}


@pytest.mark.parametrize("how", ["flipped", "missing", "silent for one"])
def test_ranks_of_a_host_share_what_one_of_them_finds_elsewhere(saved, tmp_path, how):
    place = tmp_path / "shm"
    place.mkdir()
    if how != "silent for one":
        for prefix in ("chunks/", "packs/"):
            for key in objects(latest(saved), "hot", prefix):
                SPOILERS[how](saved / "hot" / key)
    expected = [np.asarray(stored[...]).tobytes() for stored in only(saved, "cold").tensors.values()]
    fetchers = []
    for rank in range(2):
        checkpoint = latest(saved)
        if how == "silent for one" and rank == 1:
            with_faults(checkpoint, "hot", Fault("error", op="read_into", times=None))
        share = HostShare("token", rank, 2, directories=[str(place)], join_seconds=20, deadline_seconds=20)
        fetchers.append(Fetcher(checkpoint.tier, checkpoint.contents, share))
    got: dict[int, Any] = {}

    def run(rank: int) -> None:
        got[rank] = fetch_all(fetchers[rank])

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in range(2):
        assert [got[rank][name].tobytes() for name in sorted(got[rank])] == expected
    assert sum(fetcher.done.rescued_chunks for fetcher in fetchers) > 0
    total = sum(len(array) for array in expected)
    cold = sum(fetcher.done.bytes_by_tier.get("cold", 0) for fetcher in fetchers)
    assert cold <= total, "each chunk is read elsewhere once for all"
