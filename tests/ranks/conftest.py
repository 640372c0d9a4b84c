from __future__ import annotations

import pytest

from tests.ranks.pool import RankPool, shared_pool


@pytest.fixture(scope="session")
def rank_pool() -> RankPool:
    """Up to eight real processes with gloo between them: see tests/ranks/pool.py."""
    return shared_pool()
