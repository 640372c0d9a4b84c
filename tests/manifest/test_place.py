"""The manifest lies beside a local tier, else in the cache, never on a network file system."""

import logging
import os
from pathlib import Path

import pytest

from ckptstore.errors import UsageError
from ckptstore.manifest.place import choose, network_file_system, read_mounts

UUID = "0f8fad5b"


@pytest.fixture
def mounts(tmp_path):
    """A mountinfo file; call it with (mount point, type) pairs."""
    file = tmp_path / "mountinfo"

    def write(*pairs):
        lines = [
            f"{20 + i} 1 8:{i} / {point} rw,relatime shared:1 - {kind} dev rw"
            for i, (point, kind) in enumerate(pairs)
        ]
        file.write_text("\n".join(["1 0 8:0 / / rw - ext4 /dev/root rw", *lines, "garbage", ""]))
        return file

    return write


def test_beside_a_local_tier(tmp_path, mounts):
    tier = tmp_path / "tier"
    tier.mkdir()
    place = choose(tier, UUID, environ={"HOME": str(tmp_path)}, mountinfo=mounts())
    assert (place.path, place.read_only) == (tier / "manifest.db", False)
    assert list(tier.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "gpfs", "cifs", "ceph", "fuse.sshfs", "fuse.s3fs", "fuse", "9p"]
)
def test_a_tier_on_a_network_file_system_has_it_in_the_cache(tmp_path, mounts, kind, caplog):
    tier = tmp_path / "tier"
    tier.mkdir()
    with caplog.at_level(logging.INFO):
        place = choose(tier, UUID, environ={"HOME": str(tmp_path)}, mountinfo=mounts((tier, kind)))
    assert place.path == tmp_path / ".cache" / "ckptstore" / UUID / "manifest.db"
    assert kind in place.why
    assert kind in caplog.text


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "fuseblk", "fuse.fuse-overlayfs"]
)
def test_local_file_systems_are_trusted(tmp_path, mounts, kind):
    assert network_file_system(tmp_path / "x", read_mounts(mounts((tmp_path, kind)))) is None


def test_the_innermost_and_latest_mount_counts(tmp_path, mounts):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    listed = read_mounts(mounts((tmp_path, "nfs"), (inner, "nfs"), (inner, "xfs")))
    assert network_file_system(inner / "new" / "deep" / "manifest.db", listed) is None
    assert network_file_system(tmp_path / "a" / "other", listed) == "nfs"
    assert network_file_system(Path(f"{inner}x"), listed) == "nfs"


def test_mount_points_with_spaces_and_links_are_followed(tmp_path, mounts):
    share = tmp_path / "my share"
    share.mkdir()
    (tmp_path / "link").symlink_to(share)
    listed = read_mounts(mounts((str(share).replace(" ", "\\040"), "nfs4")))
    assert network_file_system(tmp_path / "link" / "manifest.db", listed) == "nfs4"


def test_the_cache_folder_follows_xdg(tmp_path, mounts):
    cache = tmp_path / "cache"
    place = choose(None, UUID, environ={"XDG_CACHE_HOME": str(cache), "HOME": "/nowhere"}, mountinfo=mounts())
    assert place.path == cache / "ckptstore" / UUID / "manifest.db"
    assert not cache.exists()
    place = choose(
        None, UUID, environ={"XDG_CACHE_HOME": "relative", "HOME": str(tmp_path)}, mountinfo=mounts()
    )
    assert place.path == tmp_path / ".cache" / "ckptstore" / UUID / "manifest.db"


def test_c196_a_home_on_nfs_is_not_used(tmp_path, mounts, monkeypatch):
    home, local = tmp_path / "home", tmp_path / "local"
    home.mkdir()
    local.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(local))
    place = choose(None, UUID, environ={"HOME": str(home)}, mountinfo=mounts((home, "nfs4")))
    assert place.path == local / f"ckptstore-{os.getuid()}" / UUID / "manifest.db"


def test_a_temporary_folder_that_others_may_write_is_not_used(tmp_path, mounts, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"ckptstore-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert choose(None, UUID, environ={}, mountinfo=mounts()).path is None
    folder.chmod(0o700)
    assert choose(None, UUID, environ={}, mountinfo=mounts()).path == folder / UUID / "manifest.db"
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert choose(None, UUID, environ={}, mountinfo=mounts()).path is None


def test_without_any_local_folder_it_is_in_memory(tmp_path, mounts):
    place = choose(
        tmp_path, UUID, environ={"HOME": str(tmp_path)}, mountinfo=mounts(("/", "nfs"), ("/tmp", "nfs"))
    )
    assert place.path is None
    assert "nfs" in place.why


def test_the_variable_decides(tmp_path, mounts):
    def path(value):
        return choose(tmp_path, UUID, environ={"CKPTSTORE_MANIFEST": value}, mountinfo=mounts()).path

    assert path(str(tmp_path / "x" / "my.db")) == tmp_path / "x" / "my.db"
    assert path(str(tmp_path)) == tmp_path / UUID / "manifest.db"
    assert path(str(tmp_path / "new") + "/") == tmp_path / "new" / UUID / "manifest.db"
    assert path(":memory:") is None
    assert path("") == tmp_path / "manifest.db"


def test_the_variable_is_refused_on_a_network_file_system(tmp_path, mounts):
    with pytest.raises(UsageError, match="nfs4") as caught:
        choose(
            None,
            UUID,
            environ={"CKPTSTORE_MANIFEST": str(tmp_path / "m.db")},
            mountinfo=mounts((tmp_path, "nfs4")),
        )
    assert "local disk" in caught.value.hint


def test_without_write_access_it_is_read_where_it_lies_else_kept_in_the_cache(tmp_path, mounts, monkeypatch):
    tier = tmp_path / "tier"
    tier.mkdir()
    real = os.access
    refused = {str(tier)}
    monkeypatch.setattr(
        "os.access", lambda p, mode: not (str(p) in refused and mode & os.W_OK) and real(p, mode)
    )
    options = {"environ": {"HOME": str(tmp_path)}, "mountinfo": mounts()}
    assert choose(tier, UUID, **options).path == tmp_path / ".cache" / "ckptstore" / UUID / "manifest.db"
    (tier / "manifest.db").write_bytes(b"")  # what a full disk left
    assert choose(tier, UUID, **options).path == tmp_path / ".cache" / "ckptstore" / UUID / "manifest.db"
    (tier / "manifest.db").write_bytes(b"x")
    place = choose(tier, UUID, **options)
    assert (place.path, place.read_only) == (tier / "manifest.db", True)


def test_a_path_too_long_for_sqlite_is_not_used(tmp_path, mounts):
    deep = tmp_path.joinpath(*["d" * 200] * 3)
    deep.mkdir(parents=True)
    place = choose(deep, UUID, environ={"HOME": str(tmp_path)}, mountinfo=mounts())
    assert place.path == tmp_path / ".cache" / "ckptstore" / UUID / "manifest.db"
    assert "too long" in place.why


def test_the_real_mounts_can_be_read():
    assert read_mounts(Path("/proc/self/mountinfo"))
    assert read_mounts(Path("/no/such/file")) == []
