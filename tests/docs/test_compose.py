"""docker-compose.yml: pinned images, this host only, a health check and a bucket for each server.

Only its text is looked at: no Docker engine is needed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

TOP = Path(__file__).parents[2]
SERVERS = ["minio", "seaweedfs"]


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((TOP / "docker-compose.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_is_a_profile_with_a_health_check_and_a_bucket(compose, server):
    service, bucket = compose["services"][server], compose["services"][f"{server}-bucket"]
    assert service["profiles"] == bucket["profiles"] == [server]
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert bucket["depends_on"] == {server: {"condition": "service_healthy"}}
    assert "ckptstore-tests" in str(bucket["entrypoint"])
    assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(compose["volumes"])


def test_only_this_host_can_connect(compose):
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_are_pinned_and_can_be_replaced(compose):
    for service in compose["services"].values():
        variable, default = re.fullmatch(r"\$\{(\w+):-(.+)\}", service["image"]).groups()
        assert variable in ("MINIO_IMAGE", "SEAWEEDFS_IMAGE")
        name, tag = default.rsplit(":", 1)
        assert "/" in name
        assert re.search(r"\d", tag)


def test_up_starts_one_server_when_nobody_says_which():
    lines = (TOP / ".env").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["COMPOSE_PROFILES=minio"]


def test_the_page_on_providers_starts_what_is_there(compose):
    page = (TOP / "docs" / "providers.md").read_text(encoding="utf-8")
    assert "docker compose up -d\n" in page
    for server in SERVERS:
        host_port = compose["services"][server]["ports"][0].rpartition(":")[0]
        assert f"CKPTSTORE_TEST_S3_ENDPOINT=http://{host_port}" in page
        image = compose["services"][server]["image"]
        assert image.rpartition(":")[2].rstrip("}") in page, f"{image} is not on the page"
