"""Local file systems: space, rights, links, moves, races, names."""

from __future__ import annotations

import errno
import functools
import itertools
import multiprocessing
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
import ckptstore_local._sys as calls
from ckptstore.errors import CkptstoreError, ConflictError, OutOfSpaceError
from tests.crash._support import CHUNK_BYTES, TRAIN, blank_like, make_state, quiet, same


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES).close()
    return tmp_path / "store"


@pytest.mark.parametrize("call", ["pwrite", "fsync", "link", "open"])
def test_c199_one_transient_error_is_tried_again_and_a_lasting_one_goes_to_the_caller(
    directory, monkeypatch, call
):
    original = getattr(calls, call)
    failures = [0]

    def failing(*args, **kwargs):
        if failures[0]:
            failures[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*args, **kwargs)

    with ckptstore.open(directory, environment=quiet()) as store:
        run = store.run(TRAIN)
        run.save(1, make_state(1)).result()
        monkeypatch.setattr(calls, call, failing)
        failures[0] = 1
        assert run.save(2, make_state(2)).result().step == 2
        failures[0] = 10_000
        with pytest.raises(CkptstoreError):
            run.save(3, make_state(3)).result()
        failures[0] = 0
        assert run.save(4, make_state(4)).result() == run.latest
        assert same(run.latest.load(), make_state(4))


def test_c199_a_used_up_quota_is_told_as_no_space(directory, monkeypatch):
    def full(*_args):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with ckptstore.open(directory, environment=quiet()) as store:
        run = store.run(TRAIN)
        with monkeypatch.context() as patch:
            patch.setattr(calls, "pwrite", full)
            with pytest.raises(OutOfSpaceError, match="quota"):
                run.save(1, make_state(1)).result()
        assert run.save(2, make_state(2)).result() == run.latest


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_c201_files_and_folders_have_the_mode_that_the_umask_says(tmp_path, umask):
    old = os.umask(umask)
    try:
        root = tmp_path / "shared"
        root.mkdir()
        root.chmod(0o2777 & ~umask)
        with ckptstore.init(root / "store", chunk_bytes=CHUNK_BYTES) as store:
            run = store.run(TRAIN)
            run.save(1, make_state(1)).result()
            run.tag(1, "gold")
    finally:
        os.umask(old)
    for path in (root / "store").rglob("*"):
        if path.name == "manifest.db":
            continue
        mode = stat.S_IMODE(path.lstat().st_mode)
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert mode & 0o777 == wanted, f"{path.name} has mode {mode:o}"
        if path.is_dir():
            assert mode & stat.S_ISGID, "the setgid bit is not passed on"


def test_c201_the_manifest_has_the_mode_that_the_umask_says(tmp_path):
    old = os.umask(0o002)
    try:
        with ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as store:
            store.run(TRAIN).save(1, make_state(1)).result()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "store" / "manifest.db").stat().st_mode) == 0o664


def test_c202_a_store_moves_and_is_opened_by_any_path(directory, tmp_path, monkeypatch):
    """Nothing in a store holds a path: there is no link to go stale."""
    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(1, make_state(1)).result()
    assert not [path for path in directory.rglob("*") if path.is_symlink()]
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    directory.rename(moved)
    monkeypatch.chdir(moved.parent)
    with ckptstore.open("moved") as store:
        monkeypatch.chdir("/")  # a relative path counts from when it was given
        run = store.run(TRAIN)
        assert same(run.latest.load(), make_state(1))
        assert run.save(2, make_state(2)).result() == run.latest


