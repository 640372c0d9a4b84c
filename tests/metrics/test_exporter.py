"""What Prometheus gets, by HTTP from this host."""

from __future__ import annotations

import sys
import urllib.request

import pytest

from ckptstore.errors import BusyError, CkptstoreError, ConflictError, UsageError
from ckptstore.integrations.prometheus import PrometheusExporter
from ckptstore.metrics.textfile import TextfileWriter
from tests.metrics.made import COMMITTED, EVENTS
from tests.metrics.test_exposition import parsed

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def tell(hook) -> None:
    for event in EVENTS:
        (hook.saved if hasattr(event, "world_size") else hook.restored)(event)


def scraped(exporter) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read().decode()


def test_a_scrape_says_what_the_textfile_says(registry, tmp_path):
    writer = TextfileWriter(tmp_path / "a.prom")
    with PrometheusExporter(0, registry, address="127.0.0.1") as exporter:
        assert scraped(exporter) == ""
        tell(exporter)
        tell(writer)
        told = parsed(scraped(exporter))
    assert told == parsed((tmp_path / "a.prom").read_text())
    assert ("ckptstore_saves_total", {"run": "gpt", "outcome": "failed", "rank": "0"}, 1.0) in told[
        "ckptstore_saves"
    ]


def test_without_a_port_it_joins_the_registry_of_the_program():
    with PrometheusExporter(namespace="ours") as exporter:
        assert exporter.port is None
        exporter.saved(COMMITTED)
        value = prometheus_client.REGISTRY.get_sample_value(
            "ours_last_save_step", {"run": "gpt", "rank": "0"}
        )
        assert value == 500.0
    assert prometheus_client.REGISTRY.get_sample_value("ours_last_save_step", {"run": "gpt"}) is None


def test_two_exporters_in_one_registry_are_refused_unless_they_are_named_apart(registry):
    with PrometheusExporter(registry=registry) as first:
        with pytest.raises(ConflictError, match="ckptstore_"):
            PrometheusExporter(registry=registry)
        PrometheusExporter(registry=registry, namespace="other").close()
        first.saved(COMMITTED)
        assert registry.get_sample_value("ckptstore_last_save_step", {"run": "gpt", "rank": "0"}) == 500.0
    PrometheusExporter(registry=registry).close()


def test_a_port_that_is_taken(registry):
    other = prometheus_client.CollectorRegistry()
    with (
        PrometheusExporter(0, other, address="127.0.0.1") as exporter,
        pytest.raises(BusyError, match=f"port {exporter.port} is taken"),
    ):
        PrometheusExporter(exporter.port, registry, address="127.0.0.1")
    PrometheusExporter(registry=registry).close()  # the one that failed has left nothing in it


@pytest.mark.parametrize(("port", "address"), [(70_000, "127.0.0.1"), ("x", "127.0.0.1"), (0, "256.0.0.1")])
def test_a_place_where_nothing_can_be_served(registry, port, address):
    with pytest.raises(UsageError, match="cannot be served"):
        PrometheusExporter(port, registry, address=address)


def test_closing_twice_does_nothing(registry):
    exporter = PrometheusExporter(0, registry, address="127.0.0.1")
    exporter.close()
    exporter.close()
    assert exporter.port is None
    exporter.saved(COMMITTED)  # a hook cannot be taken from a store: what it hears now is for nobody


def test_without_prometheus_client_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(CkptstoreError, match=r"pip install 'ckptstore\[prometheus\]'"):
        PrometheusExporter()
