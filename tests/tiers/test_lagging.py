"""Places whose listings lag behind what was written: a process knows what it has committed itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from ckptstore.backend import Backend, ObjectInfo
from ckptstore.testing import FaultBackend
from ckptstore.tier import layout
from tests.crash._support import TRAIN, make_place, make_state, memory_place, store_over
from tests.ranks._plain_ranks import crew, new_place
from tests.replicate.made import RUN, opened, places, replicate


class Lagging(FaultBackend):
    """Its listings show what was there when it was opened, or at the last :meth:`settle`, and nothing newer.

    Args:
        only: keys that begin so; what ranks tell each other must be shown at some time.
    """

    def __init__(self, inner: Backend, only: str = "") -> None:
        super().__init__(inner)
        self.only = only
        self.settle()

    def settle(self) -> None:
        self.shown = {info.key for info in self.inner.list("")}

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix) if self.shows(info.key))

    def shows(self, key: str) -> bool:
        return key in self.shown or not key.startswith(self.only)


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")


@pytest.fixture
def lagging() -> Iterator[Lagging]:
    with memory_place() as place:
        make_place(place)
        yield Lagging(place)


def test_what_a_session_has_saved_is_there_at_once_and_stays(lagging):
    with store_over(lagging) as store, store.run(TRAIN) as run:
        for step in (1, 2):
            run.save(step, make_state(step), metrics={"loss": 3.0 - step}).result()
            for _ in range(2):  # a listing that does not show it takes nothing away
                assert run.latest.step == step
        assert [run[1].step, run.best("loss", "min").step] == [1, 2]
        assert [one.step for one in run.checkpoints()] == [1, 2]
        rows = store.catalog.ask(lambda manifest: manifest.runs())
        assert [(row.run, row.checkpoints) for row in rows] == [(TRAIN, 2)]
        assert store.checkpoint(f"{TRAIN}@latest").step == 2
        before = len(lagging.log)
        lagging.settle()
        assert [one.step for one in run.checkpoints()] == [1, 2]
        assert not [call for call in lagging.log[before:] if call.op == "head" and "commits/" in call.key]


def test_what_was_collected_meanwhile_is_not_kept(lagging):
    with store_over(lagging) as store, store.run(TRAIN) as run:
        first, _ = (run.save(step, make_state(step)).result() for step in (1, 2))
        lagging.inner.delete([layout.commit_key(run.key, first.id)])
        assert [one.step for one in run.checkpoints()] == [2]


def test_the_manifest_made_anew_has_it_too(lagging):
    with store_over(lagging) as store, store.run(TRAIN) as run:
        run.save(1, make_state(1)).result()
        lagging.shown.add(layout.run_document(run.key))
        store.rebuild()
        assert run.latest.step == 1
        assert [epoch.number for epoch in run.sessions()] == [1]


def test_every_rank_knows_what_was_committed():
    with new_place() as place, crew(Lagging(place, "commits/"), world=2) as ranks:
        for step in (1, 2):
            ranks.each(lambda rank, step=step: rank.save(step))
            assert ranks.each(lambda rank: rank.run.latest.step) == [step, step]


def test_a_copy_that_a_listing_does_not_show_is_not_made_again():
    with places() as (hot, cold), contextlib.closing(opened(hot, Lagging(cold))) as store:
        store.run(RUN).save(1, make_state(1)).result()
        assert [len(replicate(store).sent) for _ in range(2)] == [1, 0]
        assert [copy.tier.name for copy in store.run(RUN)[1].copies] == ["hot", "cold"]
