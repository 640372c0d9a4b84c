from __future__ import annotations

import pytest

import ckptstore


@pytest.fixture
def store(tmp_path):
    with ckptstore.init(tmp_path / "store", chunk_bytes=1 << 16) as store:
        yield store


@pytest.fixture
def run(store):
    return store.run("r")


from tests.ranks.conftest import rank_pool  # noqa: E402, F401 - a fixture
