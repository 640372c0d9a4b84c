"""A place in memory of its own for each test, and one that fails on purpose in front of it."""

from __future__ import annotations

import itertools

import pytest

from ckptstore.testing import FaultBackend
from ckptstore_memory import MemoryBackend

_names = itertools.count()


@pytest.fixture
def memory():
    backend = MemoryBackend(f"backends-{next(_names)}")
    backend.create_root()
    yield backend
    backend.drop()


@pytest.fixture
def faulty(memory):
    return FaultBackend(memory)
