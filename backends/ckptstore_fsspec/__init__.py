"""Objects in whatever fsspec reaches: ``gs://``, ``az://``, ``hdfs://``, ``sftp://``, ``fsspec+PROTOCOL://``."""

from __future__ import annotations

from ckptstore_fsspec.fs import FsspecBackend

__all__ = ["FsspecBackend"]
