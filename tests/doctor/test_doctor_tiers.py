"""Doctor on stores of several tiers, on what is installed, and on directories that others clean."""

from __future__ import annotations

import sqlite3

import pytest

import ckptstore
from ckptstore import doctor
from ckptstore.doctor import installation, place

TWO = '[[tiers]]\nname = "nvme"\nurl = "hot"\n[[tiers]]\nname = "shared"\nurl = "cold"\n'


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "ckptstore.toml"
    path.write_text(TWO)
    ckptstore.init(path).close()
    return path


def examined(location, **more):
    with ckptstore.open(location) as store:
        return list(doctor.examine(store, write=False, **more))


def told(findings, name):
    return [(finding.status, finding.found, finding.tier) for finding in findings if finding.name == name]


def test_every_tier_is_examined_and_findings_say_which(toml):
    with ckptstore.open(toml) as store:
        findings = list(doctor.examine(store))
    assert not [finding for finding in findings if finding.status == "fail"]
    assert told(findings, "tiers") == [("ok", "nvme (async), shared (async)", None)]
    for name in ("marker", "records", "space", "purge", "round trip", "commit mode", "listing"):
        assert [tier for _, _, tier in told(findings, name)] == ["nvme", "shared"], name


def test_a_tier_that_is_gone_fails_and_the_other_is_examined(toml):
    (toml.parent / "cold").rename(toml.parent / "elsewhere")
    findings = examined(toml)
    ((status, found, tier),) = told(findings, "reachable")
    assert (status, tier) == ("fail", "shared")
    assert "there is no store" in found
    assert told(findings, "marker")[0][2] == "nvme"
    assert told(findings, "tiers") == [("ok", "nvme (async), shared (does not answer)", None)]


def test_a_tier_that_the_store_has_and_nobody_configured_is_a_warning(toml):
    findings = examined(toml.parent / "hot")
    text = "the store has a tier 'shared' that is not configured here"
    assert told(findings, "tiers") == [("warn", text, None)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TWO + 'replicate = "commit"\n', "shared has replicate = 'commit' here, and 'async' in the store"),
        (TWO.replace("shared", "s3"), "shared is called s3 here"),
        (
            "".join("[[tiers]]" + part for part in reversed(TWO.split("[[tiers]]")[1:])),
            "their order here is shared, nvme; in the store it is nvme, shared",
        ),
    ],
)
def test_a_configuration_that_differs_from_what_the_store_knows_is_a_warning(toml, text, found):
    toml.write_text(text)
    assert told(examined(toml), "tiers") == [("warn", found, None)]


def test_tiers_that_were_never_written_down_are_a_warning(toml):
    for key in (toml.parent / "cold" / "tiers").iterdir():
        key.unlink()
    ((status, found, _),) = [item for item in told(examined(toml), "tiers") if item[0] == "warn"]
    assert (status, found) == ("warn", "shared does not know of the others")


def test_a_manifest_in_wal_mode_is_a_warning(toml):
    with ckptstore.open(toml) as store:
        store.refresh()
    connection = sqlite3.connect(toml.parent / "hot" / "manifest.db")
    connection.execute("PRAGMA journal_mode = wal")
    connection.close()
    ((status, found, _),) = told(examined(toml), "manifest")
    assert status == "warn"
    assert "WAL" in found


@pytest.mark.parametrize(
    ("version", "has_it"),
    [
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 7), False),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 53, 0), False),
    ],
)
def test_versions_of_sqlite_with_the_wal_reset_bug(version, has_it):
    assert installation.has_wal_reset_bug(version) is has_it


MOUNTS = """\
1 1 8:1 / / rw - ext4 /dev/sda rw
2 1 0:2 / /dev/shm rw - tmpfs tmpfs rw
3 1 0:3 / /gscratch rw - lustre mds rw
4 1 0:4 / /run/ram rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/data/ckpts", None),
        ("/home/templeton/ckpts", None),
        ("/tmp/ckpts", "it is in /tmp"),
        ("/var/tmp", "it is in /var/tmp"),
        ("/dev/shm/ckpts", "it is in memory (tmpfs)"),
        ("/run/ram/ckpts", "it is in memory (tmpfs)"),
        ("/gscratch/team/ckpts", "'gscratch' is in the path"),
        ("/lustre/purge-30d/ckpts", "'purge-30d' is in the path"),
        ("/data/tmp/ckpts", "'tmp' is in the path"),
    ],
)
def test_places_that_are_cleaned_by_others_are_told(tmp_path, path, found):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    finding = list(place.file_system(path, mounts))[-1]
    assert finding.name == "purge"
    assert (finding.status, finding.found) == (
        ("ok", "nothing in the path says that old files are deleted here")
        if found is None
        else ("warn", found)
    )
