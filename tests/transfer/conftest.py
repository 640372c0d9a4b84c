from __future__ import annotations

import pytest

import ckptstore


@pytest.fixture(autouse=True)
def _no_files_of_the_user(monkeypatch, tmp_path_factory):
    """No launcher is around us, and nothing goes to the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "CKPTSTORE_MANIFEST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path):
    """A store with small chunks, so that small tensors have several."""
    with ckptstore.open(tmp_path / "store", create=True, chunk_bytes=1 << 20) as opened:
        yield opened
