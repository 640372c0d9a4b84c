"""Collecting in a bucket: old replies, lagging listings, versions, odd prefixes, servers that want more."""

from __future__ import annotations

import contextlib
import re
import uuid

import click.testing
import pytest

import ckptstore
from ckptstore.cli.app import app
from ckptstore.errors import CkptstoreError
from ckptstore.gc.lock import LOCK
from ckptstore.gc.rounds import Settings, run_round
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.testing import FaultBackend
from ckptstore.tier.policies import write_policy
from tests.crash._support import TRAIN, Model, check_place, make_place, make_state, store_over
from tests.gc.made import garbage, open_tier
from tests.s3._faulty import rigged
from tests.s3.conftest import client_of

COMMIT = "*/commits/*"


@pytest.fixture
def rig(monkeypatch):
    with rigged(monkeypatch) as rig:
        yield rig


def trained(place, *steps, last=1):
    """A run of these steps, of which so many are to stay; what must be there then."""
    model = Model()
    with contextlib.closing(store_over(place)) as store:
        write_policy([store.tier], None, Policy.of(Keep(last=last)))
        with store.run(TRAIN, auto_gc=False) as run:
            for step in steps:
                made = run.save(step, make_state(step)).result()
                if step in steps[-last:]:
                    model.saved(TRAIN, step, make_state(step), made.id)
    return model


def full(place):
    return run_round(open_tier(place), Settings())


def test_a_round_in_a_bucket_asks_for_little(rig):
    """The formula of docs/s3.md: a listing a folder, a GET a record, and of what goes a PUT and a batch."""
    make_place(rig.direct())
    model = trained(rig.direct(), *range(1, 7))
    counting = FaultBackend(rig.retrying())
    tier = open_tier(counting)
    counting.log.clear()
    report = run_round(tier, Settings())
    assert len(report.collected) == 5
    assert sum(call.op == "get" and call.key.startswith("commits/") for call in counting.log) <= 6 + 4 * 5
    assert sum(call.op == "delete" for call in counting.log) <= 12
    assert not garbage(rig.direct())
    rig.check(model, next_step=None)


@pytest.mark.parametrize("times", [3, None])
def test_c067_a_round_that_gets_old_replies_loses_nothing_and_blames_no_clock(rig, times):
    make_place(rig.direct())
    model = trained(rig.direct(), 1, 2, 3)
    stale = rig.proxy.add("stale_read", "GetObject HeadObject", times=times)
    said = ""
    try:
        full(rig.retrying())
    except CkptstoreError as error:
        said = str(error)
    assert stale.struck
    assert "clock" not in said
    rig.proxy.heal()
    rig.direct().delete([LOCK])  # as if it had lapsed
    full(rig.direct())
    rig.check(model, next_step=None)
    assert not garbage(rig.direct())


def test_a_lock_whose_reply_was_lost_is_ones_own(rig):
    make_place(rig.direct())
    model = trained(rig.direct(), 1, 2)
    rig.proxy.add("lost_reply", "PutObject", "*/gc/lock")
    assert len(full(rig.retrying()).collected) == 1
    rig.check(model, next_step=None)


def test_c171_a_round_on_a_server_that_demands_content_md5_for_a_batch(rig):
    make_place(rig.direct())
    model = trained(rig.direct(), 1, 2, 3)
    rig.proxy.add(
        "require", "DeleteObjects", header="content-md5", status=400, code="MissingContentMD5", times=None
    )
    report = full(rig.retrying())
    assert len(report.collected) == 2
    assert not report.failures
    assert not garbage(rig.direct())
    rig.check(model, next_step=None)


def test_keys_of_a_batch_that_are_refused_are_told_and_gone_after_the_next_round(rig):
    make_place(rig.direct())
    model = trained(rig.direct(), 1, 2, 3)
    rig.proxy.add("delete_errors", "DeleteObjects", "*/chunks/*", code="AccessDenied", times=1)
    report = full(rig.retrying())
    assert report.failures
    assert {key.partition("/")[0] for key, _ in report.failures} == {"chunks"}
    rig.proxy.heal()
    assert not full(rig.direct()).failures
    assert not garbage(rig.direct())
    rig.check(model, next_step=None)