def test_c204_the_root_may_be_a_link_and_a_loop_is_an_error(directory, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(directory)
    with ckptstore.open(link) as store:
        store.run(TRAIN).save(1, make_state(1)).result()
    with ckptstore.open(directory) as store:
        assert same(store.run(TRAIN).latest.load(), make_state(1))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for create in (False, True):
        with pytest.raises(CkptstoreError, match="loop"):
            ckptstore.open(loop, create=create)


def test_c204_latest_follows_the_records_and_no_link(directory):
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        run.save(1, make_state(1), metrics={"loss": 1.0}).result()
        run.save(2, make_state(2), metrics={"loss": 2.0}).result()
        run.invalidate(1, "diverged")
        assert run.latest.step == 2
        assert run.best("loss", "min").step == 2


def _init(path: Path) -> str:
    try:
        ckptstore.init(path, chunk_bytes=CHUNK_BYTES).close()
    except CkptstoreError as error:
        return error.kind
    return "made"


def test_c206_many_processes_that_make_one_store_at_once_make_one(tmp_path):
    with multiprocessing.get_context("spawn").Pool(6) as pool:
        for number in range(3):
            outcomes = pool.map(_init, [tmp_path / f"init-{number}"] * 6, chunksize=1)
            assert outcomes.count("made") == 1, outcomes
            assert set(outcomes) <= {"made", "conflict"}


class _Interloper:
    """Lets `other` act once, right after call `number` of `calls` that this process makes.

    Not after each of the hundreds that make the directories of chunks and packs.
    """

    NAMES = ("open", "mkdir", "scandir", "link")

    def __init__(self, number: int, other: Callable[[], object]) -> None:
        self._left, self._other = number, other
        self._inside = False

    @property
    def has_acted(self) -> bool:
        return self._left < 0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in self.NAMES:
            monkeypatch.setattr(calls, name, functools.partial(self._call, getattr(calls, name)))

    def _call(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        try:
            return original(*args, **kwargs)
        finally:
            if not self._inside and not re.search("/(chunks|packs)", str(args[0])):
                self._inside, self._left = True, self._left - 1
                if self._left == -1:
                    self._other()
                self._inside = False


@pytest.mark.parametrize("make", ["init", "open"])
def test_c206_a_store_that_another_process_makes_at_any_moment_is_that_store(tmp_path, monkeypatch, make):
    def other() -> None:
        try:
            ckptstore.init(path, chunk_bytes=CHUNK_BYTES).close()
        except ConflictError:
            made_by.append("us")

    outcomes = set()
    for number in itertools.count():
        path = tmp_path / f"store-{number}"
        made_by: list[str] = []
        interloper = _Interloper(number, other)
        with monkeypatch.context() as patch:
            interloper.watch(patch)
            try:
                if make == "init":
                    ckptstore.init(path, chunk_bytes=CHUNK_BYTES).close()
                else:
                    ckptstore.open(path, create=True, chunk_bytes=CHUNK_BYTES).close()
            except ConflictError:
                made_by.append("other")
        if not interloper.has_acted:
            break
        outcomes.update(made_by)
        assert len(made_by) == 1 or make == "open", (number, made_by)
        ckptstore.open(path).close()
    assert number > 10
    assert outcomes >= {"us"} if make == "open" else outcomes == {"us", "other"}


def test_c206_a_folder_that_exists_and_yet_is_not_there_is_made_again(tmp_path, monkeypatch):
    """Some network file systems say EEXIST to mkdir and ENOENT to the next stat."""
    make, look = calls.mkdir, calls.stat
    confused: list[str] = []

    def mkdir(path, *args, **kwargs):
        if str(path).endswith("chunks/7f") and not confused:
            confused.append(str(path))
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return make(path, *args, **kwargs)

    def stat_(path, *args, **kwargs):
        if confused == [str(path)]:
            confused.append("told")
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return look(path, *args, **kwargs)

    monkeypatch.setattr(calls, "mkdir", mkdir)
    monkeypatch.setattr(calls, "stat", stat_)
    with ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as store:
        assert store.run(TRAIN).save(1, make_state(1)).result().step == 1


def test_c207_writers_of_the_same_content_and_step_never_share_a_name(directory):
    names: list[str] = []
    failed: list[BaseException] = []

    def train(run: str) -> None:
        try:
            with ckptstore.open(directory, environment=quiet()) as store:
                for step in range(25):
                    checkpoint = store.run(run).save(step, make_state(3)).result()
                    names.extend(checkpoint.contents.object_sizes)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(f"run {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    with ckptstore.open(directory) as store:
        owners: dict[str, set[str]] = {}
        for i in range(4):
            for checkpoint in store.run(f"run {i}").checkpoints():
                assert same(checkpoint.load(), make_state(3))
                for key in checkpoint.contents.object_sizes:
                    owners.setdefault(key, set()).add(checkpoint.run)
        assert all(len(runs) == 1 for runs in owners.values())
    assert not list(directory.rglob(".*.tmp"))


NAMES = [
    "val/loss",
    "team/exp 1",
    "a/b",
    "../../etc/passwd",
    "..",
    ".",
    "-rf",
    "~",
    "C:\\x",
    "né\n",
    "%2e%2e",
    "a" * 300,
]


@pytest.mark.parametrize("name", NAMES)
def test_c209_no_path_is_ever_built_from_a_name(directory, name):
    before = set(directory.parent.iterdir())
    with ckptstore.open(directory) as store:
        run = store.run(name)
        run.save(1, {"model": {name: make_state(1)["model"]["small"]["0"]}}, metrics={name: 1.0}).result()
        tag = name.replace("\n", "")[:200]
        run.tag(1, tag)
        assert store.run(name).find(tag).step == 1
        assert run.latest.metrics == {name: 1.0}
        assert list(run.latest.load()["model"]) == [name]
        assert [row.run for row in store.runs()] == [name]
    assert set(directory.parent.iterdir()) == before
    depth = max(len(path.relative_to(directory).parts) for path in directory.rglob("*"))
    assert depth == 4, "runs/<key>/epochs/<n>.mp is the deepest"
    plain = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert all(set(path.name) <= plain for path in directory.rglob("*"))


@pytest.mark.parametrize(
    "name",
    [
        b"new\nline", b"a#b", b"a?mode=memory", b"a%41", b"sp ace",
        b"quote'\"", b"\xff\xfe", "schön".encode(),
        b"x" * 255, b"file:", b"-dash",
    ],
    ids=repr,
)  # fmt: skip
def test_g09_any_path_opens(tmp_path, name):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    with ckptstore.init(path, chunk_bytes=CHUNK_BYTES, environment=quiet()) as store:
        store.run(TRAIN).save(1, make_state(1)).result()
        url = store.url
    assert os.listdir(os.fsencode(tmp_path)) == [name], "something was made at another place"
    for location in (path, Path(path), url):
        with ckptstore.open(location, environment=quiet()) as store:
            state = blank_like(make_state(0))
            assert store.run(TRAIN).restore(state) == 1
            assert same(state, make_state(1))
            assert str(store).encode("utf-8", "backslashreplace")


@pytest.mark.parametrize("name", ["x" * 256, "nul\0", ""])
def test_g09_a_path_that_cannot_be_is_refused_clearly(tmp_path, name):
    path = f"{tmp_path}/{name}" if name else ""
    for make in (ckptstore.init, ckptstore.open):
        with pytest.raises(CkptstoreError):
            make(path)
    assert list(tmp_path.iterdir()) == []
