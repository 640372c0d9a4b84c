from __future__ import annotations

import itertools
import logging
import pickle

import pytest

from ckptstore.backend import DeleteResult
from ckptstore.errors import BackendError, ObjectExistsError, ObjectNotFoundError, OutOfSpaceError
from ckptstore.testing import BackendContract, Fault, FaultBackend
from ckptstore.tier.retry import RetryingBackend
from ckptstore_memory import MemoryBackend

_names = itertools.count()


class TestRetryingContract(BackendContract):
    def open_backend(self, url):
        return RetryingBackend.from_url(url)

    @pytest.fixture
    def url(self):
        url = f"memory://retry-{next(_names)}"
        yield url
        MemoryBackend.from_url(url).drop()


@pytest.fixture
def sleeps():
    return []


@pytest.fixture
def retrying(faulty, sleeps):
    return RetryingBackend(faulty, attempts=4, base_seconds=1.0, sleep=sleeps.append, random=lambda: 0.5)


def ops(faulty):
    return [call.op for call in faulty.log]


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_transient_error_is_retried_with_doubling_waits(memory, faulty, retrying, sleeps, failures):
    faulty.script.append(Fault("error", op="put", times=failures))
    retrying.put("a", [b"1"])
    assert memory.get("a", max_bytes=1) == b"1"
    assert sleeps == [1.0, 2.0, 4.0][:failures]


def test_the_last_attempt_raises_its_own_error(faulty, retrying, sleeps):
    faulty.script += [
        Fault("error", op="get", error=BackendError(f"number {n}", transient=True)) for n in range(9)
    ]
    with pytest.raises(BackendError, match="number 3"):
        retrying.get("a", max_bytes=1)
    assert len(sleeps) == 3


def test_waits_are_bounded_and_jittered(faulty):
    sleeps: list[float] = []
    retrying = RetryingBackend(
        faulty, attempts=12, base_seconds=1.0, sleep=sleeps.append, random=lambda: 0.999
    )
    faulty.script.append(Fault("error", op="sync", times=None))
    faulty.script.append(Fault("error", op="head", times=None))
    with pytest.raises(BackendError):
        retrying.head("a")
    assert max(sleeps) < 15.0
    assert sleeps[0] == pytest.approx(1.499)


@pytest.mark.parametrize(
    "error", [BackendError("final"), OutOfSpaceError("full"), ObjectNotFoundError("none")]
)
def test_other_errors_pass_at_once(faulty, retrying, sleeps, error):
    faulty.script.append(Fault("error", error=error))
    with pytest.raises(type(error)):
        retrying.put("a", [b"1"])
    assert (sleeps, ops(faulty)) == ([], ["put"])


def test_a_created_object_whose_reply_was_lost_exists_for_the_retry(memory, faulty, retrying):
    faulty.script.append(Fault("error_after", op="put"))
    with pytest.raises(ObjectExistsError):
        retrying.put("commits/r/a.mp", [b"ours"], if_absent=True)
    assert memory.get("commits/r/a.mp", max_bytes=4) == b"ours"


def test_sync_is_never_retried(faulty, retrying, sleeps):
    faulty.script.append(Fault("error", op="sync"))
    with pytest.raises(BackendError):
        retrying.sync()
    assert (sleeps, ops(faulty)) == ([], ["sync"])


def test_objects_put_together_are_repeated_together(memory, faulty, retrying, sleeps):
    faulty.script.append(Fault("error", op="put", key="b"))
    retrying.put_many([("a", [b"1"]), ("b", [b"2"])])
    assert [(call.op, call.key) for call in faulty.log] == [("put", "a"), ("put", "b")] * 2
    assert (memory.get("a", max_bytes=1), memory.get("b", max_bytes=1)) == (b"1", b"2")
    retrying.put_many([])
    assert len(sleeps) == 1


def test_read_into_is_repeated_whole(memory, faulty, retrying):
    memory.put("a", [b"0123456789"])
    faulty.script.append(Fault("error_after", op="read_into"))
    buffer = bytearray(4)
    retrying.read_into("a", 3, memoryview(buffer))
    assert buffer == b"3456"


class _PartialDelete(FaultBackend):
    """Of each batch, the first call fails for two keys: one for now, one for good."""

    def delete(self, keys):
        results = super().delete(keys)
        errors = {"a/1": BackendError("busy", transient=True), "a/2": BackendError("no")}
        if len(self.log) == 1:
            return [DeleteResult(result.key, errors.get(result.key)) for result in results]
        return results


