from __future__ import annotations

import dataclasses
import os
import threading

import pytest

from ckptstore.errors import BackendError, PermissionDeniedError, UsageError
from ckptstore.metrics.textfile import TextfileWriter, write_textfile
from tests.metrics.made import AWKWARD, COMMITTED, FAILED, RESTORED
from tests.metrics.test_exposition import parsed


def test_the_file_is_rewritten_with_every_event(tmp_path):
    path = tmp_path / "gpt.prom"
    hook = TextfileWriter(path)
    assert not path.exists()  # one from the process before stays until there is something to say
    hook.saved(dataclasses.replace(COMMITTED, run=AWKWARD))
    hook.restored(dataclasses.replace(RESTORED, run=AWKWARD))
    found = parsed(path.read_bytes().decode())  # the name has a carriage return
    assert found["ckptstore_last_save_step"] == [
        ("ckptstore_last_save_step", {"run": AWKWARD, "rank": "0"}, 500.0)
    ]
    assert found["ckptstore_restore_seconds"][1][2] == 1.0
    assert os.listdir(tmp_path) == ["gpt.prom"]


def test_the_umask_decides_who_may_read_it(tmp_path):
    before = os.umask(0o022)
    try:
        write_textfile(tmp_path / "a.prom", "")
    finally:
        os.umask(before)
    assert (tmp_path / "a.prom").stat().st_mode & 0o777 == 0o644


def test_a_reader_sees_a_whole_file_while_it_is_rewritten(tmp_path):
    path = tmp_path / "a.prom"
    texts = {letter * 50_000 for letter in "ab"}
    write_textfile(path, "a" * 50_000)
    ended = threading.Event()

    def write():
        for _ in range(100):
            for text in texts:
                write_textfile(path, text)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while not ended.is_set():
        assert path.read_text() in texts
        seen += 1
    thread.join()
    assert seen
    assert os.listdir(tmp_path) == ["a.prom"]


def test_only_rank_0_writes_unless_each_has_its_file(tmp_path):
    one, each = TextfileWriter(tmp_path / "one.prom"), TextfileWriter(tmp_path / "each-{rank}.prom")
    for rank in (2, 1):
        event = dataclasses.replace(COMMITTED, rank=rank, world_size=3)
        one.saved(event)
        each.saved(event)
    one.restored(dataclasses.replace(RESTORED, rank=1))
    assert sorted(os.listdir(tmp_path)) == ["each-1.prom", "each-2.prom"]


def test_the_namespace(tmp_path):
    TextfileWriter(tmp_path / "a.prom", namespace="ours").saved(FAILED)
    assert set(parsed((tmp_path / "a.prom").read_text())) == {
        "ours_saves",
        "ours_save_failures",
        "ours_save_blocked_seconds",
        "ours_save_phase_seconds",
    }
    with pytest.raises(UsageError, match="namespace"):
        TextfileWriter(tmp_path / "a.prom", namespace="a b")


def test_a_name_that_the_collector_would_not_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"\.prom"):
        TextfileWriter(tmp_path / "gpt.txt")


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(BackendError, match="its directory must exist"):
        TextfileWriter(tmp_path / "no" / "gpt.prom").saved(COMMITTED)


def test_what_is_no_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "a.prom"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="no regular file"):
        write_textfile(pipe, "")
    with pytest.raises(UsageError, match="no regular file"):
        write_textfile(tmp_path, "")
    assert os.listdir(tmp_path) == ["a.prom"]


def test_where_it_cannot_be_written_the_old_one_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.prom"
    write_textfile(path, "old\n")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(PermissionDeniedError, match=r"a\.prom"):
        write_textfile(path, "new\n")
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["a.prom"]
