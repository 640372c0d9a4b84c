"""Who may write a commit key where a place turns out not to create exclusively (DESIGN part 6)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest

from ckptstore.backend import Backend, Capabilities
from ckptstore.errors import BackendError, DeadlineError, GuardError, SaveFailedError
from ckptstore.model.documents import encode_end, encode_record
from ckptstore.model.ids import run_key
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.save.commit import create_record
from ckptstore.save.saver import give_up
from ckptstore.save.session import Session
from ckptstore.testing import FaultBackend
from ckptstore.tier import commits, layout, runs
from ckptstore.tier.tier import Tier
from tests.crash._support import TRAIN, copy_of, make_place, make_state, memory_place, quiet, store_over

KEY = run_key(TRAIN)


class FindsOut(FaultBackend):
    """Says that it creates exclusively, until the first commit key shows that it does not.

    Attributes:
        meanwhile: what another writer does just before that.
    """

    def __init__(self, inner: Backend, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__(inner)
        self.exclusive = True
        self.meanwhile = meanwhile

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, create_if_absent=self.exclusive)

    def put(self, key: str, buffers, *, if_absent: bool = False) -> None:
        if if_absent and key.startswith("commits/"):
            self.exclusive = False
            self.meanwhile()
            raise BackendError("conditions are not implemented here")
        super().put(key, buffers, if_absent=if_absent and self.exclusive)


@pytest.fixture(scope="module")
def saved() -> Iterator[tuple[Backend, CommitRecord]]:
    """A place with one checkpoint, and its record."""
    with memory_place() as backend:
        make_place(backend)
        with store_over(backend) as store, store.run(TRAIN) as run:
            checkpoint = run.save(1, make_state(1)).result()
        yield backend, checkpoint.record


@pytest.fixture
def late(saved) -> Iterator[tuple[Backend, CommitRecord]]:
    """The same before its record was there: its saver is slow."""
    with copy_of(saved[0]) as backend:
        backend.delete([layout.commit_key(KEY, saved[1].attempt)])
        yield backend, saved[1]


def stands(backend: Backend, record: CommitRecord) -> str:
    found = commits.read_commit(Tier.open(backend, quiet()), KEY, record.attempt)
    return "nothing" if found is None else "record" if isinstance(found, CommitRecord) else found.kind


def writes(backend: Backend, record: CommitRecord, kind: str) -> Callable[[], None]:
    """Another process's put of the record, or of a VOID."""
    data = encode_record(record) if kind == "record" else encode_end(CommitEnd(record.attempt, "void", "x"))
    return lambda: backend.put(layout.commit_key(KEY, record.attempt), [data])


def session_of(tier: Tier) -> Session:
    epoch = runs.read_epoch(tier, KEY, 1)
    assert epoch is not None
    return Session(tier, epoch, None)


@pytest.mark.parametrize("meanwhile", ["record", "nothing"])
def test_a_rank_that_gives_up_writes_no_void_where_it_turns_out_that_it_must_not(late, meanwhile):
    backend, record = late
    other = writes(backend, record, meanwhile) if meanwhile == "record" else lambda: None
    tier = Tier.open(FindsOut(backend, other), quiet())
    assert not give_up(tier, session_of(tier), record.attempt, DeadlineError("too late"), leads=False)
    assert stands(backend, record) == meanwhile
    with contextlib.suppress(GuardError):  # and neither does a second one, which knows it from the start
        commits.fence(tier, KEY, record.attempt, "again", owns=False)
    assert stands(backend, record) == meanwhile


def test_rank_0_ends_its_own_attempt_there_unless_its_record_has_come_after_all(late):
    backend, record = late
    tier = Tier.open(FindsOut(backend, writes(backend, record, "record")), quiet())
    assert not give_up(tier, session_of(tier), record.attempt, DeadlineError("too late"), leads=True)
    assert stands(backend, record) == "record"


def test_rank_0_ends_its_own_attempt_there(late):
    backend, record = late
    tier = Tier.open(FindsOut(backend), quiet())
    assert give_up(tier, session_of(tier), record.attempt, DeadlineError("too late"), leads=True)
    assert stands(backend, record) == "void"


@pytest.mark.parametrize("known", [False, True])
def test_a_record_does_not_take_the_place_of_a_void(late, known):
    backend, record = late
    place = FindsOut(backend, writes(backend, record, "void"))
    if known:  # from an earlier commit: a person has given the attempt up since
        place.exclusive = False
        place.meanwhile()
    with pytest.raises(SaveFailedError, match="fenced"):
        create_record(Tier.open(place, quiet()), KEY, record, encode_record(record))
    assert stands(backend, record) == "void"


def test_a_training_alone_saves_on_where_it_finds_out(saved):
    with copy_of(saved[0]) as backend:
        place = FindsOut(backend)
        with store_over(place) as store, store.run(TRAIN) as run:
            run.save(2, make_state(2)).result()
            run.save(3, make_state(3)).result()
        assert not place.exclusive
        with store_over(backend) as store:
            assert [found.step for found in store.run(TRAIN).checkpoints()] == [1, 2, 3]
