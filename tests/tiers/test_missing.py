"""Saving while a colder tier is missing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import BackendError, PermissionDeniedError, StoreNotFoundError, WrongStoreError
from ckptstore.store import Store
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier import layout
from ckptstore_memory import MemoryBackend
from tests.crash._support import make_state
from tests.replicate.made import opened, places
from tests.tiers._support import RUN, make_store

OFFLINE = r"store\.run\(\.\.\., offline=True\)"


@dataclasses.dataclass
class Two:
    """A store of two tiers in memory, with a session and a checkpoint in the hot one."""

    hot: MemoryBackend
    cold: MemoryBackend
    toml: Path
    marker: bytes

    @contextlib.contextmanager
    def opened(self, required: str = "async") -> Iterator[Store]:
        self.toml.write_text(
            f'[[tiers]]\nname = "hot"\nurl = "{self.hot.url}"\n'
            f'[[tiers]]\nname = "cold"\nurl = "{self.cold.url}"\nreplicate = "{required}"\n'
        )
        with contextlib.closing(ckptstore.open(self.toml)) as store:
            yield store

    def unmount(self) -> None:
        self.cold.delete([layout.MARKER])

    def mount(self) -> None:
        self.cold.put(layout.MARKER, [self.marker])


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store, store.run(RUN) as run:
            run.save(1, make_state(1)).result()
        yield Two(hot, cold, tmp_path / "ckptstore.toml", cold.get(layout.MARKER, max_bytes=9999))


@pytest.mark.parametrize("required", ["manual", "async", "commit"])
def test_no_session_opens_while_a_tier_may_know_of_a_later_one(two, required, caplog):
    """Nor must a disk that is not mounted turn "commit" into "async"."""
    two.unmount()
    with two.opened(required) as store:
        assert store.run(RUN).latest.step == 1  # what is there can be read
        with pytest.raises(StoreNotFoundError, match=f"'cold' is missing.*mount it.*{OFFLINE}"):
            store.run(RUN).save(2, make_state(2)).result()
        with store.run(RUN, offline=True) as run:
            run.save(2, make_state(2)).result()
            assert "without tier cold" in caplog.text
            assert run.latest.step == 2


def test_a_disk_that_is_unmounted_later_knows_of_no_session_either(two, caplog):
    with two.opened() as store:
        two.unmount()
        with pytest.raises(WrongStoreError, match=f"tier 'cold' does not say.*marker is gone.*{OFFLINE}"):
            store.run(RUN).start()
        before = list(two.cold.list(""))
        assert store.run(RUN, offline=True).start().number == 2
        assert "cold is not asked" in caplog.text
        assert list(two.cold.list("")) == before
        two.mount()
        assert store.run(RUN).start().number == 3  # and what was opened meanwhile counts


def test_a_session_that_only_the_cold_tier_knows_of_is_followed_by_the_next(two):
    """A hot disk that was restored from an old image; and another tier that is missing changes nothing."""
    with contextlib.closing(opened(two.hot, cold := FaultBackend(two.cold), requirement="async")) as store:
        for offline in (False, True):
            run = store.run(RUN, offline=offline)
            number = run.start().number
            two.hot.delete([layout.epoch_key(run.key, number)])
            assert run.start().number == number + 1
        error = PermissionDeniedError("no entry")
        cold.script.append(Fault("error", op="list", key="runs/*", times=None, error=error))
        with pytest.raises(BackendError, match=f"'cold' does not say.*no entry.*{OFFLINE}") as caught:
            store.run(RUN).start()
        assert isinstance(caught.value, PermissionDeniedError)
        assert store.run(RUN, offline=True).start().number == number + 2


def test_facts_are_written_where_a_tier_is_left(tmp_path, caplog):
    """Training goes on; the tier that missed one is named."""
    make_store(tmp_path)
    with contextlib.closing(ckptstore.open(tmp_path / "ckptstore.toml")) as store:
        run = store.run(RUN)
        checkpoint = run.latest
        (tmp_path / "cold").rename(tmp_path / "away")
        run.annotate(checkpoint, metrics={"late": 1.0})
        assert "tier cold does not know" in caplog.text
        assert run.latest.metrics["late"] == 1.0


def test_there_is_none_yet_is_not_said_while_a_tier_is_missing_that_may_have_some(two):
    """A new node: its disk is empty, and the bucket that holds everything does not answer."""
    with two.opened() as store:
        store.replication.run()
    for info in list(two.hot.list("")):
        if info.key.startswith(("commits/", "runs/", "notes/")):
            two.hot.delete([info.key])
    two.unmount()
    with two.opened() as store:
        run = store.run(RUN)
        with pytest.raises(BackendError, match=r"may have some in tier 'cold'") as caught:
            run.restore(make_state(0))
        assert "offline=True" in caught.value.hint
        assert store.run(RUN, offline=True).restore(make_state(0)) is None
        with pytest.raises(BackendError, match="'cold'"):
            store.run("never seen").restore(make_state(0))
    two.mount()
    with two.opened() as store:
        assert store.run(RUN).restore(make_state(0)) == 1
        assert store.run("never seen").restore(make_state(0)) is None
