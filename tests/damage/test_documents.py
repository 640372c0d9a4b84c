"""Records, markers and other documents that are damaged, hostile or from another time."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import msgpack
import pytest

import ckptstore
from ckptstore.errors import (
    CkptstoreError,
    ConflictError,
    DamageError,
    DocumentError,
    FormatTooNewError,
    StoreNotFoundError,
    WrongStoreError,
)
from ckptstore.model.ids import digest_of
from tests.crash._support import CHUNK_BYTES, TRAIN, blank_like, make_state, quiet, same
from tests.damage._support import flip, make_store, open_quiet, record_file, truncate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path):
    make_store(tmp_path / "store")
    return tmp_path / "store"


def sealed(body: bytes, *, number: int = 1, kind: str = "commit") -> bytes:
    return msgpack.packb({"format": number, "kind": kind, "digest": digest_of(body), "body": body})


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


SPOILED_RECORDS = {
    "truncated": truncate,
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "first byte": lambda path: flip(path, 0),
    "middle byte": lambda path: flip(path, path.stat().st_size // 2),
    "last byte": lambda path: flip(path, -1),
    "huge": sparse,
    "nested": lambda path: path.write_bytes(b"\x91" * 200_000 + b"\xc0"),
    "nested inside": lambda path: path.write_bytes(sealed(b"\x81\xa1a" * 100_000 + b"\xc0")),
    "not a map": lambda path: path.write_bytes(sealed(msgpack.packb([1] * 200))),
    "a map of nothing": lambda path: path.write_bytes(sealed(msgpack.packb({"x": "y" * 200}))),
    "of another kind": lambda path: path.write_bytes(sealed(msgpack.packb({"x": "y" * 200}), kind="note")),
    "json": lambda path: path.write_text('{"format": 1}' + " " * 200),
    "claims 4 GiB": lambda path: path.write_bytes(b"\xdf\xff\xff\xff\xff" * 40),
}


@pytest.mark.parametrize("spoiler", SPOILED_RECORDS)
def test_a_spoiled_record_is_named_and_never_passed_over_in_silence(directory, spoiler, caplog):
    with open_quiet(directory) as store:
        path = record_file(store, directory, 3)
    SPOILED_RECORDS[spoiler](path)
    with open_quiet(directory) as store:
        store.rebuild()
        run = store.run(TRAIN)
        state = blank_like(make_state(0))
        with pytest.raises(DamageError, match="step 3") as caught:
            run.restore(state)
        assert TRAIN in str(caught.value)
        assert "fallback" in (caught.value.hint or "")
        assert same(state, blank_like(make_state(0))), "changed before the error"
        for step in (1, 2):
            assert same(run[step].load(), make_state(step))
        with caplog.at_level(logging.WARNING):
            assert run.restore(state, fallback=True) == 2
        assert same(state, make_state(2))
        assert any("step 3" in line for line in run.restored.passed_over)
        assert store.verify().problems
        assert run.save(4, make_state(4)).result() == run.latest


def test_a_record_of_a_newer_format_says_so(directory):
    with open_quiet(directory) as store:
        path = record_file(store, directory, 3)
    path.write_bytes(sealed(msgpack.packb({"new": "x" * 200}), number=2))
    with open_quiet(directory) as store:
        store.rebuild()
        run = store.run(TRAIN)
        with pytest.raises((DamageError, FormatTooNewError), match="format 2"):
            run.restore(blank_like(make_state(0)))
        assert same(run[2].load(), make_state(2))


@pytest.mark.parametrize("step", [1, 2])
def test_an_older_record_that_is_spoiled_does_not_stop_the_newest(directory, step):
    with open_quiet(directory) as store:
        flip(record_file(store, directory, step), 60)
    with open_quiet(directory) as store:
        store.rebuild()
        state = blank_like(make_state(0))
        assert store.run(TRAIN).restore(state) == 3
        assert same(state, make_state(3))


MEMORY_BOMBS = {
    "maps in the envelope": lambda: b"\xdd" + (40 << 20).to_bytes(4, "big") + b"\x80" * (40 << 20),
    "lists in the body": lambda: sealed(
        b"\x81\xa1a\xdd" + (40 << 20).to_bytes(4, "big") + b"\x90" * (40 << 20)
    ),
}


def run_limited(directory: Path, code: str, *, mebibytes: int = 1500) -> str:
    """Runs `code` with so much address space; returns what it prints."""
    program = f"""
        import resource, sys
        import numpy, ckptstore, ckptstore_local
        from ckptstore.errors import *
        from tests.damage._support import *
        from tests.crash._support import *
        directory = Path({str(directory)!r})
        resource.setrlimit(resource.RLIMIT_AS, ({mebibytes} << 20, {mebibytes} << 20))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


