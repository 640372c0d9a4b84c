from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from ckptstore import doctor
from ckptstore.errors import OutOfSpaceError
from ckptstore.model.ids import Attempt
from ckptstore.tier.intents import Intent
from tests.cli.conftest import damage_record


def by_name(document):
    found = {}
    for finding in document["findings"]:
        found.setdefault(finding["name"], []).append(finding)
    return found


def everything_in(place):
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in place.rglob("*")
    }


PROBES = [
    *("ckptstore", "sqlite", "blake3", "numpy", "msgpack", "torch", "marker", "space", "inodes"),
    *("file system", "manifest", "records", "intents", "leftovers"),
    *("write", "clock", "round trip", "create if absent", "listing"),
]


def test_a_sound_store_passes_every_probe_and_is_as_before(cli, place):
    cli("-s", place, "ls")
    before = everything_in(place)
    answer = cli("doctor", place, "--json")
    assert answer.code == 0
    found = by_name(answer.json)
    assert set(PROBES) <= set(found)
    assert answer.json["ok"] is True
    assert answer.json["failed"] == 0
    assert "4 readable" in found["records"][0]["found"]
    assert everything_in(place) == before


def test_text_says_what_each_finding_means(cli, place):
    answer = cli("-s", place, "doctor")
    assert answer.code == 0
    assert "ok    create if absent  one of 16 threads won" in answer.out
    assert "0 failed" in answer.out.splitlines()[-1]


def test_no_write_changes_nothing_not_even_the_manifest(cli, place):
    (place / "manifest.db").unlink()
    before = everything_in(place)
    answer = cli("doctor", place, "--no-write", "--json")
    assert answer.code == 0
    assert "write" not in by_name(answer.json)
    assert "none yet" in by_name(answer.json)["manifest"][0]["found"]
    assert everything_in(place) == before


def test_no_store_is_a_finding_and_ends_with_1(cli, tmp_path):
    answer = cli("doctor", tmp_path / "nothing")
    assert answer.code == 1
    assert "there is no store" in answer.out
    assert cli("doctor").code == 1
    assert not (tmp_path / "nothing").exists()


def test_a_store_of_a_newer_format_is_a_finding(cli, place):
    marker = place / "ckptstore.json"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 9'))
    answer = cli("doctor", place)
    assert answer.code == 1
    assert "upgrade" in answer.out


def test_unreadable_records_fail(cli, place):
    damage_record(place, 20)
    answer = cli("doctor", place, "--json")
    assert answer.code == 1
    records = by_name(answer.json)["records"]
    assert [finding["status"] for finding in records] == ["fail"]
    assert "-20-" in records[0]["found"]


def test_what_killed_processes_left_is_a_warning(cli, place, store):
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    environment = store.tier.environment

    class Dead(type(environment)):
        pid = int(child.stdout)

    tier = type(store.tier)(store.tier.backend, store.tier.marker, Dead())
    Intent.announce(tier, "save", str(Attempt(environment.new_ulid(), 40, 4)), "gpt", [])
    Intent.announce(store.tier, "save", str(Attempt(environment.new_ulid(), 50, 5)), "gpt", [])
    store.run("gpt").pin(10)
    leftover = place / "chunks" / "aa" / ".x.0123456789abcdef.tmp"
    leftover.write_bytes(b"x" * 100)
    os.utime(leftover, (1, 1))
    answer = cli("doctor", place, "--json")
    assert answer.code == 0
    found = by_name(answer.json)
    assert found["intents"][0]["found"] == "1 under way, 1 pins"
    assert [finding["status"] for finding in found["intents"]] == ["ok", "warn"]
    assert f"process {Dead.pid}" in found["intents"][1]["found"]
    assert (found["leftovers"][0]["status"], found["leftovers"][0]["found"][:17]) == (
        "warn",
        "1 temporary files",
    )
    assert answer.json["warnings"] >= 2


class Lying:
    """A backend that passes everything on, but for what a test replaces."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def examined(store, backend):
    store.tier.backend = backend
    return {finding.name: finding for finding in doctor.examine(store)}


def test_creation_that_is_not_atomic_fails(store):
    class Overwriting(Lying):
        def put(self, key, buffers, *, if_absent=False):
            self.inner.put(key, buffers)

    finding = examined(store, Overwriting(store.tier.backend))["create if absent"]
    assert finding.status == "fail"
    assert "16 of 16" in finding.found


def test_changed_bytes_fail(store):
    class Changing(Lying):
        def get(self, key, *, max_bytes):
            data = self.inner.get(key, max_bytes=max_bytes)
            return data[:-1] + b"?" if key.startswith("doctor/") and len(data) > 1000 else data

    assert examined(store, Changing(store.tier.backend))["round trip"].status == "fail"


def test_a_listing_that_lags_fails(store):
    class Forgetful(Lying):
        def list(self, prefix):
            return (info for info in self.inner.list(prefix) if not info.key.endswith("list3"))

    assert examined(store, Forgetful(store.tier.backend))["listing"].status == "fail"


def test_a_clock_that_is_off_is_a_warning(store):
    import dataclasses

    class Late(Lying):
        def head(self, key):
            info = self.inner.head(key)
            return dataclasses.replace(info, modified=info.modified - 100)

    finding = examined(store, Late(store.tier.backend))["clock"]
    assert finding.status == "warn"
    assert "99" in finding.found


def test_a_full_disk_is_a_finding_and_what_was_written_is_cleaned(store, place):
    class Full(Lying):
        def put(self, key, buffers, *, if_absent=False):
            if key.endswith(".bytes"):
                raise OutOfSpaceError("no space left")
            self.inner.put(key, buffers, if_absent=if_absent)

    finding = examined(store, Full(store.tier.backend))["probe"]
    assert (finding.status, finding.found) == ("fail", "no space left")
    assert not (place / "doctor").exists()


@pytest.mark.parametrize(("version", "status"), [("2.5.1", "warn"), ("2.6.0+cpu", "ok"), ("3.0", "ok")])
def test_torch_is_judged_by_its_version_without_import(monkeypatch, version, status):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert [f.status for f in doctor.examine_installation() if f.name == "torch"] == [status]


def test_without_torch_all_is_well(monkeypatch):
    def missing(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", missing)
    finding = next(f for f in doctor.examine_installation() if f.name == "torch")
    assert (finding.status, finding.found) == ("ok", "not installed")


def test_an_empty_place_that_is_named_is_tried_out_and_stays_empty(cli, tmp_path):
    (tmp_path / "new").mkdir()
    answer = cli("doctor", "new", "--json")
    assert answer.code == 0
    found = by_name(answer.json)
    assert found["store"][0]["status"] == "warn"
    assert "ckptstore init new" in found["store"][0]["meaning"]
    assert found["round trip"][0]["status"] == "ok"
    assert everything_in(tmp_path / "new") == {}


def test_in_a_place_with_other_files_nothing_is_written(cli, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("x")
    answer = cli("doctor", "home")
    assert answer.code == 1
    assert "there is no store" in answer.out
    assert list(everything_in(tmp_path / "home")) == ["thesis.txt"]


def test_text_is_by_tier(cli, tmp_path):
    (tmp_path / "two.toml").write_text(
        '[[tiers]]\nname = "nvme"\nurl = "hot"\n[[tiers]]\nname = "shared"\nurl = "cold"\n'
    )
    cli("init", "two.toml")
    lines = cli("doctor", "two.toml").out.splitlines()
    assert lines.index("tier nvme") < lines.index("tier shared")
    assert sum(line.startswith("ok    commit mode") for line in lines) == 2
