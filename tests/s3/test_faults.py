"""Faults between the client and an S3 server: what one call of the backend makes of them."""

from __future__ import annotations

import os
import threading

import pytest

from ckptstore.errors import (
    BackendError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermissionDeniedError,
)
from tests.s3._faulty import PART_BYTES, PREFIX, rigged

LARGE = os.urandom(2 * PART_BYTES + 1000)
CHUNK = os.urandom(100_000)


@pytest.fixture
def rig(monkeypatch):
    with rigged(monkeypatch) as rig:
        yield rig


def read(backend, key, size):
    buffer = bytearray(size)
    backend.read_into(key, 0, memoryview(buffer))
    return bytes(buffer)


# --- the place asks for patience, or fails for a moment ------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "SlowDown"),
        (500, "InternalError"),
        (429, "TooManyRequests"),
        (409, "ConditionalRequestConflict"),
    ],
)
@pytest.mark.parametrize("if_absent", [False, True])
def test_a_put_that_was_refused_for_now_is_stored_once(rig, status, code, if_absent):
    backend = rig.retrying(create_if_absent=True)
    rig.proxy.add("status", "PutObject", status=status, code=code, times=2)
    backend.put("a", [CHUNK], if_absent=if_absent)
    assert rig.contents("a") == CHUNK
    assert rig.times_stored("a") == 1


