"""File systems that misbehave: the right outcome all the same, or an error."""

from __future__ import annotations

import errno

import fsspec
import pytest
from fsspec.registry import _registry

from ckptstore.backend import open_backend
from ckptstore.errors import (
    BackendError,
    NotAnObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    ShortReadError,
)
from ckptstore.tier.tier import create_object
from tests.fsspec import fakes

BIG = bytes(range(256)) * 1024


@pytest.fixture(autouse=True)
def _registered():
    for made in fakes.ALL:
        fsspec.register_implementation(made.protocol, made, clobber=True)
        if issubclass(made, fakes.Fake):
            made.store.clear()
            made.pseudo_dirs[:] = [""]
    yield
    for made in fakes.ALL:
        del _registry[made.protocol]


def opened(made, **settings):
    backend = open_backend(f"{made.protocol}://place", {"ckptstore": settings} if settings else None)
    backend.create_root()
    return backend


@pytest.mark.parametrize("made", [fakes.IgnoresCreate, fakes.KnowsNoModes])
def test_without_exclusive_creation_says_so_before_anybody_relies_on_it(made):
    backend = opened(made, writes="whole", create_if_absent=True)
    assert backend.capabilities.create_if_absent
    with pytest.raises(BackendError, match="exclusively") as caught:
        backend.put("a", [b"1"], if_absent=True)
    assert not isinstance(caught.value, ObjectExistsError)
    assert not backend.capabilities.create_if_absent
    assert list(backend.list("")) == []
    backend.put("a", [b"1"], if_absent=True)
    with pytest.raises(ObjectExistsError):
        backend.put("a", [b"2"], if_absent=True)
    assert backend.get("a", max_bytes=1) == b"1"


def test_the_core_goes_on_without_exclusive_creation():
    backend = opened(fakes.IgnoresCreate, writes="whole", create_if_absent=True)
    create_object(backend, "a", b"1")
    assert backend.get("a", max_bytes=1) == b"1"


@pytest.mark.parametrize("settings", [{}, {"writes": "whole"}, {"writes": "move", "create_if_absent": True}])
def test_what_is_not_known_to_create_atomically_does_not_claim_to(settings):
    assert not opened(fakes.Lags, **settings).capabilities.create_if_absent


@pytest.mark.parametrize("writes", ["move", "whole"])
def test_caches_are_not_believed(writes):
    one, other = opened(fakes.Lags, writes=writes), opened(fakes.Lags, writes=writes)
    for content in (b"1", b"22", BIG):
        one.put("a/b", [content])
        assert [info.size_bytes for info in other.list("")] == [len(content)]
        assert other.head("a/b").size_bytes == len(content)
    one.delete(["a/b"])
    assert list(other.list("")) == []
    with pytest.raises(ObjectNotFoundError):
        other.head("a/b")


def test_a_move_that_loses_bytes_is_an_error_and_leaves_nothing():
    backend = opened(fakes.LosesMoved)
    with pytest.raises(BackendError, match="stored") as caught:
        backend.put("a/b", [BIG])
    assert caught.value.transient
    assert list(backend.list("")) == list(backend.list_temporaries("")) == []


def test_a_move_that_fails_leaves_the_former_object():
    backend = opened(fakes.WillNotMove)
    fsspec.filesystem("willnotmove").pipe_file("/place/a", b"former")
    with pytest.raises(BackendError):
        backend.put("a", [b"new"])
    assert backend.get("a", max_bytes=9) == b"former"
    assert list(backend.list_temporaries("")) == []


def test_a_move_that_will_not_replace_is_made_room_for():
    backend = opened(fakes.WillNotReplace)
    for content in (b"1", b"2"):
        backend.put("a/b", [content])
        assert backend.get("a/b", max_bytes=1) == content
    assert [info.key for info in backend.list("")] == ["a/b"]


