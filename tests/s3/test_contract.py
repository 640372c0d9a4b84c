"""The conformance suite against a real server."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from ckptstore.errors import ObjectExistsError
from ckptstore.testing import BackendContract
from ckptstore_s3 import S3Backend

pytestmark = pytest.mark.s3

WITHOUT_ROOT = {
    "test_opening_touches_nothing",
    "test_only_create_root_makes_the_root",
    "test_a_missing_root_is_no_missing_object",
}


class TestS3(BackendContract):
    """The root of a place in S3 is its bucket, which the backend never makes: a prefix is always there."""

    def open_backend(self, url):
        return S3Backend.from_url(url)

    @pytest.fixture
    def url(self, request, s3_url):
        if request.function.__name__ in WITHOUT_ROOT:
            return "s3://ckptstore-no-such-bucket/tests"
        return s3_url

    @pytest.mark.parametrize("size", [10])
    def test_of_sixteen_writers_one_creates(self, backend, second, size, s3_server):
        # SeaweedFS lets those who find its lock taken wait a second each, one after the other.
        writers = 5 if s3_server.kind == "seaweedfs" else 16
        handles = [second() for _ in range(writers)]
        start = threading.Barrier(writers)

        def create(n):
            start.wait(60)
            try:
                handles[n].put("race", [bytes([n]) * size], if_absent=True)
            except ObjectExistsError:
                return False
            return True

        with concurrent.futures.ThreadPoolExecutor(writers) as threads:
            won = list(threads.map(create, range(writers)))
        assert sum(won) == 1
        assert backend.get("race", max_bytes=size) == bytes([won.index(True)]) * size
