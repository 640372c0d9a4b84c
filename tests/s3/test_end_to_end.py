"""A store with a directory and a bucket, by its ckptstore.toml: the whole way, on a real server."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import ckptstore
from ckptstore.inspect.status import status
from tests.crash._support import make_state, same

pytestmark = pytest.mark.s3

RUN = "train/exp 1"
CHUNK_BYTES = 64 << 10
HOT = '[[tiers]]\nname = "hot"\nurl = "hot"\n\n'
COLD = '[[tiers]]\nname = "s3"\nurl = "{url}"\nreplicate = "async"\n'


def write_toml(folder, url, *, hot=True):
    folder.mkdir(exist_ok=True)
    path = folder / "ckptstore.toml"
    path.write_text((HOT if hot else "") + COLD.format(url=url))
    return path


def requests_of(tier):
    return tier.backend.inner.requests.copy()


def got_by(store, monkeypatch):
    """Keys of all objects that a refresh of the manifest reads."""
    backend = store.tiers[0].backend.inner
    keys = []
    with monkeypatch.context() as patch:
        for name in ("get", "read_into"):
            original = getattr(backend, name)

            def told(key, *args, original=original, **options):
                keys.append(key)
                return original(key, *args, **options)

            patch.setattr(backend, name, told)
        store.refresh()
    return keys


def kept(store, tier, step):
    """The state of a checkpoint in one tier: "ok", "absent", ..."""
    (found,) = [one for one in status(store).checkpoints if one.step == step]
    return next(where.presence for where in found.tiers if where.tier == tier)


def flip(path):
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_checkpoint_goes_to_the_bucket_and_comes_back_from_there(s3_url, tmp_path):
    toml = write_toml(tmp_path / "host", s3_url)
    with ckptstore.init(toml, chunk_bytes=CHUNK_BYTES) as store:
        with store.run(RUN) as run:
            for step in (1, 2):
                pending = run.save(step, make_state(step))
                pending.wait("replicated", tier="s3", timeout=60)
        assert [kept(store, "s3", step) for step in (1, 2)] == ["ok", "ok"]
        assert not store.replication.to(store.tiers[1]).owing()

        # Evicted from the directory, it is restored from the bucket, and fetched.
        store.evict(store.plan_evict([f"{RUN}@1"]))
        assert kept(store, "hot", 1) == "absent"
        assert same(store.run(RUN)[1].load(), make_state(1))
        checkpoint = store.run(RUN)[1]
        (entry,) = [
            entry
            for entries in store.replicas(checkpoint.copies[0].run_key).values()
            for entry in entries.values()
            if entry.checkpoint == checkpoint.id
        ]
        assert store.replication.fetch(checkpoint.copies[0].run_key, entry) is not None
        assert kept(store, "hot", 1) == "ok"

        # A flipped byte of the directory is found, passed by, and made good from the bucket.
        for path in (tmp_path / "host" / "hot" / "chunks").glob("*/*"):
            flip(path)
        assert store.verify().problems
        assert same(store.run(RUN).latest.load(), make_state(2))
        hot = store.tiers[0]
        report = store.replication.repair(hot)
        assert {one.step for one in report.repaired} == {1, 2}
        assert not report.failed
        assert [kept(store, "hot", step) for step in (1, 2)] == ["ok", "ok"]
        for tier in ("hot", "s3"):
            assert not store.verify(tier=tier).problems


def test_a_fresh_host_reads_the_bucket_once_and_then_only_what_is_new(s3_url, tmp_path, monkeypatch):
    toml = write_toml(tmp_path / "host", s3_url)
    with ckptstore.init(toml, chunk_bytes=CHUNK_BYTES) as store, store.run(RUN) as run:
        for step in range(1, 6):
            run.save(step, make_state(step), wait=True)
        assert store.replication.drain()
        fresh = write_toml(tmp_path / "fresh", s3_url, hot=False)
        with ckptstore.open(fresh) as other:
            assert same(other.run(RUN).latest.load(), make_state(5))
            assert [one.step for one in other.run(RUN).checkpoints()] == [1, 2, 3, 4, 5]

            nothing_new = got_by(other, monkeypatch)
            assert not [key for key in nothing_new if not key.endswith("/run.mp")]

            run.save(6, make_state(6), wait=True)
            assert store.replication.drain()
            one_new = got_by(other, monkeypatch)
            assert len([key for key in one_new if key.startswith("commits/")]) == 1
            assert len(one_new) <= 4
            assert [one.step for one in other.run(RUN).checkpoints()][-1] == 6
        with ckptstore.open(fresh) as again:  # another process, with the manifest of the first
            reopened = got_by(again, monkeypatch)
            assert not [key for key in reopened if key.startswith("commits/")]
            assert same(again.run(RUN).latest.load(), make_state(6))
        print(f"nothing new: {nothing_new}, one new: {one_new}, reopened: {reopened}")


def test_a_save_of_one_rank_lists_nothing(s3_url):
    with ckptstore.init(s3_url, chunk_bytes=CHUNK_BYTES) as store, store.run(RUN) as run:
        run.save(1, make_state(1), wait=True)
        before = requests_of(store.tiers[0])
        run.save(2, make_state(2), wait=True)
        spent = requests_of(store.tiers[0]) - before
    print(f"a save of one rank: {spent}")
    assert not {name: count for name, count in spent.items() if name.startswith("list")}


def test_a_save_of_two_ranks_lists_its_own_parts_only(s3_url, monkeypatch):
    ckptstore.init(s3_url, chunk_bytes=CHUNK_BYTES).close()
    stores = [ckptstore.open(s3_url) for _ in range(2)]
    listed = []
    for store in stores:
        backend = store.tiers[0].backend.inner
        for name in ("list", "list_temporaries"):
            original = getattr(backend, name)

            def told(prefix="", *args, original=original, **options):
                listed.append(prefix)
                return original(prefix, *args, **options)

            monkeypatch.setattr(backend, name, told)
    runs = [
        store.run(RUN, rank=rank, world_size=2, session_key="a", deadline_seconds=30)
        for rank, store in enumerate(stores)
    ]

    def save(step):
        failed = []

        made = {}

        def work(rank):
            own = ckptstore.LocalShard(
                np.full((1, 40_000), step + rank, np.float32), global_shape=(2, 40_000), offsets=(rank, 0)
            )
            try:
                made[rank] = runs[rank].save(step, {"rows": own}).result().id
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        return made[0]

    with contextlib.ExitStack() as stack:
        for store in stores:
            stack.callback(store.close)
        save(1)
        listed.clear()
        before = [requests_of(store.tiers[0]) for store in stores]
        attempt = save(2)
        spent = [requests_of(store.tiers[0]) - old for store, old in zip(stores, before, strict=True)]
        print(f"a save of two ranks: {spent}, listed {listed}")
        assert set(listed) == {f"parts/{attempt}/"}, listed
        for run in runs:
            run.close()
