"""What doctor is told of a bucket's own rules."""

from __future__ import annotations

import pytest

pytest.importorskip("boto3")

from ckptstore.errors import BackendError, ObjectNotFoundError, PermissionDeniedError
from ckptstore_s3._rules import looks

PREFIX = "team/ckpts/"


def told(lifecycle=None, versioning=None, lock=None):
    answers = {
        "get_bucket_lifecycle_configuration": lifecycle,
        "get_bucket_versioning": versioning or {},
        "get_object_lock_configuration": lock,
    }

    def ask(operation, _verb):
        answer = answers[operation]
        if answer is None:
            raise ObjectNotFoundError("no such configuration")
        if isinstance(answer, Exception):
            raise answer
        return answer

    return {name: (status, found) for name, status, found, _ in looks(ask, PREFIX)}


def rule(**more):
    return {"Rules": [{"ID": "r", "Status": "Enabled", **more}]}


def test_a_bucket_without_rules_is_sound():
    assert {status for status, _ in told().values()} == {"ok"}
    assert set(told()) == {"lifecycle", "versioning", "object lock"}


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"Prefix": ""},
        {"Prefix": "team/"},
        {"Filter": {"Prefix": "team/ckpts/chunks/"}},
        {"Filter": {"And": {"Prefix": "team/", "ObjectSizeGreaterThan": 1}}},
    ],
)
def test_a_rule_that_deletes_our_objects_fails(where):
    status, found = told(rule(Expiration={"Days": 30}, **where))["lifecycle"]
    assert status == "fail"
    assert "after 30 days" in found


@pytest.mark.parametrize(
    "where",
    [
        {"Prefix": "logs/"},
        {"Filter": {"Tag": {"Key": "a", "Value": "b"}}},
        {"Filter": {"And": {"Prefix": "", "Tags": [{"Key": "a", "Value": "b"}]}}},
        {"Status": "Disabled"},
    ],
)
def test_a_rule_for_other_objects_is_no_concern(where):
    assert told(rule(Expiration={"Days": 30}, **where))["lifecycle"][0] == "ok"


def test_what_only_clears_up_uploads_and_old_versions_is_no_concern():
    lifecycle = rule(
        AbortIncompleteMultipartUpload={"DaysAfterInitiation": 7},
        NoncurrentVersionExpiration={"NoncurrentDays": 3},
        Expiration={"ExpiredObjectDeleteMarker": True},
    )
    found = told(lifecycle, {"Status": "Enabled"})
    assert found["lifecycle"][0] == "ok"
    assert found["versioning"] == ("ok", "on; old versions go after 3 days")


def test_moving_to_an_archive_is_a_warning_and_to_a_slower_class_is_none():
    assert told(rule(Transitions=[{"Days": 1, "StorageClass": "DEEP_ARCHIVE"}]))["lifecycle"][0] == "warn"
    assert told(rule(Transitions=[{"Days": 1, "StorageClass": "STANDARD_IA"}]))["lifecycle"][0] == "ok"


def test_versions_kept_for_ever_and_locks_are_warnings():
    lock = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 9}}}
    found = told(None, {"Status": "Enabled"}, {"ObjectLockConfiguration": lock})
    assert found["versioning"][0] == "warn"
    assert found["object lock"] == ("warn", "on: objects are locked for 9 days (COMPLIANCE)")


def test_rules_that_may_not_be_read_are_a_warning_and_unknown_requests_are_none():
    found = told(PermissionDeniedError("AccessDenied"), None, BackendError("NotImplemented"))
    assert found["lifecycle"] == ("warn", "AccessDenied")
    assert found["object lock"] == ("ok", "not known here: NotImplemented")


def test_a_server_that_does_not_answer_is_an_error():
    with pytest.raises(BackendError):
        told(BackendError("503", transient=True))
