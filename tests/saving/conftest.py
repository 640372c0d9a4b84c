from __future__ import annotations

import pytest

from tests.ranks.conftest import rank_pool

__all__ = ["rank_pool"]


@pytest.fixture(autouse=True)
def _manifest_in_memory(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
