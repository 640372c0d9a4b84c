"""Faults between a store and its second tier in a bucket: replication, and restoring from there."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.tier.places import write_places
from ckptstore.tier.tier import Tier
from tests.crash._support import CHUNK_BYTES, make_state, memory_place, quiet, same
from tests.replicate.made import RUN, alone, holds, opened, replicate
from tests.s3._faulty import PREFIX, rigged

COMMIT = "*/commits/*"


@pytest.fixture
def rig(monkeypatch):
    with rigged(monkeypatch) as rig:
        yield rig


@pytest.fixture
def hot(rig):
    """The first tier, in memory, of a store whose second one is the rig's bucket."""
    with memory_place() as place:
        first = Tier.create(place, quiet(), chunk_bytes=CHUNK_BYTES)
        uuid = first.marker.store_uuid
        second = Tier.create(rig.direct(), quiet(), chunk_bytes=CHUNK_BYTES, store_uuid=uuid)
        first.name, second.name = "hot", "cold"
        write_places([first, second])
        yield place


@pytest.mark.parametrize(
    ("kind", "operations", "key", "given"),
    [
        ("status", "*", "*", {"times": 12}),
        ("status", "PutObject", "*", {"status": 500, "code": "InternalError", "times": 3}),
        ("reset_in_request", "PutObject", "*/packs/*", {"times": 2}),
        ("lost_reply", "PutObject", "*/chunks/*", {"times": 3}),
        ("lost_reply", "PutObject", COMMIT, {"times": 1}),
        ("lost_reply", "PutObject", COMMIT, {"times": 5}),
        ("truncate_upload", "PutObject", "*/chunks/*", {"count": 100, "times": 1}),
        ("store_framing", "PutObject", "*/chunks/*", {"times": 1}),
        ("lagging_list", "ListObjectsV2", "*", {"times": None}),
        ("strip_condition", "*", "*", {"times": None}),
    ],
)
def test_what_arrives_through_faults_is_whole_and_there_once(rig, hot, kind, operations, key, given):
    with contextlib.closing(opened(hot, rig.backend())) as store:
        run = store.run(RUN)
        for step in (1, 2):
            run.save(step, make_state(step)).result()
        fault = rig.proxy.add(kind, operations, key, **given)
        for _ in range(3):  # what one round leaves the next one brings
            if replicate(store).owed == 0:
                break
        assert fault.struck
        rig.proxy.heal()
        assert replicate(store).owed == 0
    commits = [key for key in rig.server.objects if "/commits/" in key]
    assert len(commits) == 2
    assert all(len(set(rig.server.puts[key])) == 1 for key in commits)
    holds(rig.direct(), (1, make_state(1)), (2, make_state(2)))
    holds(hot, (1, make_state(1)), (2, make_state(2)))


@pytest.mark.parametrize(
    ("kind", "operations", "key", "given"),
    [
        ("status", "PutObject", "*", {"status": 403, "code": "AccessDenied"}),
        ("truncate_upload", "PutObject", "*/chunks/*", {"count": 100}),
        ("reset_before", "PutObject", COMMIT, {}),
    ],
    ids=["read-only", "truncated", "silent at the commit"],
)
def test_c187_what_could_not_be_brought_stays_owed_and_comes_later(rig, hot, kind, operations, key, given):
    with contextlib.closing(opened(hot, rig.backend())) as store:
        store.run(RUN).save(1, make_state(1)).result()
        rig.proxy.add(kind, operations, key, times=None, **given)
        report = replicate(store)
        assert report.owed == 1
        assert report.sent == ()
        assert not [key for key in rig.server.objects if "/commits/" in key]
        rig.proxy.heal()
        assert [sent.step for sent in replicate(store).sent] == [1]
    holds(rig.direct(), (1, make_state(1)))


def test_c012_a_copy_is_visible_only_when_all_of_it_is_there(rig, hot):
    with contextlib.closing(opened(hot, rig.backend())) as store:
        store.run(RUN).save(1, make_state(1)).result()
        before = len(rig.server.operations("PutObject"))
        replicate(store)
    puts = [request.key for request in rig.server.operations("PutObject")[before:]]
    record = next(n for n, key in enumerate(puts) if "/commits/" in key)
    with contextlib.closing(alone(rig.direct())) as store:
        named = store.run(RUN).latest.contents.keys.keys
    assert named
    assert {f"{PREFIX}/{key}" for key in named} <= set(puts[:record])


def test_wrong_bytes_from_the_near_tier_are_replaced_by_the_other_ones(rig, hot):
    with contextlib.closing(opened(hot, rig.direct())) as store:
        store.run(RUN).save(1, make_state(1)).result()
        replicate(store)
    fault = rig.proxy.add("wrong_bytes", "GetObject", "*/chunks/*", times=None)
    with contextlib.closing(opened(rig.backend(), hot)) as store:
        assert same(store.run(RUN).latest.load(), make_state(1))
    assert fault.struck
