"""URLs, options and secrets; who serves which scheme; durability; other processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import pickle
import time
import weakref

import pytest
from fsspec.asyn import AsyncFileSystem

from ckptstore import backend as registry
from ckptstore.errors import BackendError, UnknownSchemeError, UsageError
from ckptstore_fsspec import FsspecBackend
from ckptstore_memory import MemoryBackend


@pytest.mark.parametrize("url", ["fsspec+memory://place", "fsspec+file:///somewhere", "webhdfs://host:1/x"])
def test_what_nothing_else_serves_goes_to_fsspec(url):
    opened = registry.open_backend(url)
    assert isinstance(opened, FsspecBackend)
    assert opened.url == url


def test_memory_stays_our_own():
    assert isinstance(registry.open_backend("memory://place"), MemoryBackend)


def test_fsspec_says_which_schemes_it_serves():
    assert {"gs", "az", "sftp", "memory"} <= set(FsspecBackend.schemes)


def test_a_protocol_that_nobody_knows_is_told():
    with pytest.raises(UnknownSchemeError, match="nosuch"):
        registry.open_backend("fsspec+nosuch://place")


def test_a_package_that_is_missing_is_named():
    pytest.importorskip("fsspec")
    if importlib.util.find_spec("paramiko") is not None:
        pytest.skip("paramiko is installed")
    with pytest.raises(UnknownSchemeError, match="paramiko"):
        registry.open_backend("sftp://host/path")


@pytest.mark.parametrize("url", ["gs://bucket/x", "fsspec+memory://x"])
def test_without_fsspec_the_extra_is_named(monkeypatch, url):
    broken = importlib.metadata.EntryPoint("fsspec", "no_such_module:Backend", registry.ENTRY_POINT_GROUP)
    points = {**registry.installed_schemes(), "fsspec": broken, "gs": broken}
    monkeypatch.setattr(registry, "installed_schemes", lambda: points)
    with pytest.raises(UnknownSchemeError, match=r"ckptstore\[fsspec\]"):
        registry.open_backend(url)


def test_without_fsspec_an_unknown_scheme_is_just_unknown(monkeypatch):
    broken = importlib.metadata.EntryPoint("fsspec", "no_such_module:Backend", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "installed_schemes", lambda: {"fsspec": broken})
    with pytest.raises(UnknownSchemeError, match="no backend for webhdfs"):
        registry.open_backend("webhdfs://host/x")


@pytest.mark.parametrize(
    "url", ["fsspec+memory://", "fsspec+file:///", "webhdfs://user:secret@host/x", "fsspec+memory:x"]
)
def test_urls_that_cannot_be_used(url):
    with pytest.raises(UsageError) as caught:
        FsspecBackend.from_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        3,
        {"nosuch": 1},
        {"writes": "somehow"},
        {"create_if_absent": 1},
        {"concurrency": 0},
        {"concurrency": True},
        {"create_bucket": "yes"},
    ],
)
def test_settings_that_cannot_be_used(settings):
    with pytest.raises(UsageError, match="ckptstore"):
        FsspecBackend.from_url("fsspec+memory://x", {"ckptstore": settings})


def test_options_that_the_file_system_refuses_are_a_backend_error():
    backend = FsspecBackend.from_url("az://container/x", {"account_name": "a", "connection_string": "b"})
    with pytest.raises(BackendError):
        list(backend.list(""))


@pytest.mark.parametrize(
    "options",
    [
        {"token": "ya29.hunter2"},
        {"account_key": "hunter2"},
        {"sas_token": "hunter2"},
        {"connection_string": "AccountKey=hunter2"},
        {"password": "hunter2"},
        {"secret": "hunter2"},
        {"client_secret": "hunter2"},
        {"nested": {"deep": {"passphrase": "hunter2"}}},
    ],
)
def test_a_pickle_holds_no_secrets(options):
    backend = FsspecBackend.from_url("fsspec+memory://x", {"plain": "kept", **options})
    held = pickle.dumps(backend)
    assert b"hunter2" not in held
    assert b"hunter2" not in repr(backend._place).encode()
    copy = pickle.loads(held)
    assert copy._place.options == {"plain": "kept"}
    assert copy._place.withheld == tuple(options)
    assert pickle.loads(pickle.dumps(copy))._place.withheld == tuple(options)


@pytest.mark.parametrize(
    "options",
    [{"token": "anon", "project": "p"}, {"account_name": "a", "anon": True}, {"host_key_policy": "reject"}],
)
def test_a_pickle_holds_the_rest(options):
    settings = {"ckptstore": {"create_bucket": True}}
    copy = pickle.loads(pickle.dumps(FsspecBackend.from_url("fsspec+memory://x", {**options, **settings})))
    assert copy._place.options == options
    assert copy._place.settings.create_bucket
    assert copy._place.withheld == ()


def test_a_file_of_this_host_and_its_name_are_synced_before_put_returns(tmp_path, monkeypatch):
    backend = registry.open_backend(f"fsspec+file://{tmp_path}/store")
    backend.create_root()
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    backend.put("a/b/c", [b"1"])
    root = str(tmp_path / "store")
    assert synced[:2] == [root, f"{root}/a"]
    assert synced[2].startswith(f"{root}/a/b/.c.")
    assert synced[3:] == [f"{root}/a/b"]


@pytest.mark.parametrize("scheme", ["az", "gs"])
def test_a_forked_child_leaves_when_it_is_done(request, bucket, scheme):
    request.getfixturevalue("azure_environment" if scheme == "az" else "google_environment")
    options = {"token": "anon", "project": "test"} if scheme == "gs" else {}
    backend = registry.open_backend(
        f"{scheme}://{bucket}/x", {**options, "ckptstore": {"create_bucket": True}}
    )
    backend.create_root()
    backend.put("a", [b"1"])
    child = os.fork()
    if child == 0:
        # What an ordinary exit would run of the file systems' own: here the rest is the test's.
        for finalizer in list(weakref.finalize._registry):
            if finalizer.alive and finalizer.atexit and isinstance(finalizer.peek()[0], AsyncFileSystem):
                finalizer()
        os._exit(0)
    deadline = time.monotonic() + 20
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.02)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done
    assert status == 0
    assert backend.get("a", max_bytes=1) == b"1"


def _reads(backend, queue):
    queue.put(backend.get("a", max_bytes=1))
    backend.put("b", [b"2"], if_absent=True)


@pytest.mark.parametrize("method", ["spawn"])  # a fork server keeps the environment of its start
def test_a_handle_goes_to_a_new_process(google_environment, bucket, method):
    options = {"token": "anon", "project": "test", "ckptstore": {"create_bucket": True}}
    backend = registry.open_backend(f"gs://{bucket}/store", options)
    backend.create_root()
    backend.put("a", [b"1"])
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_reads, args=(backend, queue))
    child.start()
    assert queue.get(timeout=60) == b"1"
    child.join(60)
    assert child.exitcode == 0
    assert backend.get("b", max_bytes=1) == b"2"
    queue.close()
    queue.join_thread()
