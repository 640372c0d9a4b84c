"""Objects as plain files below one directory: ``file://`` URLs and plain paths."""

from __future__ import annotations

from ckptstore_local.local import LocalBackend

__all__ = ["LocalBackend"]
