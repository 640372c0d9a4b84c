from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_files_of_the_user(monkeypatch, tmp_path_factory):
    """The manifest of a place in memory would lie in the user's cache folder; no launcher is around us."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "CKPTSTORE_MANIFEST"):
        monkeypatch.delenv(name, raising=False)
