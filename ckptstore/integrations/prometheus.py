"""Saves and restores as metrics that Prometheus scrapes from this process."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from ckptstore.errors import BusyError, CkptstoreError, ConflictError, UsageError
from ckptstore.events import RestoreEvent, SaveEvent
from ckptstore.metrics.exposition import NAMESPACE, check_namespace
from ckptstore.metrics.figures import Figures

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


class _Server(Protocol):
    server_port: int

    def shutdown(self) -> None: ...
    def server_close(self) -> None: ...


class PrometheusExporter:
    """A hook that shows this process's saves and restores to Prometheus.

    It is a collector of ``prometheus_client``: numbers are made when they are scraped. The multi-process
    mode (``PROMETHEUS_MULTIPROC_DIR``) shows no collectors: give each process a port.

    Args:
        port: where to serve ``/metrics`` by HTTP, 0 for any free one; None serves nothing, for a program
            that serves `registry` itself. Ranks of one host need different ones.
        registry: what to join; the default is that of ``prometheus_client``.
        namespace: what the names of the metrics begin with.
        address: where to listen; unless given, at all of the host's addresses, as Prometheus mostly scrapes
            from another. Names of runs and sizes can then be read by who reaches the port.

    Raises:
        CkptstoreError: prometheus_client is not installed.
        ConflictError: the registry has these metrics already.
        BusyError: the port is taken.
        UsageError: it cannot be listened at this port or address, or the namespace cannot be used.

    Example:
        >>> store = ckptstore.open("ckpts", hooks=[PrometheusExporter(port=9400)])
    """

    def __init__(
        self,
        port: int | None = None,
        registry: CollectorRegistry | None = None,
        namespace: str = NAMESPACE,
        *,
        address: str = "0.0.0.0",
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise CkptstoreError(
                "exporting to Prometheus needs prometheus_client, which is not installed",
                hint="pip install 'ckptstore[prometheus]'",
            ) from error
        self._figures = Figures(check_namespace(namespace))
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ConflictError(
                f"the registry has metrics that begin with {namespace}_ already",
                hint="use one exporter per process, close() the one before, or give another namespace=",
            ) from error
        if port is not None:
            try:
                self._serve(port, address)
            except BaseException:
                self._registry.unregister(self)
                raise

    def _serve(self, port: int, address: str) -> None:
        import prometheus_client

        try:
            self._server, self._thread = prometheus_client.start_http_server(port, address, self._registry)
        except (OSError, OverflowError, TypeError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise BusyError(
                    f"port {port} is taken by another process",
                    hint="give another; ranks of one host need one each, like port=9400 + local_rank",
                ) from error
            raise UsageError(
                f"metrics cannot be served at {address!r} port {port!r}: {error}",
                hint="give a port from 1024 to 65535 and an address of this host",
            ) from error

    @property
    def port(self) -> int | None:
        """Where it is served; None where it is not."""
        return None if self._server is None else self._server.server_port

    def saved(self, event: SaveEvent) -> None:
        """Counts a save."""
        self._figures.saved(event)

    def restored(self, event: RestoreEvent) -> None:
        """Counts a restore."""
        self._figures.restored(event)

    def collect(self) -> Iterator[Metric]:
        """What ``prometheus_client`` asks for at each scrape."""
        return self._metrics(with_samples=True)

    def describe(self) -> Iterator[Metric]:
        """The metrics without numbers: by this a registry refuses names that it has already."""
        return self._metrics(with_samples=False)

    def _metrics(self, *, with_samples: bool) -> Iterator[Metric]:
        from prometheus_client.core import Metric

        for family in self._figures.families():
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples if with_samples else ():
                metric.add_sample(family.name + sample.suffix, dict(sample.labels), sample.value)
            if metric.samples or not with_samples:
                yield metric

    def close(self) -> None:
        """Leaves the registry and stops serving; a second call does nothing."""
        server, thread, self._server, self._thread = self._server, self._thread, None, None
        try:
            self._registry.unregister(self)
        except KeyError:
            return
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> PrometheusExporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
