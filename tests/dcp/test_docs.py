"""What docs/dcp.md shows works as shown."""

from __future__ import annotations

import pytest

from tests.dcp.made import NO_GROUP
from tests.docs.pages import DOCS, run_page

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(NO_GROUP)]


def test_the_page_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("CKPTSTORE", "CKPTSTORE_MANIFEST", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    run_page(DOCS / "dcp.md", tmp_path)
