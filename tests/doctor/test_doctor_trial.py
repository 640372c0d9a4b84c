"""Doctor on places that are broken in one way each."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ckptstore import doctor
from ckptstore.backend import Backend
from ckptstore.environment import Environment
from ckptstore.errors import BackendError, ObjectExistsError, PermissionDeniedError
from ckptstore.testing.faults import Fault, FaultBackend
from ckptstore_memory import MemoryBackend

_numbers = itertools.count()

ALL = [
    *("list", "write", "read", "delete", "clock", "round trip"),
    *("create if absent", "commit mode", "listing"),
]


@pytest.fixture
def inner():
    backend = MemoryBackend(f"doctor-{next(_numbers)}")
    backend.create_root()
    yield backend
    backend.drop()


def examined(backend, **more):
    return list(doctor.examine_place(backend, Environment(), **more))


def by_name(findings):
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def broken(findings):
    return [(finding.name, finding.status) for finding in findings if finding.status != "ok"]


def denied(op, **more):
    return Fault("error", op=op, times=None, error=PermissionDeniedError(f"{op} is denied"), **more)


def keys_of(backend):
    return [info.key for info in backend.list("")]


def test_a_sound_place_passes_and_nothing_stays(inner):
    findings = examined(inner)
    assert [finding.name for finding in findings] == ALL
    assert broken(findings) == []
    assert by_name(findings)["commit mode"].found.startswith("exclusive")
    assert keys_of(inner) == []


def test_without_writing_nothing_is_written(inner):
    backend = FaultBackend(inner)
    assert [finding.name for finding in examined(backend, write=False)] == ["list"]
    assert {call.op for call in backend.log} == {"list"}


@pytest.mark.parametrize(
    ("op", "named", "missing"),
    [
        ("put", "write", {"read", "delete", "clock", "round trip", "create if absent", "listing"}),
        ("get", "read", {"clock", "round trip", "create if absent"}),
        ("list", "list", {"listing"}),
    ],
)
def test_each_permission_is_named_by_itself(inner, op, named, missing):
    findings = examined(FaultBackend(inner, [denied(op)]))
    assert broken(findings) == [(named, "fail")]
    assert f"{op} is denied" in by_name(findings)[named].found
    assert not missing & set(by_name(findings))
    assert keys_of(inner) == []


class Changed(Backend):
    """A backend that passes everything on, but for what a test replaces."""

    schemes = ()

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def from_url(cls, url, options=None):
        raise NotImplementedError

    url = property(lambda self: self.inner.url)
    capabilities = property(lambda self: self.inner.capabilities)

    def create_root(self):
        self.inner.create_root()

    def put(self, key, buffers, *, if_absent=False):
        self.inner.put(key, buffers, if_absent=if_absent)

    def read_into(self, key, offset, buffer):
        self.inner.read_into(key, offset, buffer)

    def get(self, key, *, max_bytes):
        return self.inner.get(key, max_bytes=max_bytes)

    def head(self, key):
        return self.inner.head(key)

    def list(self, prefix):
        return self.inner.list(prefix)

    def delete(self, keys):
        return self.inner.delete(keys)

    def sync(self):
        self.inner.sync()

    def close(self):
        self.inner.close()


def test_deleting_that_is_denied_is_told_and_what_stays_is_under_doctor(inner):
    class Keeping(Changed):
        def delete(self, keys):
            from ckptstore.backend import DeleteResult

            return [DeleteResult(key, PermissionDeniedError("delete is denied")) for key in keys]

    findings = examined(Keeping(inner))
    assert broken(findings) == [("delete", "fail")]
    assert "gc" in by_name(findings)["delete"].meaning
    assert all(key.startswith("doctor/") for key in keys_of(inner))


@pytest.mark.parametrize("op", ["read_into", "get"])
def test_wrong_bytes_of_the_right_length_fail(inner, op):
    flips = [Fault("flip", op=op, key="*.bytes", at=200_000)]
    assert broken(examined(FaultBackend(inner, flips))) == [("round trip", "fail")]


def test_an_object_that_ends_early_fails(inner):
    short = Fault("truncate", op="get", key="*.bytes", at=1000)
    assert broken(examined(FaultBackend(inner, [short]))) == [("round trip", "fail")]


def test_a_listing_that_lags_behind_writes_fails(inner):
    class Forgetful(Changed):
        def list(self, prefix):
            return (info for info in self.inner.list(prefix) if not info.key.endswith("list3"))

    findings = examined(Forgetful(inner))
    assert broken(findings) == [("listing", "fail")]
    assert "1 of 8 new objects" in by_name(findings)["listing"].found
    assert keys_of(inner) == []  # although its listing did not show all of them


def test_a_listing_that_lags_behind_deletes_fails(inner):
    class Remembering(Changed):
        seen: dict = {}  # noqa: RUF012 - of one test

        def list(self, prefix):
            self.seen |= {info.key: info for info in self.inner.list(prefix)}
            return iter(self.seen.values())

    findings = examined(Remembering(inner))
    assert broken(findings) == [("listing", "fail")]
    assert "4 of 4 deleted objects" in by_name(findings)["listing"].found


def test_a_clock_that_is_off_is_a_warning(inner):
    class Late(Changed):
        def head(self, key):
            info = self.inner.head(key)
            return dataclasses.replace(info, modified=info.modified - 100)

    findings = examined(Late(inner))
    assert broken(findings) == [("clock", "warn")]
    assert "99" in by_name(findings)["clock"].found


def test_conditions_that_are_ignored_fail(inner):
    class Overwriting(Changed):
        def put(self, key, buffers, *, if_absent=False):
            self.inner.put(key, buffers)

    findings = examined(Overwriting(inner))
    assert broken(findings) == [("create if absent", "fail")]
    assert "16 of 16" in by_name(findings)["create if absent"].found
    assert "create_if_absent = false" in by_name(findings)["create if absent"].meaning


def test_a_winner_whose_bytes_were_overwritten_fails(inner):
    class LastWins(Changed):
        def put(self, key, buffers, *, if_absent=False):
            try:
                self.inner.put(key, buffers, if_absent=if_absent)
            except ObjectExistsError:
                self.inner.put(key, [b"another's"])
                raise

    assert broken(examined(LastWins(inner))) == [("create if absent", "fail")]


def test_a_place_that_finds_out_that_it_cannot_create_exclusively_is_conservative(inner):
    class FindsOut(Changed):
        exclusive = True
        capabilities = property(
            lambda self: dataclasses.replace(self.inner.capabilities, create_if_absent=self.exclusive)
        )

        def put(self, key, buffers, *, if_absent=False):
            if if_absent:
                self.exclusive = False
                raise BackendError("this server does not keep If-None-Match")
            self.inner.put(key, buffers)

    findings = examined(FindsOut(inner))
    assert broken(findings) == [("create if absent", "warn"), ("commit mode", "warn")]
    mode = by_name(findings)["commit mode"]
    assert mode.found.startswith("conservative")
    assert "one training at a time" in mode.meaning


def test_a_lost_reply_to_the_winner_is_tried_again(inner):
    class Losing(Changed):
        """As a retried put whose first reply was lost: the second try meets its own object."""

        def put(self, key, buffers, *, if_absent=False):
            self.inner.put(key, buffers, if_absent=if_absent)
            if key.endswith(".race"):
                raise ObjectExistsError("something is there")

    assert broken(examined(Losing(inner))) == []


def test_an_error_in_between_is_a_finding_and_what_was_written_is_cleaned(inner):
    findings = examined(FaultBackend(inner, [Fault("error", op="head", key="*.clock")]))
    assert [name for name, _ in broken(findings)] == ["probe"]
    assert keys_of(inner) == []


def test_what_the_backend_knows_of_its_place_is_told(inner):
    class Telling(Changed):
        def examine(self):
            yield ("lifecycle", "fail", "rule 'x' deletes objects after 30 days", "take it out")

    findings = examined(Telling(inner), write=False)
    assert broken(findings) == [("lifecycle", "fail")]
    assert by_name(findings)["lifecycle"].meaning == "take it out"
