"""The files of examples/cron do what docs/cron.md says: they are run, not only read."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore import errors
from ckptstore.gc.lock import Lock
from ckptstore.metrics import definitions
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.tier.policies import write_policy
from tests.crash._support import CHUNK_BYTES, TRAIN, make_state

ROOT = Path(__file__).parents[2]
CRON = ROOT / "examples" / "cron"
PAGE = (ROOT / "docs" / "cron.md").read_text(encoding="utf-8")

PROGRAM = "/opt/ckptstore/bin/ckptstore"
STORE = "/data/ckpts"
METRICS = "/var/lib/node_exporter/textfile"
SECONDS = 60


class Host:
    """A machine on which the paths of the examples lead to places of this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "ckpts"
        self.program = self.script("ckptstore", f'exec {shlex.quote(sys.executable)} -m ckptstore "$@"')
        (folder / "textfile").mkdir()
        with ckptstore.init(self.store, chunk_bytes=CHUNK_BYTES) as store:
            write_policy(store.tiers, None, Policy.of(Keep(last=1)))
            with store.run(TRAIN, auto_gc=False) as run:
                for step in (1, 2):
                    run.save(step, make_state(step))

    def script(self, name: str, body: str) -> Path:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def here(self, text: str) -> str:
        """`text` with the paths of this machine."""
        text = text.replace(PROGRAM, str(self.program)).replace(STORE, str(self.store))
        return text.replace(METRICS, str(self.folder / "textfile"))

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.folder), "PATH": "/usr/bin:/bin", **variables}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    def busy(self) -> Lock:
        """While it is entered, somebody else collects."""
        return Lock(ckptstore.open(self.store).tier)

    def expiring(self) -> list[int]:
        with ckptstore.open(self.store) as store:
            return [found.step for found in store.run(TRAIN).checkpoints() if found.state == "expiring"]

    def metrics(self) -> str:
        return (self.folder / "textfile" / "ckptstore_gc.prom").read_text()


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def as_cron_reads(line: str) -> str:
    """The command of a line of a crontab: a bare % ends it, and \\% stands for one."""
    command = line.split(maxsplit=5)[5]
    return re.split(r"(?<!\\)%", command)[0].replace("\\%", "%")


def test_the_crontab_line_collects_in_silence_and_tells_when_it_is_busy(host):
    lines = (CRON / "crontab").read_text().splitlines()
    (line,) = [line for line in lines if re.match(r"[0-9*]", line)]
    assert line in PAGE
    assert re.match(r"([0-9*/,-]+ ){5}/", line)
    command = host.here(as_cron_reads(line))
    made = host.run("/bin/sh", "-c", command)
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    assert host.expiring() == [1]
    assert 'ckptstore_gc_exit_code{tier="main"} 0' in host.metrics()
    with host.busy():
        made = host.run("/bin/sh", "-c", command)
    assert (made.returncode, made.stdout) == (11, "")
    assert "is being collected" in made.stderr
    assert 'ckptstore_gc_exit_code{tier="main"} 11' in host.metrics()


def test_a_bare_percent_sign_in_a_crontab_would_cut_the_command():
    line = "1 2 * * * gc --max-delete 30% --grace 2d"
    assert as_cron_reads(line) == "gc --max-delete 30"


def test_the_systemd_service_collects(host):
    unit = (CRON / "ckptstore-gc.service").read_text()
    assert re.search(r"^SuccessExitStatus=(.*)$", unit, re.MULTILINE)[1].split() == ["3", "11"]
    command = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1]
    assert not re.search(r"(?<!%)%(?!%)", command), "a lone % is a specifier"
    made = host.run(*shlex.split(host.here(command.replace("%%", "%"))))
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("tier main:")
    assert host.expiring() == [1]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(host, tmp_path):
    units = tmp_path / "units"
    units.mkdir()
    for name in ("ckptstore-gc.service", "ckptstore-gc.timer"):
        (units / name).write_text(host.here((CRON / name).read_text()))
    made = host.run("systemd-analyze", "verify", *map(str, units.iterdir()))
    said = [line for line in made.stderr.splitlines() if "ckptstore-gc" in line]
    assert (made.returncode, said) == (0, [])


