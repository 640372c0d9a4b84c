from __future__ import annotations

import itertools

import pytest

from ckptstore.backend import open_backend
from ckptstore.errors import BackendError, ObjectNotFoundError, UsageError
from ckptstore.testing import BackendContract
from ckptstore_memory import MemoryBackend

_names = itertools.count()


class TestMemoryContract(BackendContract):
    @pytest.fixture
    def url(self):
        url = f"memory://contract-{next(_names)}"
        yield url
        MemoryBackend.from_url(url).drop()


def test_the_scheme_is_found_by_entry_point():
    assert isinstance(open_backend("memory://x"), MemoryBackend)


def test_names_are_apart():
    one, two = MemoryBackend("apart-1"), MemoryBackend("apart-2")
    one.create_root()
    two.create_root()
    one.put("a", [b"1"])
    with pytest.raises(ObjectNotFoundError):
        two.get("a", max_bytes=1)
    one.drop()
    two.drop()


def test_a_dropped_place_is_an_error_and_not_empty():
    backend = MemoryBackend("dropped")
    backend.create_root()
    backend.drop()
    with pytest.raises(BackendError, match="create it first"):
        list(backend.list(""))


@pytest.mark.parametrize("url", ["memory://", "memory:///", "memory", ""])
def test_a_url_without_a_name_is_refused(url):
    with pytest.raises(UsageError):
        MemoryBackend.from_url(url)


def test_options_are_refused():
    with pytest.raises(UsageError, match="speed"):
        MemoryBackend.from_url("memory://x", {"speed": 1})
