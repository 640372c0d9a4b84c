"""What is sent and received without a copy, and when that is left alone."""

from __future__ import annotations

import http.client
import io
import itertools

import pytest

pytest.importorskip("boto3")

import botocore.response

from ckptstore_s3._body import Body, straight
from tests.s3._faulty import rigged


@pytest.fixture
def rig(monkeypatch):
    with rigged(monkeypatch) as rig:
        yield rig


def _connections(backend):
    """How many connections its client has made."""
    pools = backend._requests.client._endpoint.http_session._manager.pools
    return sum(pools[key].num_connections for key in pools.keys())  # noqa: SIM118 - it is no dict


def test_what_is_read_comes_past_the_copies_and_the_connection_is_used_again(rig, monkeypatch):
    backend = rig.direct()
    data = bytes(range(256)) * 5000
    backend.put("chunks/a", [data])
    made = _connections(backend)
    monkeypatch.setattr(botocore.response.StreamingBody, "readinto", None)
    for start in (0, 1, 70_000):
        buffer = bytearray(len(data) - start)
        backend.read_into("chunks/a", start, memoryview(buffer))
        assert buffer == data[start:]
    assert backend.get("chunks/a", max_bytes=len(data)) == data
    assert _connections(backend) == made == 1


class _Outer:
    """What urllib3 gives, as far as it is looked at."""

    def __init__(self, **changes):
        inner = http.client.HTTPResponse.__new__(http.client.HTTPResponse)
        inner.length, inner.chunked, inner.headers, inner.fp = 5, False, {}, None
        vars(inner).update(changes)
        self._original_response = inner
        self.released = 0

    def release_conn(self):
        self.released += 1


class _Reply:
    def __init__(self, outer):
        self._raw_stream = outer


@pytest.mark.parametrize(
    "changes",
    [{"chunked": True}, {"length": None}, {"headers": {"Content-Encoding": "gzip"}}],
    ids=["in chunks", "of unknown length", "compressed"],
)
def test_bytes_that_are_not_the_objects_own_are_left_to_the_client(changes):
    reply = _Reply(_Outer(**changes))
    with straight(reply) as source:
        assert source is reply
    other = io.BytesIO(b"a body of another kind")
    with straight(other) as source:
        assert source is other


@pytest.mark.parametrize(("left", "released"), [(0, 1), (3, 0)])
def test_only_a_reply_that_was_read_whole_gives_its_connection_back(left, released):
    outer = _Outer()
    with straight(_Reply(outer)) as source:
        assert source is outer._original_response
        source.length = left
    assert outer.released == released


def test_a_body_is_sent_in_pieces_of_its_own_memory():
    first, second = bytearray(b"a" * 600_000), bytearray(b"b" * 10)
    pieces = Body([memoryview(first), memoryview(second)]).pieces()
    assert [len(piece) for piece in pieces] == [262_144, 262_144, 75_712, 10]
    assert all(piece.obj in (first, second) for piece in pieces)
    assert b"".join(pieces) == bytes(first + second)


def test_a_body_is_read_for_its_signature_across_its_buffers():
    data = bytes(range(200))
    for size in (1, 7, 64, 1000):
        body = Body([memoryview(data[:50]), memoryview(data[50:51]), memoryview(data[51:])])
        parts = list(itertools.takewhile(bool, (body.read(size) for _ in itertools.count())))
        assert b"".join(parts) == data
        assert all(len(part) == size for part in parts[:-1])
        assert body.read() == b""
        body.seek(0)
        assert body.read() == data
