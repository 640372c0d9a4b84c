"""The S3 backend: objects under a prefix of a bucket."""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from ckptstore.backend import (
    Backend,
    Capabilities,
    DeleteResult,
    DeleteResults,
    ObjectInfo,
    ReadableBuffer,
    check_key,
    check_prefix,
    is_key,
)
from ckptstore.errors import (
    BackendError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    PermissionDeniedError,
    ShortReadError,
)
from ckptstore_s3._body import Body, as_bytes, parts
from ckptstore_s3._client import Clients
from ckptstore_s3._failures import EXPIRED, code_of, told
from ckptstore_s3._options import Options, Place

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH = 1000
"""Keys in one request to delete, and parts in one upload: some servers list no more of them."""
_CHECKED_BYTES = 64 << 10
"""Smaller objects are documents, which carry their own digest; larger ones are asked for their size."""
_BUCKET_SECONDS = 60.0
_PROBE = "doctor/create-if-absent"
_UPLOAD_MARK = "/upload-"


class S3Backend(Backend):
    """Keeps objects in a bucket; see docs/s3.md for options.

    A put sends the SHA-256 of what it sends, in the signature, which every server checks. Requests are
    counted by kind in :attr:`requests`. Nothing is made durable by `sync`: S3 answers a put when it is.

    Example:
        >>> backend = S3Backend.from_url("s3://bucket/ckpts", {"region": "eu-central-1"})

    Attributes:
        requests: how many of each kind this process has sent.
    """

    schemes: ClassVar[tuple[str, ...]] = ("s3",)

    def __init__(self, place: Place, options: Options) -> None:
        self._place = place
        self._options = options
        self._clients = Clients(place, options)
        self._exclusive: bool | None = (
            None if options.create_if_absent == "auto" else options.create_if_absent
        )
        self._probing = (os.getpid(), threading.Lock())
        self._bucket_seen = -_BUCKET_SECONDS
        self.requests: collections.Counter[str] = collections.Counter()

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> S3Backend:
        """Makes a backend for ``s3://bucket/prefix``; asks nothing.

        Raises:
            UsageError: the URL or an option is not as it should be.
        """
        return cls(Place.parse(url), Options.of(options))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._place, self._options))  # neither holds credentials

    def __repr__(self) -> str:
        return f"S3Backend({self.url!r})"

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``."""
        return self._place.url

    @property
    def capabilities(self) -> Capabilities:
        """As proven at the first conditional put of this process."""
        return Capabilities(
            create_if_absent=self._exclusive is not False,
            ordered_list=True,
            ranged_read=True,
            part_bytes=self._options.part_bytes,
            concurrency=self._options.concurrency,
            cheap_head=False,
        )

    def create_root(self) -> None:
        """Checks that the bucket is there and may be used; makes it with the option ``create_bucket``.

        Raises:
            BackendError: it is not there.
        """
        with contextlib.suppress(ObjectNotFoundError):
            self._call("head_bucket", "look for", "")
            return
        if not self._options.create_bucket:
            raise BackendError(
                f"there is no bucket {self._place.bucket!r}",
                hint="make it first: ckptstore makes none unasked",
            )
        self._call("create_bucket", "make", "")

    # --- writing --------------------------------------------------------------------------------

    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Stores an object in one request, or a large one in parts; see the contract."""
        check_key(key)
        if if_absent:
            self._require_exclusive(key)
        views = as_bytes(buffers)
        size = sum(map(len, views))
        if size > 2 * self._options.part_bytes and self._options.multipart:
            self._put_parts(key, views, size, if_absent=if_absent)
        else:
            self._put_whole(key, views, size, if_absent=if_absent)

    def _put_whole(self, key: str, views: list[memoryview], size: int, *, if_absent: bool) -> None:
        body: object = b"".join(views) if size < _CHECKED_BYTES else Body(views)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        answer = self._call(
            "put_object", "put", key, Body=body, ContentLength=size, **self._storing(views), **condition
        )
        if size >= _CHECKED_BYTES and "ChecksumSHA256" not in answer:
            self._check_size(key, size)

    def _storing(self, views: Sequence[memoryview]) -> dict[str, Any]:
        """Parameters of every object: where to keep it, and on Amazon's servers its checksum."""
        options = self._options
        given = {
            "StorageClass": options.storage_class,
            "ServerSideEncryption": options.sse,
            "SSEKMSKeyId": options.sse_kms_key_id,
        }
        made: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self._sends_checksums and views:
            made["ChecksumSHA256"] = _sha256(views)
        return made

    @functools.cached_property
    def _sends_checksums(self) -> bool:
        return bool(self._clients.client.meta.config.request_checksum_calculation == "when_supported")

    def _check_size(self, key: str, size: int) -> None:
        """That a server which says nothing of what it stored has stored all of it."""
        found = self.head(key).size_bytes
        if found != size:
            self._call("delete_object", "delete", key)
            raise BackendError(
                f"put {key!r} at {self.url}: {size} bytes were sent and {found} stored", transient=True
            )

    def _put_parts(self, key: str, views: list[memoryview], size: int, *, if_absent: bool) -> None:
        options = self._options
        part_bytes = max(options.part_bytes, -(-size // _BATCH))
        storing = self._storing([])
        upload = self._call("create_multipart_upload", "begin to put", key, **storing)["UploadId"]
        try:
            sent = []
            for number, part in enumerate(parts(views, part_bytes), 1):
                answer = self._call(
                    "upload_part",
                    f"put part {number} of",
                    key,
                    UploadId=upload,
                    PartNumber=number,
                    Body=Body(part),
                    ContentLength=sum(map(len, part)),
                )
                sent.append({"PartNumber": number, "ETag": answer["ETag"]})
        except BaseException:
            self._abort(key, upload)
            raise
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            self._call(
                "complete_multipart_upload",
                "finish putting",
                key,
                UploadId=upload,
                MultipartUpload={"Parts": sent},
                **condition,
            )
        except ObjectExistsError:
            self._abort(key, upload)
            raise
        except BackendError as error:
            # Perhaps only the reply was lost; a plain put of the whole again would do no harm either.
            if not self._is_whole(key, size, if_absent=if_absent):
                self._abort(key, upload)
                raise
            logger.info("the reply was lost, the object is whole: %s", error)
        self._check_size(key, size)

    def _is_whole(self, key: str, size: int, *, if_absent: bool) -> bool:
        if if_absent:
            return False  # it may be another's: the caller reads it back
        try:
            return self.head(key).size_bytes == size
        except BackendError:
            return False

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", "abort putting", key, UploadId=upload)
        except BackendError as error:
            logger.warning("an unfinished upload stays, for gc: %s", error)

    def _require_exclusive(self, key: str) -> None:
        """Once per process: that the server really refuses what is there already.

        Raises:
            BackendError: it does not; `capabilities` says so from now on.
        """
        if self._exclusive is None:
            if self._probing[0] != os.getpid():
                self._probing = (os.getpid(), threading.Lock())
            with self._probing[1]:
                if self._exclusive is None:
                    self._exclusive = self._refuses_what_is_there()
        if not self._exclusive:
            raise BackendError(
                f"put {key!r} at {self.url}: this server does not keep If-None-Match",
                hint="one writer at a time only; or use a server with conditional writes (docs/providers.md)",
            )

    def _refuses_what_is_there(self) -> bool:
        name = f"{_PROBE}.{os.urandom(8).hex()}"
        # The first makes sure that something is there, whatever the server thinks of conditions.
        self._call("put_object", "put", name, Body=b"probe", ContentLength=5)
        try:
            self._call("put_object", "put", name, Body=b"again", ContentLength=5, IfNoneMatch="*")
        except ObjectExistsError:
            return True
        except BackendError as error:
            if error.transient or isinstance(error, PermissionDeniedError):
                raise
            logger.warning("%s: conditional writes are refused: %s", self.url, error)
            return False
        finally:
            self._call("delete_object", "delete", name)
        return False

    # --- reading --------------------------------------------------------------------------------

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Reads a range; see the contract."""
        check_key(key)
        view = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        if not len(view):
            if self.head(key).size_bytes < offset:
                raise ShortReadError(f"read {key!r} at {self.url}: it ends before byte {offset}")
            return
        end = offset + len(view) - 1
        answer = self._call("get_object", "read", key, Range=f"bytes={offset}-{end}")
        with contextlib.closing(answer["Body"]) as body:
            told_range = str(answer.get("ContentRange", "")).partition("/")[0]
            if told_range != f"bytes {offset}-{end}":
                what = f"read {key!r} at {self.url}: asked for bytes {offset}-{end}, got {told_range!r}"
                if told_range.startswith(f"bytes {offset}-"):
                    raise ShortReadError(what)
                raise BackendError(what, hint="the server, or something before it, does not serve ranges")
            self._fill(body, view, key)

    def _fill(self, body: Any, view: memoryview, key: str) -> None:
        done = 0
        try:
            while done < len(view):
                count = body.readinto(view[done:])
                if not count:
                    break
                done += count
        except self._broken as error:
            raise self._cut(key, error) from error
        if done < len(view):  # the object is longer: the connection ended, not it
            raise self._cut(key, f"{done} of {len(view)} bytes came")

    def _cut(self, key: str, why: object) -> BackendError:
        return BackendError(f"read {key!r} at {self.url}: the reply was cut off: {why}", transient=True)

    @functools.cached_property
    def _broken(self) -> tuple[type[Exception], ...]:
        """What reading a reply may raise when the connection breaks."""
        import botocore.exceptions
        import urllib3.exceptions

        return (OSError, botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Reads an object whole; see the contract."""
        check_key(key)
        answer = self._call("get_object", "get", key)
        with contextlib.closing(answer["Body"]) as body:
            size = int(answer["ContentLength"])
            if size > max_bytes:
                raise ObjectTooLargeError(
                    f"get {key!r} at {self.url}: it has {size} bytes, more than {max_bytes}"
                )
            data = bytearray(size)
            self._fill(body, memoryview(data), key)
        return bytes(data)

    def head(self, key: str) -> ObjectInfo:
        """Size and time; see the contract."""
        check_key(key)
        try:
            answer = self._call("head_object", "head", key)
        except ObjectNotFoundError:
            self._require_bucket()  # the reply to a HEAD has no body that would tell the two apart
            raise
        return ObjectInfo(key, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    def _require_bucket(self) -> None:
        now = time.monotonic()
        if now - self._bucket_seen < _BUCKET_SECONDS:
            return
        try:
            self._call("head_bucket", "look for", "")
        except ObjectNotFoundError as error:
            raise BackendError(
                f"there is no bucket {self._place.bucket!r}", hint="correct the URL"
            ) from error
        except PermissionDeniedError as error:  # looking at single objects may be all that is allowed
            logger.debug("%s", error)
        self._bucket_seen = now

    # --- listing and deleting -------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Pages of 1,000 keys, as the server orders them; see the contract."""
        check_prefix(prefix)
        token: dict[str, str] = {}
        while True:
            page = self._call(
                "list_objects_v2", "list", "", Prefix=self._place.prefix + prefix, MaxKeys=_BATCH, **token
            )
            for item in page.get("Contents", ()):
                key = str(item["Key"]).removeprefix(self._place.prefix)
                if is_key(key):
                    yield ObjectInfo(key, int(item["Size"]), item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            following = page.get("NextContinuationToken")
            if not following or token.get("ContinuationToken") == following:
                raise BackendError(f"list {prefix!r} at {self.url}: the server says there is more, not where")
            token = {"ContinuationToken": following}

    def list_temporaries(self, prefix: str) -> Iterator[ObjectInfo]:
        """Uploads that were begun and neither finished nor aborted; `delete` aborts them by their keys."""
        check_prefix(prefix)
        marker: dict[str, str] = {}
        while True:
            page = self._call(
                "list_multipart_uploads", "list uploads", "", Prefix=self._place.prefix + prefix, **marker
            )
            for item in page.get("Uploads", ()):
                key = str(item["Key"]).removeprefix(self._place.prefix)
                if is_key(key):
                    named = f"{key}{_UPLOAD_MARK}{item['UploadId']}"
                    yield ObjectInfo(named, 0, item["Initiated"].timestamp())
            if not page.get("IsTruncated"):
                return
            marker = {
                "KeyMarker": page.get("NextKeyMarker", ""),
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """Deletes in batches; one result per key; see the contract."""
        results: dict[int, DeleteResult] = {}
        wanted: list[int] = []
        for number, key in enumerate(keys):
            base, mark, upload = key.partition(_UPLOAD_MARK)
            try:
                check_key(base if mark else key)
                if mark:
                    self._abort_upload(base, upload)
                    results[number] = DeleteResult(key)
                else:
                    wanted.append(number)
            except BackendError as error:
                results[number] = DeleteResult(key, error)
        for start in range(0, len(wanted), _BATCH):
            batch = wanted[start : start + _BATCH]
            found = self._delete_batch([keys[number] for number in batch])
            results.update(zip(batch, found, strict=True))
        return [results[number] for number in range(len(keys))]

    def _abort_upload(self, key: str, upload: str) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            try:
                self._call("abort_multipart_upload", "abort putting", key, UploadId=upload)
            except BackendError as error:
                if "NoSuchUpload" not in _codes(error):
                    raise

    def _delete_batch(self, keys: Sequence[str]) -> DeleteResults:
        if len(keys) == 1:
            return [self._delete_one(keys[0])]
        objects = [{"Key": self._place.prefix + key} for key in keys]
        try:
            answer = self._call("delete_objects", "delete", "", Delete={"Objects": objects, "Quiet": True})
        except BackendError as error:
            # Older servers want a Content-MD5 that the SDK sends no more, or have no batches at all.
            if error.transient or isinstance(error, PermissionDeniedError):
                return [DeleteResult(key, error) for key in keys]
            logger.debug("deleting one by one: %s", error)
            return [self._delete_one(key) for key in keys]
        failed = {
            str(item["Key"]).removeprefix(self._place.prefix): item for item in answer.get("Errors", ())
        }
        return [DeleteResult(key, self._delete_error(key, failed.get(key))) for key in keys]

    def _delete_error(self, key: str, item: Mapping[str, Any] | None) -> BackendError | None:
        if item is None or item.get("Code") in ("NoSuchKey", "404"):
            return None
        code = str(item.get("Code", ""))
        text = f"delete {key!r} at {self.url}: {code} ({item.get('Message', '')})"
        if code in ("AccessDenied", "MethodNotAllowed"):
            return PermissionDeniedError(text, hint="deleting wants s3:DeleteObject (docs/s3.md)")
        slow = code in ("SlowDown", "ServiceUnavailable")
        return BackendError(text, transient=code == "InternalError", throttled=slow)

    def _delete_one(self, key: str) -> DeleteResult:
        try:
            self._call("delete_object", "delete", key)
        except ObjectNotFoundError:
            return DeleteResult(key)
        except BackendError as error:
            return DeleteResult(key, error)
        return DeleteResult(key)

    def sync(self) -> None:
        """Nothing to do: an answered request is durable."""

    def close(self) -> None:
        """Closes this process's connections; a later call opens them again."""
        self._clients.close()

    # --- asking ---------------------------------------------------------------------------------

    def _call(self, operation: str, verb: str, key: str, **parameters: Any) -> Any:
        """One request; errors in the store's words. Expired credentials are read anew, once."""
        what = f"{verb} {key!r} at {self.url}" if key else f"{verb} {self.url}"
        if key:
            parameters["Key"] = self._place.prefix + key
        if operation == "create_bucket":
            region = self._clients.client.meta.region_name
            if region not in (None, "us-east-1"):
                parameters["CreateBucketConfiguration"] = {"LocationConstraint": region}

        def send() -> Any:
            self.requests[operation] += 1
            body = parameters.get("Body")
            if isinstance(body, Body):
                body.seek(0)
            return getattr(self._clients.client, operation)(Bucket=self._place.bucket, **parameters)

        try:
            return self._translated(send, what)
        except PermissionDeniedError as error:
            if not EXPIRED & _codes(error):
                raise
            logger.info("%s: credentials are read anew", self.url)
            self._clients.renew()
            return self._translated(send, what)

    def _translated(self, send: Callable[[], T], what: str) -> T:
        import botocore.exceptions as failures

        try:
            return send()
        except failures.ClientError as error:
            raise told(error, what) from error
        except (failures.NoCredentialsError, failures.CredentialRetrievalError) as error:
            raise PermissionDeniedError(
                f"{what}: {error}", hint="set AWS_PROFILE or the environment (docs/s3.md)"
            ) from error
        except (failures.TokenRetrievalError, failures.UnauthorizedSSOTokenError) as error:
            raise PermissionDeniedError(f"{what}: {error}", hint="log in again") from error
        except (failures.HTTPClientError, failures.ConnectionError, OSError) as error:
            raise BackendError(
                f"{what}: no answer: {error}", transient=True, hint="is the endpoint right, and up?"
            ) from error
        except failures.BotoCoreError as error:
            raise BackendError(f"{what}: {error}") from error


def _codes(error: BackendError) -> set[str]:
    """The code behind one of our errors."""
    cause = error.__cause__
    return {code_of(cause)[0]} if hasattr(cause, "response") else set()


def _sha256(views: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return base64.b64encode(digest.digest()).decode()