def test_delete_repeats_only_the_keys_that_may_go(memory, sleeps):
    faulty = _PartialDelete(memory)
    retrying = RetryingBackend(faulty, sleep=sleeps.append)
    results = retrying.delete(["a/0", "a/1", "a/2", "a/3"])
    assert [(result.key, str(result.error)) for result in results] == [
        ("a/0", "None"),
        ("a/1", "None"),
        ("a/2", "no"),
        ("a/3", "None"),
    ]
    assert [call.key for call in faulty.log] == ["a/0", "a/1"]
    assert len(sleeps) == 1


def test_delete_gives_up_with_the_error_in_the_result(memory):
    class Never(MemoryBackend):
        def delete(self, keys):
            return [DeleteResult(key, BackendError("busy", transient=True)) for key in keys]

    sleeps: list[float] = []
    results = RetryingBackend(Never("x"), attempts=3, sleep=sleeps.append).delete(["a", "b"])
    assert [result.error is not None for result in results] == [True, True]
    assert len(sleeps) == 2


class _BrokenList(MemoryBackend):
    """Lists three objects and breaks, the first time."""

    broken = False
    ordered = True

    @property
    def capabilities(self):
        import dataclasses

        return dataclasses.replace(super().capabilities, ordered_list=self.ordered)

    def list(self, prefix):
        for n, info in enumerate(super().list(prefix)):
            if n == 3 and not self.broken:
                self.broken = True
                raise BackendError("connection lost", transient=True)
            yield info


def test_an_ordered_list_goes_on_behind_the_last_key(memory, sleeps):
    for n in range(6):
        memory.put(f"a/{n}", [b""])
    listing = RetryingBackend(_BrokenList(memory._name), sleep=sleeps.append).list("a/")
    assert [info.key for info in listing] == [f"a/{n}" for n in range(6)]
    assert len(sleeps) == 1


def test_an_unordered_list_goes_on_with_what_it_has_not_given_out(memory, sleeps):
    class Shuffled(_BrokenList):
        ordered = False

        def list(self, prefix):
            infos = super().list(prefix)
            return reversed(list(infos)) if self.broken else infos

    for n in range(6):
        memory.put(f"a/{n}", [b""])
    listing = RetryingBackend(Shuffled(memory._name), sleep=sleeps.append).list("a/")
    assert [info.key for info in listing] == ["a/0", "a/1", "a/2", "a/5", "a/4", "a/3"]
    assert len(sleeps) == 1


def test_an_unordered_list_too_long_to_remember_raises_rather_than_repeat(memory, sleeps, monkeypatch):
    monkeypatch.setattr("ckptstore.tier.retry.REMEMBERED_KEYS", 2)
    for n in range(6):
        memory.put(f"a/{n}", [b""])
    broken = _BrokenList(memory._name)
    broken.ordered = False
    listing = RetryingBackend(broken, sleep=sleeps.append).list("a/")
    assert [next(listing).key for _ in range(3)] == ["a/0", "a/1", "a/2"]
    with pytest.raises(BackendError, match="connection lost"):
        next(listing)
    assert sleeps == []


@pytest.mark.parametrize("op", ["list", "list_temporaries"])
def test_a_list_that_has_not_begun_is_repeated(memory, faulty, retrying, sleeps, op):
    memory.put("a/b", [b""])
    faulty.script.append(Fault("error", op=op))
    assert len(list(getattr(retrying, op)(""))) == (op == "list")
    assert len(sleeps) == 1


def test_one_warning_for_one_operation(faulty, retrying, caplog):
    faulty.script.append(Fault("error", op="put", times=3))
    with caplog.at_level(logging.DEBUG, "ckptstore.tier.retry"):
        retrying.put("chunks/aa/x", [b"1"])
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "DEBUG"]
    assert "chunks/aa/x" in caplog.records[0].getMessage()


def test_the_root_and_prefixes_are_retried(faulty, retrying, sleeps):
    faulty.script += [Fault("error", op="create_root"), Fault("error", op="make_prefixes")]
    retrying.create_root()
    retrying.make_prefixes(iter(["a", "b"]))
    assert ops(faulty) == ["create_root", "create_root", "make_prefixes", "make_prefixes"]


def test_it_pickles_with_its_settings(memory):
    copy = pickle.loads(pickle.dumps(RetryingBackend(memory, attempts=7, base_seconds=0.5)))
    assert (copy._attempts, copy._base_seconds, copy.url) == (7, 0.5, memory.url)


def test_no_attempts_are_refused(memory):
    with pytest.raises(ValueError, match="attempts"):
        RetryingBackend(memory, attempts=0)