def test_g05_a_round_by_listings_that_lag_loses_nothing(rig):
    make_place(rig.direct())
    model = trained(rig.direct(), 1, 2)
    lag = rig.proxy.add("lagging_list", "ListObjectsV2", times=None)
    with contextlib.closing(store_over(rig.retrying())) as store, store.run(TRAIN, auto_gc=False) as run:
        for step in (3, 4):
            made = run.save(step, make_state(step)).result()
        model = Model()
        model.saved(TRAIN, 4, make_state(4), made.id)
        with contextlib.suppress(CkptstoreError):
            store.gc()
    assert lag.struck
    rig.proxy.heal()
    full(rig.direct())
    rig.check(model, next_step=None)
    assert not garbage(rig.direct())


def test_g06_a_versioned_bucket_is_collected_once_and_not_over_and_over(rig):
    rig.server.versioned = True
    make_place(rig.direct())
    model = trained(rig.direct(), 1, 2, 3)
    report = full(rig.retrying())
    assert len(report.collected) == 2
    assert report.freed_bytes == 0
    assert report.unfreed_bytes == sum(
        len(content) for key, content in rig.server.kept if "/chunks/" in key or "/packs/" in key
    )
    again = full(rig.retrying())
    assert (again.collected, again.deleted_objects, again.cleared.objects) == ((), 0, 0)
    assert not garbage(rig.direct())
    rig.check(model, next_step=None)


@pytest.fixture
def versioned_bucket(s3_environment):
    """One that keeps versions; removed at the end with all of them."""
    with contextlib.closing(client_of(s3_environment)) as client:
        bucket = f"versions-{uuid.uuid4().hex[:12]}"
        client.create_bucket(Bucket=bucket)
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        yield bucket
        for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket):
            for item in [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]:
                client.delete_object(Bucket=bucket, Key=item["Key"], VersionId=item["VersionId"])
        client.delete_bucket(Bucket=bucket)


def test_g06_a_real_bucket_with_versions_says_what_it_keeps(versioned_bucket):
    url = f"s3://{versioned_bucket}/store"
    with (
        contextlib.closing(ckptstore.init(url)) as store,
        store.run(TRAIN, retention=Keep(last=1), auto_gc=False) as run,
    ):
        for step in (1, 2, 3):
            run.save(step, make_state(step), wait=True)
    said = click.testing.CliRunner().invoke(app, ["-v", "-s", url, "gc"], prog_name="ckptstore").output
    assert re.search(r"2 checkpoints, .* deleted, 0 B freed; .*B not freed: the bucket keeps versions", said)
    with contextlib.closing(ckptstore.open(url)) as store:
        (again,) = store.gc()
        assert (again.collected, again.deleted_objects, again.unfreed_bytes) == ((), 0, 0)
        assert [checkpoint.step for checkpoint in store.run(TRAIN).checkpoints()] == [3]


def test_c177_an_odd_prefix_is_collected_like_any_other(rig):
    prefix = "my runs/a+b%20é"
    make_place(rig.backend(prefix))
    model = trained(rig.backend(prefix), 1, 2, 3)
    assert len(full(rig.backend(prefix)).collected) == 2
    assert not garbage(rig.backend(prefix))
    check_place(rig.backend(prefix), model, next_step=None)


def test_a_document_is_sent_in_one_go_and_a_chunk_only_when_it_may(rig):
    """SeaweedFS keeps an empty object, under the key of an intent say, of who is killed while it asks."""
    backend = rig.direct()
    backend.put("intents/a", [b"1"])
    backend.put("chunks/a", [bytes(100_000)])
    asked = {
        request.key.rpartition("/")[0]: "expect" in request.headers
        for request in rig.server.operations("PutObject")
    }
    assert asked == {"team/ckpts/intents": False, "team/ckpts/chunks": True}
