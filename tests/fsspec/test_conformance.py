"""The conformance suite on every file system that can be had here."""

from __future__ import annotations

import pytest

from ckptstore import backend as registry
from ckptstore.testing import BackendContract

# aiohttp has it about every body over a megabyte that comes as bytes, as Azure's library sends it.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

CREATE = {"ckptstore": {"create_bucket": True}}


class TestMemory(BackendContract):
    @pytest.fixture
    def url(self, memory_url):
        return memory_url


class TestLocal(BackendContract):
    @pytest.fixture
    def url(self, tmp_path):
        return f"fsspec+file://{tmp_path}/store"


class TestMoved(BackendContract):
    """How sftp, hdfs and all that is not known better are written to: a temporary name, then a move."""

    def open_backend(self, url):
        return registry.open_backend(url, {"ckptstore": {"writes": "move"}})

    @pytest.fixture
    def url(self, tmp_path):
        return f"fsspec+file://{tmp_path}/store"


class TestAzure(BackendContract):
    def open_backend(self, url):
        return registry.open_backend(url, CREATE)

    @pytest.fixture
    def url(self, azure_environment, bucket):
        return f"az://{bucket}/deep/store"


class TestGoogle(BackendContract):
    def open_backend(self, url):
        return registry.open_backend(url, {"token": "anon", "project": "test", **CREATE})

    @pytest.fixture
    def url(self, google_environment, bucket):
        return f"gs://{bucket}/deep/store"
