"""What S3 says, in the store's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.errors import (
    BackendError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    ShortReadError,
)

_DENIED = {
    "AccessDenied",
    "AllAccessDisabled",
    "MethodNotAllowed",
    "AccountProblem",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "TokenRefreshRequired",
    "Forbidden",
    "403",
    "401",
}
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_THROTTLED = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "ServiceUnavailable",
    "TooManyRequests",
    "RequestLimitExceeded",
    "503",
}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"}
_ELSEWHERE = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "301",
}
_TRANSIENT = {
    "InternalError",
    "RequestTimeout",
    "OperationAborted",
    # What arrived was not what was sent.
    "IncompleteBody",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
    "InvalidPart",
    "NoSuchUpload",  # somebody aborted it: the whole put again makes a new one
}
_NO_KEY = {"NoSuchKey", "404", "NotFound"}


def code_of(error: Any) -> tuple[str, int]:
    """(error code, HTTP status) of a botocore ClientError."""
    response = error.response
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    return str(response.get("Error", {}).get("Code", "")), status


def code_behind(error: BackendError) -> tuple[str, int]:
    """(error code, HTTP status) of the answer behind one of our errors; ("", 0) if there was none."""
    cause = error.__cause__
    return code_of(cause) if getattr(cause, "response", None) else ("", 0)


def told(error: Any, what: str) -> BackendError:
    """The error to raise for a botocore ClientError.

    Args:
        what: the operation, key and place, for the message.
    """
    code, status = code_of(error)
    message = error.response.get("Error", {}).get("Message") or "no message"
    return _kind(code, status, f"{what}: {code or status} ({message})")


def told_of_key(item: Mapping[str, Any], what: str) -> BackendError | None:
    """The error for one key of a batch, from its entry in the answer; None where the key is gone."""
    code = str(item.get("Code", ""))
    if code in _NO_KEY:
        return None
    return _kind(code, 0, f"{what}: {code} ({item.get('Message') or 'no message'})")


def _kind(code: str, status: int, text: str) -> BackendError:
    if code == "NoSuchBucket":
        return BackendError(text, hint="make the bucket, or correct the URL")
    if code in _NO_KEY or (status == 404 and code != "NoSuchUpload"):
        return ObjectNotFoundError(text)
    if code == "InvalidRange" or status == 416:
        return ShortReadError(text)
    if code == "PreconditionFailed" or status == 412:
        return ObjectExistsError(text)
    if code == "ConditionalRequestConflict" or status == 409:
        return BackendError(text, transient=True)
    if code in EXPIRED:
        return PermissionDeniedError(text, hint="the credentials have expired: renew them")
    if code in _ELSEWHERE or status in (301, 307):
        return BackendError(text, hint="the bucket is in another region: set region= or AWS_REGION")
    if code == "RequestTimeTooSkewed":
        return PermissionDeniedError(text, hint="this machine's clock is wrong: have it set")
    if code in _DENIED or status in (401, 403):
        return PermissionDeniedError(
            text, hint="look at the credentials and the bucket's policy (docs/s3.md)"
        )
    if code in _FULL or status == 507:
        return OutOfSpaceError(text, hint="make room, or raise the quota")
    if code in _THROTTLED or status in (429, 503):
        return BackendError(text, transient=True, throttled=True)
    if code == "NotImplemented" or status == 501:
        return BackendError(
            text, hint="this server lacks the request: try multipart=false in [tiers.options]"
        )
    return BackendError(text, transient=code in _TRANSIENT or status >= 500 or status == 408)