def test_the_kubernetes_job_collects_and_knows_every_exit_code(host):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((CRON / "cronjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    spec = job["spec"]["jobTemplate"]["spec"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # else podFailurePolicy is refused
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    ruled: dict[str, list[int]] = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == container["name"]
            assert rule["onExitCodes"]["operator"] == "In"
            ruled[rule["action"]] = rule["onExitCodes"]["values"]
    again = {1, 3, 15}
    assert ruled["Ignore"] == [11]
    assert ruled["FailJob"] == sorted(exit_codes() - again - {11})
    made = host.run(*container["command"], *map(host.here, container["args"]), PATH=f"{host.folder}:/usr/bin")
    assert made.returncode == 0, made.stderr
    assert host.expiring() == [1]


def exit_codes() -> set[int]:
    """All codes that an error of ours ends with."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return {kind.exit_code for kind in kinds if issubclass(kind, errors.CkptstoreError)}


def test_the_page_says_what_every_exit_code_asks_for():
    rows = re.findall(r"^\| ([0-9, ]+) \|", PAGE, re.MULTILINE)
    named = {int(code) for row in rows for code in row.split(",")}
    assert named == {0, 3, *exit_codes()}


@pytest.fixture
def node(host):
    """A node of a cluster: the epilog, and stand-ins for what it calls."""
    host.script("scontrol", 'echo "$FIRST_NODE"')
    host.script("runuser", '[ "$1 $3" = "-u --" ] || exit 99; echo "$2" >>"$HOME/users"; shift 3; exec "$@"')
    host.script("logger", 'echo "$@" >>"$HOME/log"')
    (host.folder / "stores").write_text(f"# ours\n\n{host.store}\n")
    script = (CRON / "slurm-epilog.sh").read_text()
    assert script.count("\nPATH=") == 1
    host.script("epilog", script.replace("\nPATH=", f"\nPATH={host.folder}:"))
    return host


def epilog(node, **variables):
    given = {
        "CKPTSTORE_PROGRAM": str(node.program),
        "CKPTSTORE_STORES": str(node.folder / "stores"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_USER": "eva",
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "SLURMD_NODENAME": "gpu1",
        "FIRST_NODE": "gpu1",
    }
    made = node.run(str(node.folder / "epilog"), **(given | variables))
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")  # else the node is drained
    log = node.folder / "log"
    return log.read_text() if log.exists() else ""


def test_the_slurm_epilog_collects_once_and_as_the_user(node):
    assert epilog(node, SLURMD_NODENAME="gpu2") == ""
    assert not (node.folder / "users").exists(), "only the first node of a job collects"
    assert epilog(node) == ""
    assert (node.folder / "users").read_text() == "eva\n"
    assert node.expiring() == [1]


def test_the_slurm_epilog_ends_well_whatever_goes_wrong_and_says_so(node):
    (node.folder / "stores").write_text(f"{node.folder / 'absent'}\n")
    log = epilog(node)
    assert "job 17" in log
    assert "ended with 10" in log
    assert epilog(node, CKPTSTORE_STORES=str(node.folder / "none"), SLURM_JOB_USER="") == log


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "shellcheck"])
def test_the_slurm_epilog_is_plain_shell(host, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    options = [] if shell == "shellcheck" else ["-n"]
    made = host.run(shell, *options, str(CRON / "slurm-epilog.sh"))
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert os.access(CRON / "slurm-epilog.sh", os.X_OK)


def test_the_alerts_are_on_metrics_that_there_are():
    yaml = pytest.importorskip("yaml")
    alerts = yaml.safe_load((CRON / "alerts.yaml").read_text())
    (group,) = alerts["groups"]
    written = {f"ckptstore_{each.name}" for each in definitions.OF_A_ROUND}
    for rule in group["rules"]:
        assert set(re.findall(r"ckptstore_\w+", rule["expr"])) <= written, rule["alert"]
        assert rule["annotations"]["summary"]
    assert "CheckpointsNotCollected" in {rule["alert"] for rule in group["rules"]}
