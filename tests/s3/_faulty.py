"""A client, a proxy that does harm, and a server behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ckptstore.store import Store
from ckptstore.tier.retry import RetryingBackend
from ckptstore_s3 import S3Backend
from tests.crash._support import Model, check_place, make_place, quiet, store_over
from tests.s3.memory_server import MemoryS3
from tests.s3.proxy import Proxy

PREFIX = "team/ckpts"
PART_BYTES = 5 << 20


class Rig:
    """One bucket, one proxy before it.

    Attributes:
        server: what really arrived, and what is there.
        proxy: the harm.
    """

    def __init__(self, server: MemoryS3, proxy: Proxy) -> None:
        self.server = server
        self.proxy = proxy
        self._opened: list[S3Backend] = []

    def backend(self, prefix: str = PREFIX, *, endpoint: str | None = None, **options: Any) -> S3Backend:
        """A new client behind the proxy."""
        given = {"endpoint_url": endpoint or self.proxy.endpoint, "part_bytes": PART_BYTES, **options}
        backend = S3Backend.from_url(f"s3://bucket/{prefix}", given)
        self._opened.append(backend)
        return backend

    def retrying(self, **options: Any) -> RetryingBackend:
        """As the store uses it, but waits take no time."""
        backend = self.backend(**options)
        # No time goes by, so that each thread would count the common pause as its own: ample patience.
        return RetryingBackend(backend, sleep=quiet().sleep, patience_seconds=3600.0)

    def direct(self) -> S3Backend:
        """A new client past the proxy: another process that has no trouble."""
        return self.backend(endpoint=self.server.endpoint)

    @contextlib.contextmanager
    def store(self, *, make: bool = True, **options: Any) -> Iterator[Store]:
        """A store behind the proxy."""
        if make:
            make_place(self.direct())
        with contextlib.closing(store_over(self.backend(**options))) as store:
            yield store

    def check(self, model: Model, *, next_step: int | None = 1_000_000, wholly: bool = True) -> None:
        """All that must hold in the bucket, as another process finds it."""
        self.proxy.heal()
        check_place(self.direct(), model, next_step=next_step, wholly=wholly)

    def contents(self, key: str) -> bytes | None:
        """What is really under a key."""
        return self.server.objects.get(f"{PREFIX}/{key}")

    def times_stored(self, key: str) -> int:
        """How often something was stored there."""
        return len(self.server.puts.get(f"{PREFIX}/{key}", ()))

    def close(self) -> None:
        for backend in self._opened:
            backend.close()


@contextlib.contextmanager
def rigged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig with credentials that nobody checks."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    with MemoryS3() as server, Proxy(server.endpoint) as proxy:
        rig = Rig(server, proxy)
        try:
            yield rig
        finally:
            rig.close()
