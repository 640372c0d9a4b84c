"""Elastic restart as torchrun does it: agents and workers are killed, what is left goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore

ROOT = Path(__file__).parents[2]
SECONDS = 200.0
"""Two starts of torch by each worker on a busy machine; alone this takes a fifth of it."""

GLOBAL_BATCH = 16
EVERY = 5
STRUCK = 10

pytestmark = [pytest.mark.torch, pytest.mark.timeout(2 * SECONDS)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Agents:
    """Agents of torchrun on this machine, which train the example in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.losses = folder / "losses.jsonl"
        self.marker = folder / "struck"
        self.started: list[subprocess.Popen[bytes]] = []
        ckptstore.init(folder / "ckpts").close()

    def start(
        self, *options: str, strike: str | None = None, is_host: bool = True
    ) -> subprocess.Popen[bytes]:
        """An agent.

        Args:
            options: of torchrun.
            strike: ``RANK HOW``: which of its workers is struck in the save of step 10, and how.
            is_host: the rendezvous is held there, so it must stay.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_TEST")}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "CKPTSTORE_MANIFEST": ":memory:",
            "PYTHONPATH": str(ROOT),
        }
        if strike is not None:
            environment["CKPT_TEST_AT"] = f"{STRUCK} {strike} {self.marker}"
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        command += [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"localhost:{self.port}",
            "--rdzv-id",
            "elastic",
        ]
        command += [
            "--rdzv-conf",
            f"last_call_timeout=12,keep_alive_interval=2,is_host={int(is_host)}",
            "--monitor-interval",
            "0.5",
        ]
        command += ["-m", "tests.ranks._elastic", "--store", str(self.folder / "ckpts")]
        command += ["--steps", "20", "--save-every", str(EVERY), "--global-batch", str(GLOBAL_BATCH)]
        command += ["--deadline", "8", "--losses", str(self.losses)]
        log = self.folder / f"agent{len(self.started)}.log"
        with log.open("wb") as output:
            agent = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.started.append(agent)
        return agent

    def wait_for(self, what: str, there: Callable[[], Any]) -> None:
        end = time.monotonic() + SECONDS
        while not there():
            assert time.monotonic() < end, f"{what} did not come in {SECONDS:g} s\n{self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-6000:] for path in sorted(self.folder.glob("*.log"))
        )

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """SIGKILL to an agent and its workers."""
        workers = _children(agent.pid)
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for agent in self.started:
            if agent.poll() is None:
                self.kill(agent)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.losses.read_text().splitlines()]


def _children(pid: int) -> list[int]:
    """Processes that this one has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    try:
        yield made
    finally:
        made.close()


def check(agents: Agents, sizes: list[int]) -> None:
    """It trained to the end on that many ranks, one after the other, from the newest whole checkpoint on."""
    before, after = agents.lines()[: STRUCK - 1], agents.lines()[STRUCK - 1 :]
    assert [line["step"] for line in before] == list(range(1, STRUCK))
    assert {line["ranks"] for line in before} == {sizes[0]}
    assert [line["step"] for line in after] == list(range(STRUCK - EVERY + 1, 21)), "from step 5 on"
    assert {line["ranks"] for line in after} == {sizes[1]}
    again = {line["step"]: line["loss"] for line in after}
    for line in before[STRUCK - EVERY :]:
        # The same global batches, from the same weights: the same loss but for the order of sums.
        assert again[line["step"]] == pytest.approx(line["loss"], rel=1e-5)
    assert all(line["samples"] == GLOBAL_BATCH * line["step"] for line in agents.lines())
    with contextlib.closing(ckptstore.open(agents.folder / "ckpts")) as store:
        found = store.run("elastic").checkpoints()
        assert [checkpoint.step for checkpoint in found] == [5, 10, 15, 20]
        assert [checkpoint.record.world_size for checkpoint in found] == [sizes[0], *[sizes[1]] * 3]
        assert not store.verify().problems


def test_an_agent_dies_with_its_worker_in_mid_save_and_the_other_goes_on_alone(agents):
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    stays = agents.start(*options)
    goes = agents.start(*options, strike="* stuck", is_host=False)
    agents.wait_for("the save", agents.marker.exists)
    agents.kill(goes)
    agents.wait_for("the end", lambda: stays.poll() is not None)
    assert stays.returncode == 0, agents.logs()
    check(agents, [2, 1])


@pytest.mark.soak  # the test above goes the same way, and further
def test_a_worker_dies_in_mid_save_and_as_many_go_on(agents):
    agent = agents.start("--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "2", strike="1 dead")
    agents.wait_for("the end", lambda: agent.poll() is not None)
    assert agent.returncode == 0, agents.logs()
    check(agents, [2, 2])
