from __future__ import annotations

import builtins

import pytest


@pytest.fixture
def no_matplotlib(monkeypatch):
    """An installation without the extra."""
    real = builtins.__import__

    def absent(name, *args):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    return lambda: monkeypatch.setattr(builtins, "__import__", absent)
