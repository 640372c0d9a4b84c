from __future__ import annotations

import os
import uuid

import pytest

from tests.fsspec import servers

pytest.importorskip("fsspec")


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as connection_string:
        yield connection_string


@pytest.fixture(scope="session")
def google(tmp_path_factory):
    with servers.google(tmp_path_factory.mktemp("gcs")) as url:
        yield url


@pytest.fixture
def azure_environment(azurite, monkeypatch):
    """adlfs finds its account in the environment, as a training job's would be: no secret in the options."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite)


@pytest.fixture
def google_environment(google, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google)


@pytest.fixture
def bucket():
    return f"b{uuid.uuid4().hex}"


@pytest.fixture
def memory_url():
    """A fresh place in fsspec's memory, which all tests of a process share; empty again afterwards."""
    import fsspec

    name = f"place-{os.getpid()}-{uuid.uuid4().hex}"
    yield f"fsspec+memory://{name}/store"
    held = fsspec.filesystem("memory")
    if held.exists(f"/{name}"):
        held.rm(f"/{name}", recursive=True)