def test_temporaries_carry_the_name_and_are_never_listed():
    backend = opened(fakes.WillNotReplace)
    backend.put("commits/01ARZ-1200-1.cbor", [b"1"])
    left = "commits/.01ARZ-1200-2.cbor.0123456789abcdef.tmp"
    fsspec.filesystem("willnotreplace").pipe_file(f"/place/{left}", b"half")
    assert [info.key for info in backend.list("")] == ["commits/01ARZ-1200-1.cbor"]
    assert [info.key for info in backend.list_temporaries("")] == [left]
    assert [result.error for result in backend.delete([left])] == [None]
    assert list(backend.list_temporaries("")) == []


@pytest.mark.parametrize(("by", "transient"), [(-1, True), (1, False)])
def test_a_reply_of_the_wrong_length_is_an_error(monkeypatch, by, transient):
    backend = opened(fakes.ReadsShort)
    backend.put("a", [b"12345"])
    monkeypatch.setattr(fakes.ReadsShort, "by", by)
    with pytest.raises(BackendError) as caught:
        backend.read_into("a", 1, memoryview(bytearray(3)))
    assert caught.value.transient is transient
    assert not isinstance(caught.value, ShortReadError)


@pytest.mark.parametrize("by", [-1, 0])
def test_a_document_of_the_wrong_length_is_an_error_only_if_it_is_long(monkeypatch, by):
    """A short document is found out by its digest; `get` has no length to compare with."""
    backend = opened(fakes.ReadsShort)
    backend.put("a", [b"12345"])
    monkeypatch.setattr(fakes.ReadsShort, "by", by)
    assert backend.get("a", max_bytes=5) == b"12345"[: 5 + by]


def test_a_short_write_is_an_error_and_leaves_nothing():
    backend = opened(fakes.WritesShort, writes="whole")
    with pytest.raises(BackendError, match="stored") as caught:
        backend.put("a", [BIG])
    assert caught.value.transient
    assert list(backend.list("")) == []


def test_a_listing_that_cannot_be_read_is_no_empty_one():
    with pytest.raises(BackendError, match="not in it"):
        list(opened(fakes.ListsElsewhere).list(""))


class HttpError(Exception):
    def __init__(self, **attributes):
        super().__init__("told by a server")
        self.__dict__.update(attributes)


class ServiceRequestError(Exception):
    pass


class ClientAuthenticationError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "transient", "throttled"),
    [
        (FileNotFoundError("x"), ObjectNotFoundError, False, False),
        (PermissionError("x"), PermissionDeniedError, False, False),
        (IsADirectoryError("x"), NotAnObjectError, False, False),
        (OSError(errno.ENOSPC, "x"), OutOfSpaceError, False, False),
        (OSError(errno.EROFS, "x"), PermissionDeniedError, False, False),
        (OSError(errno.EIO, "x"), BackendError, True, False),
        (OSError("without a number"), BackendError, False, False),
        (ConnectionResetError("x"), BackendError, True, False),
        (TimeoutError(), BackendError, True, False),
        (HttpError(status_code=403), PermissionDeniedError, False, False),
        (HttpError(code=401), PermissionDeniedError, False, False),
        (HttpError(code="404"), ObjectNotFoundError, False, False),
        (HttpError(status=416), ShortReadError, False, False),
        (HttpError(status=500), BackendError, True, False),
        (HttpError(status_code=503), BackendError, True, True),
        (HttpError(code=429), BackendError, True, True),
        (HttpError(status_code=507), OutOfSpaceError, False, False),
        (HttpError(code="Weird"), BackendError, False, False),
        (ServiceRequestError(), BackendError, True, False),
        (ClientAuthenticationError(), PermissionDeniedError, False, False),
        (ValueError("x"), BackendError, False, False),
    ],
)
def test_errors_are_told_by_class_and_status(monkeypatch, error, kind, transient, throttled):
    monkeypatch.setattr(fakes.Fails, "error", error)
    backend = open_backend("fails://place", {})
    with pytest.raises(BackendError) as caught:
        backend.read_into("a/b", 0, memoryview(bytearray(4)))
    assert type(caught.value) is kind
    assert (caught.value.transient, caught.value.throttled) == (transient, throttled)
    assert "a/b" in str(caught.value)