def test_c186_a_storm_of_slow_down_longer_than_all_tries_fails_nothing(rig):
    backend = rig.retrying()
    storm = rig.proxy.add("status", "PutObject", times=25)
    threads = [threading.Thread(target=backend.put, args=(f"chunks/{n}", [b"%d" % n])) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storm.struck == 25
    assert [rig.contents(f"chunks/{n}") for n in range(8)] == [b"%d" % n for n in range(8)]


def test_errors_that_last_are_raised_after_a_few_tries(rig):
    backend = rig.retrying()
    fault = rig.proxy.add("status", "PutObject", status=500, code="InternalError", times=None)
    with pytest.raises(BackendError, match=r"put 'a' at s3://bucket/team/ckpts: InternalError"):
        backend.put("a", [b"1"])
    assert fault.struck == 4
    assert rig.contents("a") is None


# --- connections that break -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reset_before", "reset_in_request", "lost_reply"])
@pytest.mark.parametrize("size", [10, 100_000])
def test_a_put_whose_connection_broke_is_repeated(rig, kind, size):
    backend = rig.retrying()
    rig.proxy.add(kind, "PutObject")
    backend.put("a", [CHUNK[:size]])
    assert rig.contents("a") == CHUNK[:size]
    assert rig.times_stored("a") == 1 + (kind == "lost_reply")


@pytest.mark.parametrize("kind", ["reset_before", "reset_in_reply", "short_body", "lost_reply"])
def test_a_read_that_broke_off_is_repeated(rig, kind):
    backend = rig.retrying()
    backend.put("a", [CHUNK])
    rig.proxy.add(kind, "GetObject", times=2)
    assert read(backend, "a", len(CHUNK)) == CHUNK
    rig.proxy.add(kind, "GetObject", times=2)
    assert backend.get("a", max_bytes=len(CHUNK)) == CHUNK


@pytest.mark.parametrize("kind", ["reset_in_reply", "short_body"])
def test_a_read_that_always_breaks_off_names_the_object(rig, kind):
    backend = rig.retrying()
    backend.put("a", [CHUNK])
    rig.proxy.add(kind, "GetObject", times=None)
    with pytest.raises(BackendError, match=r"'a' at s3://bucket/team/ckpts"):
        read(backend, "a", len(CHUNK))


@pytest.mark.parametrize("kind", ["reset_before", "reset_in_reply", "short_body", "lost_reply"])
def test_a_listing_that_broke_off_is_complete_and_has_nothing_twice(rig, kind):
    backend = rig.retrying()
    rig.server.objects.update({f"{PREFIX}/a/{n:04}": b"" for n in range(2500)})
    rig.server._modified.update(dict.fromkeys(rig.server.objects, 0.0))
    rig.proxy.add(kind, "ListObjectsV2", skip=1)
    assert [info.key for info in backend.list("a/")] == [f"a/{n:04}" for n in range(2500)]


@pytest.mark.parametrize("kind", ["reset_before", "lost_reply"])
def test_a_head_that_broke_off_is_repeated(rig, kind):
    backend = rig.retrying()
    backend.put("a", [b"123"])
    rig.proxy.add(kind, "HeadObject")
    assert backend.head("a").size_bytes == 3


# --- success whose reply was lost -----------------------------------------------------------------


def test_a_created_object_whose_reply_was_lost_is_found_there(rig):
    backend = rig.retrying(create_if_absent=True)
    rig.proxy.add("lost_reply", "PutObject")
    with pytest.raises(ObjectExistsError):
        backend.put("commits/r/a.mp", [b"ours"], if_absent=True)
    assert rig.contents("commits/r/a.mp") == b"ours"
    assert rig.times_stored("commits/r/a.mp") == 1


def test_a_finished_upload_whose_reply_was_lost_is_whole(rig):
    backend = rig.retrying()
    rig.proxy.add("lost_reply", "CompleteMultipartUpload")
    backend.put("a", [LARGE])
    assert rig.contents("a") == LARGE
    assert rig.server.uploads == []


def test_a_created_upload_whose_reply_was_lost_exists_and_leaves_no_upload(rig):
    backend = rig.retrying(create_if_absent=True)
    rig.proxy.add("lost_reply", "CompleteMultipartUpload")
    with pytest.raises(ObjectExistsError):
        backend.put("a", [LARGE], if_absent=True)
    assert rig.contents("a") == LARGE
    assert rig.times_stored("a") == 1
    assert rig.server.uploads == []


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", ["lost_reply", "reset_before"])
def test_a_deletion_whose_reply_was_lost_is_done(rig, kind, count):
    backend = rig.retrying()
    keys = [f"a/{n}" for n in range(count)]
    for key in keys:
        backend.put(key, [b"1"])
    rig.proxy.add(kind, "DeleteObjects DeleteObject")
    assert [(result.key, result.error) for result in backend.delete(keys)] == [(key, None) for key in keys]
    assert rig.server.objects == {}


# --- deleting in batches --------------------------------------------------------------------------


def test_each_key_of_a_batch_has_its_own_result(rig):
    backend = rig.retrying()
    keys = [f"a/{n}" for n in range(4)]
    for key in keys:
        backend.put(key, [b"1"])
    rig.proxy.add("delete_errors", "DeleteObjects", "*/a/2", code="AccessDenied", times=None)
    results = backend.delete(keys)
    assert [type(result.error) for result in results] == [type(None)] * 2 + [
        PermissionDeniedError,
        type(None),
    ]
    assert "a/2" in str(results[2].error)
    assert list(rig.server.objects) == [f"{PREFIX}/a/2"]


@pytest.mark.parametrize("code", ["InternalError", "SlowDown", "ServiceUnavailable"])
def test_keys_of_a_batch_that_failed_for_now_are_repeated_alone(rig, code):
    backend = rig.retrying()
    keys = [f"a/{n}" for n in range(4)]
    for key in keys:
        backend.put(key, [b"1"])
    rig.proxy.add("delete_errors", "DeleteObjects", "*/a/[12]", code=code)
    assert [result.error for result in backend.delete(keys)] == [None] * 4
    assert rig.server.objects == {}
    assert [request.body.count(b"<Key>") for request in rig.server.operations("DeleteObjects")] == [2, 2]


def test_c171_a_server_that_demands_content_md5_for_a_batch(rig):
    backend = rig.retrying()
    for n in range(3):
        backend.put(f"a/{n}", [b"1"])
    rig.proxy.add(
        "require", "DeleteObjects", header="content-md5", status=400, code="MissingContentMD5", times=None
    )
    assert [result.error for result in backend.delete([f"a/{n}" for n in range(3)])] == [None] * 3
    assert rig.server.objects == {}


# --- rights ---------------------------------------------------------------------------------------


def test_expired_credentials_are_read_anew_once(rig, monkeypatch):
    backend = rig.retrying()
    backend.put("a", [b"1"])
    rig.proxy.add("status", "PutObject", status=403, code="ExpiredToken")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    backend.put("b", [b"2"])
    assert rig.contents("b") == b"2"
    assert "renewed" in rig.server.requests[-1].headers["authorization"]


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_stay_expired_are_named(rig, status):
    backend = rig.retrying()
    fault = rig.proxy.add("status", "*", status=status, code="ExpiredToken", times=None)
    with pytest.raises(PermissionDeniedError, match="ExpiredToken") as raised:
        backend.put("a", [b"1"])
    assert "renew" in (raised.value.hint or "")
    assert fault.struck == 2


def test_a_bucket_that_may_only_be_read_is_named_at_once(rig):
    rig.direct().put("a", [b"1"])
    backend = rig.retrying(create_if_absent=True)
    writes = "PutObject DeleteObject DeleteObjects CreateMultipartUpload"
    fault = rig.proxy.add("status", writes, status=403, code="AccessDenied", times=None)
    for content, if_absent in ((b"1", False), (b"1", True), (LARGE, False)):
        with pytest.raises(PermissionDeniedError, match="AccessDenied"):
            backend.put("b", [content], if_absent=if_absent)
    assert isinstance(backend.delete(["a"])[0].error, PermissionDeniedError)
    assert isinstance(backend.delete(["a", "b"])[1].error, PermissionDeniedError)
    assert fault.struck == 5
    assert backend.get("a", max_bytes=9) == b"1"
    assert [info.key for info in backend.list("")] == ["a"]


# --- servers that store something else ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["truncate_upload", "store_framing"])
@pytest.mark.parametrize("content", [CHUNK, LARGE], ids=["chunk", "parts"])
def test_c187_an_object_stored_otherwise_than_sent_is_noticed_and_sent_again(rig, kind, content):
    backend = rig.retrying()
    rig.proxy.add(kind, "PutObject UploadPart", count=1000)
    if kind == "truncate_upload" and content is LARGE:
        rig.proxy.script[-1].skip = 2  # the last part; of a middle one the server would complain itself
        rig.proxy.script[-1].count = 10
    backend.put("a", [content])
    assert rig.contents("a") == content
    assert rig.server.uploads == []


@pytest.mark.parametrize("kind", ["truncate_upload", "store_framing"])
def test_c187_a_server_that_always_stores_otherwise_fails_the_put_and_nothing_stays(rig, kind):
    backend = rig.retrying()
    rig.proxy.add(kind, "PutObject", count=1000, times=None)
    with pytest.raises(BackendError, match=r"put 'a' at .*: 100000 bytes were sent and \d+ stored"):
        backend.put("a", [CHUNK])
    assert rig.contents("a") is None


def test_a_server_without_conditions_is_found_out_before_anything_is_created(rig):
    backend = rig.retrying()
    assert backend.capabilities.create_if_absent
    rig.proxy.add("strip_condition", times=None)
    with pytest.raises(BackendError, match="If-None-Match"):
        backend.put("commits/r/a.mp", [b"ours"], if_absent=True)
    assert not backend.capabilities.create_if_absent
    assert rig.server.objects == {}


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_server_that_refuses_conditions_is_found_out(rig, status, code):
    backend = rig.retrying()
    rig.proxy.add("reject", header=r"if-none-match:.*", status=status, code=code, times=None)
    with pytest.raises(BackendError, match="If-None-Match"):
        backend.put("a", [b"1"], if_absent=True)
    assert not backend.capabilities.create_if_absent
    assert rig.server.objects == {}


# --- servers that lack something ------------------------------------------------------------------


def test_c172_nothing_is_sent_that_servers_other_than_amazons_do_not_know(rig):
    backend = rig.retrying()
    rig.proxy.add(
        "reject",
        header=r"x-amz-(sdk-checksum|checksum|trailer).*|content-encoding:.*aws-chunked.*",
        status=400,
        code="SignatureDoesNotMatch",
        times=None,
    )
    for content in (b"", b"1", CHUNK, LARGE):
        backend.put("a", [content])
        assert rig.contents("a") == content
    backend.put("b", [b"1"], if_absent=True)
    assert read(backend, "a", len(LARGE)) == LARGE


def test_c174_every_request_with_a_body_says_its_length(rig):
    backend = rig.retrying()
    rig.proxy.add("require", "PutObject UploadPart", header="content-length", status=411, times=None)
    rig.proxy.add("reject", header="transfer-encoding:.*", status=411, code="Length", times=None)
    exact = LARGE[:PART_BYTES]
    for buffers in ([], [b""], [b"", b"1", memoryview(CHUNK)[7:]], [exact, exact], [exact, exact, b"1"]):
        backend.put("a", buffers)
        assert rig.contents("a") == b"".join(buffers)


@pytest.mark.parametrize("more", [-1, 0, 1, 16])
def test_c181_no_part_but_the_last_is_smaller_than_servers_take(rig, more):
    backend = rig.retrying()
    content = LARGE[: 2 * PART_BYTES + more]
    backend.put("a", [content[:3], content[3:7_000_000], content[7_000_000:]])
    assert rig.contents("a") == content
    sizes = [len(request.body) for request in rig.server.operations("UploadPart")]
    assert sizes == ([PART_BYTES] * 2 + [more] if more > 0 else [])


def test_c179_an_upload_has_no_more_parts_than_servers_list(rig, monkeypatch):
    monkeypatch.setattr("ckptstore_s3.s3._BATCH", 3)
    backend = rig.retrying()
    rig.proxy.add("max_parts", count=3, status=500, code="InternalError", times=None)
    content = LARGE + LARGE
    backend.put("a", [content])
    assert rig.contents("a") == content
    assert len(rig.server.operations("UploadPart")) == 3


@pytest.mark.parametrize("kind", ["status", "reset_before", "reset_in_request", "lost_reply"])
def test_c182_parts_that_fail_are_sent_again_and_no_half_object_is_ever_seen(rig, kind):
    backend = rig.retrying()
    rig.proxy.add(kind, "UploadPart", status=500, code="InternalError", skip=1, times=1)
    rig.proxy.add(kind, "UploadPart", status=500, code="InternalError", skip=3, times=1)
    backend.put("a", [LARGE])
    assert rig.server.puts[f"{PREFIX}/a"] == [LARGE]
    assert rig.server.uploads == []


def test_c182_an_upload_whose_parts_always_fail_is_aborted(rig):
    backend = rig.retrying()
    rig.proxy.add("status", "UploadPart", status=500, code="InternalError", skip=1, times=None)
    with pytest.raises(BackendError, match=r"put part \d of 'a' at "):
        backend.put("a", [LARGE])
    assert rig.contents("a") is None
    assert rig.server.uploads == []


def test_c184_a_server_without_uploads_in_parts_is_told_by_a_hint_and_works_without(rig):
    rig.proxy.add("status", "CreateMultipartUpload", status=501, code="NotImplemented", times=None)
    with pytest.raises(BackendError, match="NotImplemented") as raised:
        rig.retrying().put("a", [LARGE])
    assert "multipart" in (raised.value.hint or "")
    rig.retrying(multipart=False).put("a", [LARGE])
    assert rig.contents("a") == LARGE


def test_c176_another_process_sees_each_change_at_its_next_listing(rig):
    writer, reader = rig.retrying(), rig.retrying()
    for n in range(3):
        writer.put(f"a/{n}", [b"1"])
        assert [info.key for info in reader.list("a/")] == [f"a/{i}" for i in range(n + 1)]
    writer.delete(["a/1"])
    assert [info.key for info in reader.list("a/")] == ["a/0", "a/2"]
    with pytest.raises(ObjectNotFoundError):
        reader.head("a/1")


def test_c177_a_prefix_with_blanks_and_percent_signs_is_the_same_everywhere(rig):
    prefix = "my runs/a+b%20é&=?/x"
    backend = rig.retrying(prefix=prefix)
    keys = [f"a/{n}" for n in range(3)]
    for key in keys:
        backend.put(key, [key.encode()])
    backend.put("large", [LARGE])
    assert sorted(rig.server.objects) == [f"{prefix}/{key}" for key in [*keys, "large"]]
    assert [info.key for info in backend.list("a/")] == keys
    assert backend.get("a/1", max_bytes=9) == b"a/1"
    assert [result.error for result in backend.delete([*keys, "large"])] == [None] * 4
    assert rig.server.objects == {}


def test_c059_many_keys_are_deleted_in_batches_that_can_be_stopped_between(rig):
    backend = rig.retrying()
    keys = [f"a/{n:05}" for n in range(2500)]
    rig.server.objects.update({f"{PREFIX}/{key}": b"" for key in keys})
    assert not any(result.error for result in backend.delete(keys))
    assert rig.server.objects == {}
    sizes = [request.body.count(b"<Key>") for request in rig.server.operations("DeleteObjects")]
    assert sizes == [1000, 1000, 500]
