"""The same harm before a real server, which checks signatures: what the server in memory might forgive."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from ckptstore.errors import ObjectExistsError
from ckptstore.tier.retry import RetryingBackend
from ckptstore_s3 import S3Backend
from tests.crash._support import TRAIN, Model, check_place, make_place, make_state, quiet, store_over
from tests.s3._faulty import PART_BYTES
from tests.s3.proxy import Proxy

LARGE = os.urandom(2 * PART_BYTES + 1000)


@pytest.fixture
def proxy(s3_environment):
    if not s3_environment.endpoint.startswith("http://"):
        pytest.skip("the proxy speaks no TLS")
    with Proxy(s3_environment.endpoint) as proxy:
        yield proxy


@pytest.fixture
def opened(s3_url):
    """A function that makes clients of the same fresh prefix: behind an endpoint, or past all proxies."""
    with contextlib.ExitStack() as stack:

        def open_at(endpoint=None):
            options = {"part_bytes": PART_BYTES} | ({"endpoint_url": endpoint} if endpoint else {})
            return stack.enter_context(contextlib.closing(S3Backend.from_url(s3_url, options)))

        yield open_at


@pytest.mark.parametrize(
    "faults",
    [
        [("status", "*", "*", {"times": 12})],
        [("reset_before", "*", "*", {"skip": skip}) for skip in range(0, 40, 13)]
        + [("reset_in_request", "PutObject", "*", {"skip": skip}) for skip in range(0, 16, 9)],
        [
            ("lost_reply", "PutObject", "*/commits/*", {"times": 2}),
            ("lost_reply", "*", "*", {"skip": 9, "times": 2}),
        ],
        [("short_body", "GetObject ListObjectsV2", "*", {"skip": skip}) for skip in range(0, 12, 3)],
    ],
    ids=["503", "resets", "lost replies", "short bodies"],
)
def test_saves_through_passing_faults_are_there_once(proxy, opened, faults):
    make_place(opened())
    model = Model()
    with (
        contextlib.closing(store_over(opened(proxy.endpoint))) as store,
        contextlib.closing(store.run(TRAIN)) as run,
    ):
        struck = [proxy.add(*fault[:3], **fault[3]) for fault in faults]
        for step in (1, 2):
            made = run.save(step, make_state(step)).result()
            model.saved(TRAIN, step, make_state(step), made.id)
        assert struck[0].struck
    with contextlib.closing(store_over(opened())) as store:
        assert [checkpoint.step for checkpoint in store.run(TRAIN).checkpoints()] == [1, 2]
    check_place(opened(), model, wholly=False)


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_finished_upload_whose_reply_was_lost_is_there_and_whole(proxy, opened, if_absent):
    backend = RetryingBackend(opened(proxy.endpoint), sleep=quiet().sleep)
    proxy.add("lost_reply", "CompleteMultipartUpload")
    with pytest.raises(ObjectExistsError) if if_absent else contextlib.nullcontext():
        backend.put("a/large", [LARGE], if_absent=if_absent)
    assert opened().get("a/large", max_bytes=len(LARGE)) == LARGE
    assert list(opened().list_temporaries("")) == []


def test_a_batch_whose_reply_was_lost_is_deleted(proxy, opened):
    backend = RetryingBackend(opened(proxy.endpoint), sleep=quiet().sleep)
    keys = [f"a/{n}" for n in range(5)]
    for key in keys:
        backend.put(key, [b"1"])
    fault = proxy.add("lost_reply", "DeleteObjects")
    assert [result.error for result in backend.delete(keys)] == [None] * 5
    assert fault.struck == 1
    assert list(opened().list("")) == []


def test_c186_many_small_puts_through_a_storm_all_arrive(proxy, opened):
    backend = RetryingBackend(opened(proxy.endpoint), sleep=quiet().sleep, patience_seconds=3600.0)
    for skip in range(0, 100, 3):
        proxy.add("status", "PutObject", skip=skip)

    def put(thread):
        for n in range(12):
            backend.put(f"a/{thread}.{n}", [b"%d %d" % (thread, n)])

    threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = opened()
    assert len(list(there.list("a/"))) == 72
    assert there.get("a/5.11", max_bytes=9) == b"5 11"