RESTORE_OR_TELL = """
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        try:
            run.restore(blank_like(make_state(0)))
        except DamageError as error:
            print("told")
        assert same(run[2].load(), make_state(2))
        print("others load")
"""


def test_a_huge_record_takes_no_memory(directory):
    with open_quiet(directory) as store:
        path = record_file(store, directory, 3)
    sparse(path)
    (directory / "manifest.db").unlink()
    assert run_limited(directory, RESTORE_OR_TELL).split("\n")[:2] == ["told", "others load"]


@pytest.mark.parametrize("bomb", MEMORY_BOMBS)
def test_a_record_of_very_many_small_things_takes_no_memory(directory, bomb):
    with open_quiet(directory) as store:
        path = record_file(store, directory, 3)
    path.write_bytes(MEMORY_BOMBS[bomb]())
    (directory / "manifest.db").unlink()
    assert run_limited(directory, RESTORE_OR_TELL).split("\n")[:2] == ["told", "others load"]


HOSTILE_LAYOUTS = {
    "a tensor of 2**60 bytes": "(1 << 60,)",
    "a tensor of 2**62 rows": "(1 << 62, 4)",
    "a tensor whose size overflows": "(1 << 62, 1 << 62, 1 << 62)",
}


@pytest.mark.parametrize("shape", HOSTILE_LAYOUTS)
def test_a_layout_that_claims_more_than_it_has_chunks_for_takes_no_memory(directory, shape):
    code = f"""
        import dataclasses
        from ckptstore.model.boxes import Box
        from ckptstore.model.documents import encode_record
        from ckptstore.model.ids import digest_of
        from ckptstore.model.record import TableRef

        with open_quiet(directory) as store:
            checkpoint = store.run(TRAIN)[3]
            layout = checkpoint.contents.layout
            shape = {HOSTILE_LAYOUTS[shape]}
            big = dataclasses.replace(layout.tensors[0], shape=shape, boxes=(Box.whole(shape),))
            hostile = dataclasses.replace(layout, tensors=(big, *layout.tensors[1:]))
            data = hostile.encode()
            record = checkpoint.record
            tables = {{**record.tables, "layout": TableRef(digest_of(data), len(data), data)}}
            path = record_file(store, directory, 3)
            path.write_bytes(encode_record(dataclasses.replace(record, tables=tables)))
        (directory / "manifest.db").unlink()
    """
    out = run_limited(directory, textwrap.dedent(code) + textwrap.dedent(RESTORE_OR_TELL))
    assert out.split("\n")[:2] == ["told", "others load"]


# --- other documents ----------------------------------------------------------------------------


def only_file(folder: Path) -> Path:
    (found,) = folder.rglob("*.mp")
    return found


def test_a_damaged_note_does_not_stop_the_training(directory):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        run.restore(blank_like(make_state(0)))
        run.tag(3, "gold")
        truncate(only_file(directory / "notes" / run.key))
        assert run.save(4, make_state(4)).result().step == 4


def test_a_damaged_epoch_does_not_stop_the_training(directory):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        truncate(only_file(directory / "runs" / run.key / "epochs"))
        run.restore(blank_like(make_state(0)))
        assert run.save(4, make_state(4)).result().step == 4


def test_a_damaged_run_document_does_not_hide_the_other_runs(directory):
    with open_quiet(directory) as store:
        store.run("other").save(1, make_state(1)).result()
        flip(directory / "runs" / store.run("other").key / "run.mp", 30)
    (directory / "manifest.db").unlink()
    with open_quiet(directory) as store:
        assert TRAIN in [row.run for row in store.runs()]


def test_a_damaged_run_document_is_named_and_leaves_the_others_alone(directory):
    with open_quiet(directory) as store:
        other = store.run("other")
        other.save(1, make_state(1)).result()
        flip(directory / "runs" / other.key / "run.mp", 30)
    with open_quiet(directory) as store:
        assert same(store.run(TRAIN).latest.load(), make_state(3))
        with pytest.raises(DocumentError, match=store.run("other").key):
            store.run("other").checkpoints()


# --- the marker ---------------------------------------------------------------------------------


def snapshot(directory: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_size for path in sorted(directory.rglob("*"))}


def replaced_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILED_MARKERS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": truncate,
    "no json": lambda path: path.write_bytes(b"\xff\xfe\x00" * 50),
    "another json": lambda path: path.write_text("[]"),
    "nested json": lambda path: path.write_text("[" * 30_000),
    "huge": sparse,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": replaced_by_fifo,
    "a symlink": lambda path: (path.rename(path.with_name("real.json")), path.symlink_to("real.json")),
}


