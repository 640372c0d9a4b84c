"""The file of an export: whole or not there, its mode, what it replaces."""

from __future__ import annotations

import errno
import os
import stat

import pytest
import torch

from ckptstore.errors import ConflictError, OutOfSpaceError, UsageError
from ckptstore.transfer import export, files
from tests.transfer.made import save, tensor_of

SUFFIXES = ["safetensors", "pt", "npz"]


@pytest.fixture
def source(store):
    return save(store, {"model": {"w": tensor_of("float32", (700, 900)), "b": torch.ones(3)}})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_existing_file_is_replaced_only_when_asked(source, tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(b"mine")
    path.chmod(0o640)
    with pytest.raises(ConflictError, match="overwrite=True"):
        export(source, path)
    assert path.read_bytes() == b"mine"
    export(source, path, overwrite=True)
    assert len(path.read_bytes()) > 2_000_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o027, 0o640)])
def test_a_new_file_has_the_mode_that_the_umask_leaves(source, tmp_path, umask, mode):
    old = os.umask(umask)
    try:
        export(source, tmp_path / "x.pt")
        export(source, tmp_path / "out", max_shard_bytes=100)
    finally:
        os.umask(old)
    for path in (tmp_path / "x.pt", *(tmp_path / "out").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("suffix", [*SUFFIXES, "shards"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_what_was_there(source, tmp_path, monkeypatch, suffix, existing):
    path = tmp_path / f"x.{suffix}"
    options = {"max_shard_bytes": 100} if suffix == "shards" else {}
    if existing:
        export(source, path, **options)
    before = {p: p.read_bytes() for p in [path, *tmp_path.glob("x.shards/*")] if p.is_file()}

    def no_space(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_space)
    with pytest.raises(OutOfSpaceError):
        export(source, path, overwrite=existing, **options)
    monkeypatch.undo()
    assert {p: p.read_bytes() for p in [path, *tmp_path.glob("x.shards/*")] if p.is_file()} == before
    assert not list(tmp_path.rglob("*.tmp"))
    assert path.exists() == existing


def test_what_appears_meanwhile_is_not_replaced(source, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    finish = files.NewFile.finish

    def finish_late(self):
        size = finish(self)
        path.write_bytes(b"another's")
        return size

    monkeypatch.setattr(files.NewFile, "finish", finish_late)
    with pytest.raises(ConflictError, match="exists already"):
        export(source, path)
    assert path.read_bytes() == b"another's"
    assert not list(tmp_path.glob("*.tmp"))


def test_without_hard_links_it_is_renamed(source, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", no_links)
    export(source, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")["model"]["b"].tolist() == [1, 1, 1]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_link_is_followed_and_other_things_are_refused(source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "x.pt").symlink_to(tmp_path / "there" / "real.pt")
    export(source, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").is_symlink()
    assert (tmp_path / "there" / "real.pt").is_file()
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path / "pipe.pt", tmp_path / "there"):
        with pytest.raises(ConflictError, match="not a file"):
            export(source, path, format="torch", overwrite=True)
    with pytest.raises(ConflictError, match="not a directory"):
        export(source, tmp_path / "pipe.pt", max_shard_bytes=100, overwrite=True)
    with pytest.raises(UsageError, match="make it first"):
        export(source, tmp_path / "absent" / "x.pt")


def test_a_name_of_the_greatest_length_works(source, tmp_path):
    path = tmp_path / ("x" * 250 + ".pt")
    export(source, path)
    assert path.is_file()
