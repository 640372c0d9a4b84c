"""The backend and a whole store on a real server."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import threading

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import (
    BackendError,
    ObjectExistsError,
    PermissionDeniedError,
)
from ckptstore.testing.contract import pattern
from ckptstore_s3 import S3Backend

pytestmark = pytest.mark.s3

MIB = 1 << 20
PART_BYTES = 5 * MIB


@pytest.fixture
def made():
    """Makes backends, and closes them."""
    backends = []

    def make(url, **options):
        backends.append(S3Backend.from_url(url, options))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


def read(backend, key, size):
    buffer = bytearray(size)
    backend.read_into(key, 0, memoryview(buffer))
    return bytes(buffer)


# --- names ----------------------------------------------------------------------------------------


def test_c177_odd_prefixes_are_the_same_in_every_request(s3_url, made):
    odd = made(f"{s3_url}/my runs/a+b%20é=&?#~日本", part_bytes=PART_BYTES)
    near = made(f"{s3_url}/my runs/a b é=&?#~日本")
    near.put("a/1", [b"of another"])
    keys = [f"a/{n}" for n in range(3)]
    for key in keys:
        odd.put(key, [key.encode()], if_absent=key == "a/1")
    odd.put("large", [pattern(2 * PART_BYTES + 1)])
    assert sorted(info.key for info in odd.list("")) == [*keys, "large"]
    assert [odd.get(key, max_bytes=9) for key in keys] == [key.encode() for key in keys]
    with pytest.raises(ObjectExistsError):
        odd.put("a/0", [b""], if_absent=True)
    assert [result.error for result in odd.delete([*keys, "large"])] == [None] * 4
    assert list(odd.list("")) == []
    assert near.get("a/1", max_bytes=10) == b"of another"


# --- large objects --------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
@pytest.mark.parametrize("more", [0, 1, 16])
def test_c181_objects_around_the_size_of_parts_come_back(s3_url, made, more, checksums):
    backend = made(s3_url, part_bytes=PART_BYTES, checksums=checksums)
    content = pattern(2 * PART_BYTES + more, more)
    backend.put("a", [content[:7], content[7 : 6 * MIB], content[6 * MIB :]])
    assert backend.requests["upload_part"] == (3 if more else 0)
    assert read(backend, "a", len(content)) == content
    assert backend.head("a").size_bytes == len(content)


def test_a_large_object_is_created_once(s3_url, made):
    backend = made(s3_url, part_bytes=PART_BYTES)
    first, other = pattern(2 * PART_BYTES + 9, 1), pattern(2 * PART_BYTES + 9, 2)
    backend.put("a", [first], if_absent=True)
    with pytest.raises(ObjectExistsError):
        backend.put("a", [other], if_absent=True)
    assert read(backend, "a", len(first)) == first
    assert list(backend.list_temporaries("")) == []


def test_c184_multipart_can_be_switched_off(s3_url, made):
    backend = made(s3_url, part_bytes=PART_BYTES, multipart=False)
    content = pattern(3 * PART_BYTES)
    backend.put("a", [content])
    assert backend.requests == {"put_object": 1, "head_object": 1}
    assert read(backend, "a", len(content)) == content


def test_unfinished_uploads_are_found_and_aborted_by_delete(s3_url, made):
    backend = made(s3_url)
    backend.put("a/upload-b", [b"an object"])
    started = backend._requests.send("create_multipart_upload", "begin", "a/b")["UploadId"]
    (found,) = backend.list_temporaries("")
    assert found.key == f"a/.b.upload-{started}"
    assert list(backend.list_temporaries("b/")) == []
    assert [info.key for info in backend.list("")] == ["a/upload-b"]
    for _ in range(2):
        assert [result.error for result in backend.delete([found.key])] == [None]
    assert list(backend.list_temporaries("")) == []
    assert [info.key for info in backend.list("")] == ["a/upload-b"]


# --- what is asked --------------------------------------------------------------------------------


def test_conditional_writes_are_probed_once(s3_url, made):
    backend = made(s3_url)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: backend.put(f"a/{n}", [b"1"], if_absent=True), range(4)))
    assert backend.requests == {"put_object": 4 + 2, "delete_object": 1, "head_object": 4}
    assert sorted(info.key for info in backend.list("")) == [f"a/{n}" for n in range(4)]


def test_conditional_writes_can_be_declared(s3_url, made):
    backend = made(s3_url, create_if_absent=True)
    backend.put("a", [b"1"], if_absent=True)
    assert backend.requests == {"put_object": 1, "head_object": 1}
    without = made(s3_url, create_if_absent=False)
    assert not without.capabilities.create_if_absent
    with pytest.raises(BackendError, match="If-None-Match"):
        without.put("b", [b"1"], if_absent=True)
    assert without.requests == {}


def test_a_server_that_answers_with_checksums_is_not_asked_again(s3_url, made):
    backend = made(s3_url, checksums="when_supported")
    for size in (0, 1, 100_000):
        backend.put("a", [pattern(size)])
    assert backend.requests == {"put_object": 3}


def test_many_keys_are_deleted_in_few_requests(s3_url, made):
    backend = made(s3_url)
    keys = [f"a/{n}" for n in range(1001)]
    assert {result.error for result in backend.delete(keys)} == {None}
    assert backend.requests == {"delete_objects": 1, "delete_object": 1}


# --- rights ---------------------------------------------------------------------------------------


def test_wrong_credentials_are_named_with_a_remedy_and_without_the_secret(s3_url, made, monkeypatch):
    backend = made(s3_url)
    attempts = (
        lambda: backend.put("a", [b"1"]),
        lambda: list(backend.list("")),
        lambda: backend.get("a", max_bytes=1),
        lambda: backend.head("a"),
        backend.create_root,
    )
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong-sEcret")
        for attempt in attempts:
            with pytest.raises(PermissionDeniedError) as caught:
                attempt()
            assert caught.value.hint
            assert not caught.value.transient
            assert "sEcret" not in str(caught.value)


def test_a_store_cannot_be_made_in_a_bucket_that_is_not_there(s3_environment):
    with pytest.raises(BackendError, match="no bucket 'ckptstore-no-such-bucket'") as caught:
        ckptstore.init("s3://ckptstore-no-such-bucket/store")
    assert caught.value.hint


# --- processes ------------------------------------------------------------------------------------


def in_child(backend, key, size):
    """Reads and writes; how many requests that took in this process."""
    assert read(backend, key, size) == pattern(size)
    backend.put(f"{key}-child", [b"1"])
    return sum(backend.requests.values())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_c189_children_of_a_busy_parent_have_clients_of_their_own(s3_url, made, method):
    backend = made(s3_url)
    backend.put("a", [pattern(300_000)])
    client = backend._requests.client
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            backend.head("a")

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            children = [pool.submit(in_child, backend, "a", 300_000) for _ in range(2)]
            assert all(child.result(60) >= 3 for child in children)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert backend._requests.client is client
    assert backend.get("a-child", max_bytes=1) == b"1"


# --- a store --------------------------------------------------------------------------------------


def requests_of(store):
    return store.tiers[0].backend.inner.requests


CHUNK_BYTES = 256 << 10


def random_state(step, chunks):
    made = np.random.default_rng(step)
    return {
        "fixed": np.arange(200_000, dtype=np.float32),
        "w": made.integers(0, 256, chunks * CHUNK_BYTES, dtype=np.uint8),
    }


def test_a_store_in_a_bucket_saves_restores_and_verifies_in_few_requests(s3_url):
    url = f"{s3_url}/my store+1"
    saves = {}
    with ckptstore.init(url, chunk_bytes=CHUNK_BYTES) as store:
        run = store.run("train")
        for step, chunks in enumerate((4, 4, 24), 1):
            before = requests_of(store).copy()
            run.save(step, random_state(step, chunks))
            run.wait()
            saves[chunks] = requests_of(store) - before
        run.close()
    with ckptstore.open(url) as store:
        run = store.run("train")
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2, 3]
        before = requests_of(store).copy()
        loaded = run.latest.load()
        loading = requests_of(store) - before
        for name, array in random_state(3, 24).items():
            np.testing.assert_array_equal(loaded[name], array)
        report = store.verify()
        assert (report.complete, report.problems) == (3, ())
    # docs/s3.md: what is new once each, two documents, each with a HEAD; a few GETs; no LIST.
    print(f"saves: {saves}, a load: {loading}")
    for chunks, saved in saves.items():
        assert saved["put_object"] <= chunks + 3
        assert saved["head_object"] <= saved["put_object"] + 4
        assert saved["get_object"] <= 8
        assert saved["list_objects_v2"] == 0
        assert saved["delete_object"] + saved["delete_objects"] <= 2
    assert saves[24]["put_object"] - saves[4]["put_object"] == 20
    assert loading["get_object"] <= 24 + 4 + 6
