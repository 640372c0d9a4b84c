"""Objects in S3, or what speaks its protocol: ``s3://bucket/prefix``."""

from __future__ import annotations

from ckptstore_s3.s3 import S3Backend

__all__ = ["S3Backend"]
