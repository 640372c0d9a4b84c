from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _manifest_in_memory(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
from tests.ranks.conftest import rank_pool  # noqa: F401,E402 - a fixture
