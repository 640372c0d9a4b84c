"""Faults between a store and its bucket: whole saves and restores; nothing lost, nothing committed twice."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.errors import ChunkDamagedError, CkptstoreError, PermissionDeniedError, SessionSupersededError
from tests.crash._support import TRAIN, Model, blank_like, make_state, records, same, store_over
from tests.s3._faulty import PREFIX, rigged

COMMIT = "*/commits/*"


@pytest.fixture
def rig(monkeypatch):
    with rigged(monkeypatch) as rig:
        yield rig


def save(run, step, model):
    """Saves, and expects it to be there from now on."""
    state = make_state(step)
    made = run.save(step, state).result()
    model.saved(TRAIN, step, state, made.id)
    return made


def assert_each_committed_once(rig):
    """No commit key was given two contents, and no step two records."""
    for key, contents in rig.server.puts.items():
        if "/commits/" in key:
            assert len(set(contents)) == 1, key
    steps = [key.rpartition("/")[2].split("-")[1] for key in rig.server.objects if "/commits/" in key]
    assert len(steps) == len(set(steps))


PASSING = {
    "503 for everything, often": [("status", "*", "*", {"times": 12})],
    "503 for commits": [("status", "PutObject GetObject", COMMIT, {"times": 12})],
    "500 now and then": [
        ("status", "*", "*", {"status": 500, "code": "InternalError", "skip": skip})
        for skip in range(1, 40, 4)
    ],
    "409 for the commit": [
        ("status", "PutObject", COMMIT, {"status": 409, "code": "ConditionalRequestConflict"})
    ],
    "resets before": [("reset_before", "*", "*", {"skip": skip}) for skip in range(0, 40, 5)],
    "resets within requests": [("reset_in_request", "PutObject", "*", {"skip": n}) for n in range(0, 16, 3)],
    "lost replies to chunks": [("lost_reply", "PutObject", "*/chunks/*", {"times": 2})],
    "lost replies to packs and tables": [("lost_reply", "PutObject", "*/packs/*", {"times": 2})],
    "lost reply to the intent": [("lost_reply", "PutObject", "*/intents/*", {"times": 1})],
    "lost reply to the epoch": [("lost_reply", "PutObject", "*/epochs/*", {"times": 1})],
    "lost reply to the commit": [("lost_reply", "PutObject", COMMIT, {"times": 1})],
    "lost replies to the commit": [("lost_reply", "PutObject", COMMIT, {"times": 5})],
    "lost reply to the commit, then silence": [
        ("lost_reply", "PutObject", COMMIT, {"times": 1}),
        ("reset_before", "PutObject GetObject", COMMIT, {"times": 6}),
    ],
    "short replies": [("short_body", "GetObject ListObjectsV2", "*", {"skip": n}) for n in range(0, 12, 3)],
    "truncated chunks": [("truncate_upload", "PutObject", "*/chunks/*", {"count": 100, "times": 2})],
    "framing in chunks": [("store_framing", "PutObject", "*/chunks/*", {"times": 2})],
}


@pytest.mark.parametrize("faults", PASSING.values(), ids=PASSING.keys())
def test_a_save_through_passing_faults_is_there_once(rig, faults):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        struck = [rig.proxy.add(*fault[:3], **fault[3]) for fault in faults]
        save(run, 1, model)
        save(run, 2, model)
        assert all(fault.struck for fault in struck[:1])
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2]
    assert_each_committed_once(rig)
    rig.check(model, next_step=None, wholly=False)


@pytest.mark.parametrize(
    "faults",
    [
        [("status", "GetObject", "*", {"times": 12})],
        [("reset_in_reply", "GetObject", "*", {"skip": n}) for n in range(0, 12, 2)],
        [("short_body", "GetObject", "*", {"skip": n}) for n in range(0, 12, 2)],
        [("short_body", "ListObjectsV2", "*", {"times": 3})],
        [("lost_reply", "GetObject HeadObject", "*", {"skip": n}) for n in range(0, 12, 2)],
    ],
    ids=["503", "reset in reply", "short bodies", "short listings", "lost replies"],
)
def test_a_restore_through_passing_faults_is_exact(rig, faults):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
    for fault in faults:
        rig.proxy.add(*fault[:3], **fault[3])
    with rig.store(make=False) as store:
        state = blank_like(make_state(0))
        assert store.run(TRAIN).restore(state) == 1
        assert same(state, make_state(1))


# --- faults that last -----------------------------------------------------------------------------

LASTING = {
    "read-only bucket": ("status", "PutObject DeleteObject", "*", {"status": 403, "code": "AccessDenied"}),
    "500 for chunks": ("status", "PutObject", "*/chunks/*", {"status": 500, "code": "InternalError"}),
    "truncated chunks": ("truncate_upload", "PutObject", "*/chunks/*", {"count": 100}),
    "framing in chunks": ("store_framing", "PutObject", "*/chunks/*", {}),
    "truncated commits": ("truncate_upload", "PutObject", COMMIT, {"count": 100}),
    "framing in commits": ("store_framing", "PutObject", COMMIT, {}),
    "silence at the commit": ("reset_before", "PutObject", COMMIT, {}),
    "503 for ever": ("status", "PutObject", "*/chunks/*", {}),
}


@pytest.mark.parametrize("fault", LASTING.values(), ids=LASTING.keys())
def test_a_save_that_cannot_succeed_fails_by_name_and_harms_nothing(rig, fault):
    kind, operations, key, given = fault
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
        rig.proxy.add(kind, operations, key, times=None, **given)
        with pytest.raises(CkptstoreError) as raised:
            run.save(2, make_state(2)).result()
        assert "s3://bucket/team/ckpts" in str(raised.value)
        if given.get("code") == "AccessDenied":
            assert isinstance(raised.value, PermissionDeniedError)
        rig.proxy.heal()
        save(run, 3, model)
    model.maybe.append((TRAIN, 2, make_state(2)))
    if key != COMMIT or kind == "reset_before":
        rig.check(model, wholly=False)
    else:  # what the server made of the record stays under its key, which nobody overwrites
        with rig.store(make=False) as store:
            assert [checkpoint.step for checkpoint in store.run(TRAIN).checkpoints()] == [1, 3]
            assert all(same(store.run(TRAIN)[step].load(), make_state(step)) for step in (1, 3))


def test_read_only_buckets_can_be_restored_from(rig):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
    rig.proxy.add(
        "status", "PutObject DeleteObject DeleteObjects", status=403, code="AccessDenied", times=None
    )
    with rig.store(make=False) as store:
        assert same(store.run(TRAIN).latest.load(), make_state(1))
        assert not store.verify().problems


@pytest.mark.parametrize("times", [1, None])
def test_wrong_bytes_of_the_right_length_are_never_given_out(rig, times):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
    rig.proxy.add("wrong_bytes", "GetObject", "*/chunks/*", times=times)
    # Whether one bad reply is made good by a second is the reader's business.
    outcome = pytest.raises(ChunkDamagedError) if times is None else contextlib.suppress(ChunkDamagedError)
    with rig.store(make=False) as store, outcome:
        assert same(store.run(TRAIN).latest.load(), make_state(1))
    rig.check(model, wholly=False)


def test_wrong_bytes_in_documents_are_noticed(rig):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
    rig.proxy.add("wrong_bytes", "GetObject", COMMIT, times=None)
    with pytest.raises(CkptstoreError), rig.store(make=False) as store:
        store.run(TRAIN).restore(blank_like(make_state(0)))
    rig.check(model, wholly=False)


# --- places that keep no conditions, and listings that lag ----------------------------------------


def test_a_place_without_conditional_puts_serves_one_writer(rig, caplog):
    rig.proxy.add("strip_condition", times=None)
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
        save(run, 2, model)
        assert not store.tier.backend.capabilities.create_if_absent
    assert_each_committed_once(rig)
    with rig.store(make=False) as store:
        state = blank_like(make_state(0))
        assert store.run(TRAIN).restore(state) == 2
        assert same(state, make_state(2))
        save(store.run(TRAIN), 3, model)
    assert not [key for key in rig.server.objects if "doctor" in key]
    rig.check(model, wholly=False)


def test_g05_no_commit_relies_on_a_listing(rig):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        lag = rig.proxy.add("lagging_list", "ListObjectsV2", times=None)
        for step in (1, 2, 3):
            save(run, step, model)
    assert lag.struck
    assert_each_committed_once(rig)
    rig.check(model, wholly=False)


def test_g05_a_takeover_with_lagging_listings_makes_a_new_epoch(rig):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        rig.proxy.add("lagging_list", "ListObjectsV2", times=None)
        save(run, 1, model)
        with rig.store(make=False) as other, contextlib.closing(other.run(TRAIN)) as second:
            save(second, 2, model)
            with pytest.raises(SessionSupersededError):
                run.save(3, make_state(3)).result()
    rig.check(model, wholly=False)


def test_c067_a_read_that_is_older_than_the_write_before_it_commits_once(rig):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
        rig.proxy.add("stale_read", "GetObject HeadObject", COMMIT, times=2)
        save(run, 2, model)
    assert_each_committed_once(rig)
    rig.check(model, wholly=False)


def test_c067_reads_that_stay_old_are_told_as_such(rig):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
        rig.proxy.add("stale_read", "GetObject HeadObject", COMMIT, times=None)
        with pytest.raises(CkptstoreError) as raised:
            run.save(2, make_state(2)).result()
        assert "clock" not in str(raised.value)
    model.maybe.append((TRAIN, 2, make_state(2)))
    rig.check(model, wholly=False)


def test_c012_the_record_is_put_after_all_that_it_names(rig):
    model = Model()
    with rig.store() as store, contextlib.closing(store.run(TRAIN)) as run:
        save(run, 1, model)
    puts = [request.key for request in rig.server.operations("PutObject")]
    record = next(n for n, key in enumerate(puts) if "/commits/" in key)
    with contextlib.closing(store_over(rig.direct())) as store:
        (found,) = records(store.tier)
        named = store.run(TRAIN).latest.contents.keys.keys
        assert found.step == 1
    assert named
    assert {f"{PREFIX}/{key}" for key in named} <= set(puts[:record])


def test_g06_a_versioned_bucket_works_as_one_without(rig):
    rig.server.versioned = True
    backend = rig.retrying()
    for key in ("a/1", "a/2"):
        backend.put(key, [b"1"], if_absent=True)
    for _ in range(2):
        assert [result.error for result in backend.delete(["a/1", "a/2"])] == [None, None]
        assert list(backend.list("a/")) == []
    backend.put("a/1", [b"2"], if_absent=True)
    assert backend.get("a/1", max_bytes=1) == b"2"
    assert [key for key, _ in rig.server.kept if "/a/" in key] == [f"{PREFIX}/a/1", f"{PREFIX}/a/2"]