@pytest.mark.parametrize("spoiler", SPOILED_MARKERS)
def test_a_spoiled_marker_is_refused_and_nothing_is_written(directory, spoiler):
    SPOILED_MARKERS[spoiler](directory / "ckptstore.json")
    before = snapshot(directory)
    for create in (False, True):
        with pytest.raises(DocumentError, match="marker"):
            ckptstore.open(directory, create=create, environment=quiet())
    with pytest.raises((DocumentError, ConflictError)):
        ckptstore.init(directory, environment=quiet())
    assert snapshot(directory) == before


def test_a_store_of_a_newer_format_is_refused_by_name(directory):
    marker = directory / "ckptstore.json"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(FormatTooNewError, match="format 2"):
        open_quiet(directory)


def test_an_unknown_feature_is_refused_by_name(directory):
    marker = directory / "ckptstore.json"
    marker.write_text(marker.read_text().replace('"features": []', '"features": ["time travel"]'))
    with pytest.raises(FormatTooNewError, match="time travel"):
        open_quiet(directory)


def test_a_missing_marker_is_no_store_and_none_is_made_beside_its_data(directory):
    (directory / "ckptstore.json").unlink()
    before = snapshot(directory)
    for create in (False, True):
        with pytest.raises((StoreNotFoundError, ConflictError)):
            ckptstore.open(directory, create=create, environment=quiet())
    with pytest.raises(ConflictError):
        ckptstore.init(directory, environment=quiet())
    assert snapshot(directory) == before


def lose_marker(directory: Path) -> None:
    (directory / "ckptstore.json").unlink()


def other_marker(directory: Path) -> None:
    other = directory.with_name("other")
    ckptstore.init(other, chunk_bytes=CHUNK_BYTES, environment=quiet()).close()
    os.replace(other / "ckptstore.json", directory / "ckptstore.json")


def empty_mount(directory: Path) -> None:
    directory.rename(directory.with_name("away"))
    directory.mkdir()


def no_mount(directory: Path) -> None:
    directory.rename(directory.with_name("away"))


LOSSES = {
    "marker gone": lose_marker,
    "another store": other_marker,
    "empty mount": empty_mount,
    "no mount": no_mount,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_store_lost_in_the_middle_of_a_session_is_not_written_to(directory, loss):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        run.restore(blank_like(make_state(0)))
        assert run.save(4, make_state(4)).result().step == 4
        fresh = store.run("fresh")
        LOSSES[loss](directory)
        before = snapshot(directory)
        for act in (
            lambda: run.save(5, make_state(5)).result(),
            lambda: fresh.save(1, make_state(1)).result(),
            fresh.start,
        ):
            with pytest.raises(WrongStoreError, match="mounted"):
                act()
        assert snapshot(directory) == before, "something was written in the place of the store"


@pytest.mark.parametrize("loss", ["marker gone", "another store"])
def test_a_store_lost_in_the_middle_of_a_save_gets_no_record(directory, loss, monkeypatch):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        inner = store.tier.backend.inner
        original = inner.sync

        def sync():
            original()
            monkeypatch.undo()
            LOSSES[loss](directory)

        monkeypatch.setattr(inner, "sync", sync)
        with pytest.raises(CkptstoreError, match="mounted"):
            run.save(4, make_state(4)).result()
        found = [path for path in (directory / "commits").rglob("*-4-*.mp") if path.stat().st_size >= 128]
        assert not found


@pytest.mark.parametrize("loss", ["marker gone", "another store"])
def test_notes_and_pins_are_not_written_to_a_lost_store(directory, loss):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        checkpoint = run[3]
        LOSSES[loss](directory)
        before = {key for key in snapshot(directory) if key.endswith(".mp")}
        for act in (
            lambda: run.tag(checkpoint, "gold"),
            lambda: run.annotate(checkpoint, metrics={"loss": 1}),
            lambda: run.invalidate(checkpoint, "bad"),
            lambda: run.pin(checkpoint),
        ):
            with pytest.raises(CkptstoreError):
                act()
        assert {key for key in snapshot(directory) if key.endswith(".mp")} == before


def test_an_empty_mount_point_is_never_taken_for_a_run_without_checkpoints(directory):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        empty_mount(directory)
        with pytest.raises(CkptstoreError):
            run.restore(blank_like(make_state(0)))


def test_looking_makes_nothing_in_an_empty_mount_point(directory):
    with open_quiet(directory) as store:
        run = store.run(TRAIN)
        empty_mount(directory)
        with contextlib.suppress(CkptstoreError):
            assert run.latest is None
        assert list(directory.iterdir()) == []
