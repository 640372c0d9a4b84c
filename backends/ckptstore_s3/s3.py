"""The S3 backend: objects under a prefix of a bucket."""

from __future__ import annotations

import collections
import contextlib
import functools
import http.client
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ckptstore.backend import (
    Backend,
    Capabilities,
    DeleteResult,
    DeleteResults,
    Look,
    ObjectInfo,
    ReadableBuffer,
    check_key,
    check_prefix,
    is_key,
)
from ckptstore.errors import (
    BackendError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    PermissionDeniedError,
    ShortReadError,
)
from ckptstore_s3 import _rules
from ckptstore_s3._body import as_bytes, straight
from ckptstore_s3._client import Requests
from ckptstore_s3._failures import told_of_key
from ckptstore_s3._options import Options, Place
from ckptstore_s3._put import MAX_PARTS, Putter, abort

logger = logging.getLogger(__name__)

_BATCH = 1000
"""Keys in one page of a listing and in one request to delete: the most that S3 takes."""
_BUCKET_SECONDS = 60.0
_READ_BYTES = 1 << 20
_UPLOAD_KEY = re.compile(r"((?:[^/]+/)*)\.([^/]+)\.upload-(.+)", re.ASCII)


class S3Backend(Backend):
    """Keeps objects in a bucket; see docs/s3.md for options.

    Nothing is made durable by `sync`: S3 answers a put when it is.

    Example:
        >>> backend = S3Backend.from_url("s3://bucket/ckpts", {"region": "eu-central-1"})
    """

    schemes: ClassVar[tuple[str, ...]] = ("s3",)

    def __init__(self, place: Place, options: Options) -> None:
        self._place = place
        self._options = options
        self._requests = Requests(place, options)
        self._putter = Putter(self._requests)
        self._bucket_seen = -_BUCKET_SECONDS

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
    def requests(self) -> collections.Counter[str]:
        """How many requests this process has sent, by botocore's names of them."""
        return self._requests.counts

    @property
    def capabilities(self) -> Capabilities:
        """As proven at the first conditional put of this process."""
        return Capabilities(
            create_if_absent=self._putter.exclusive is not False,
            ordered_list=self._is_ordered(),
            ranged_read=True,
            part_bytes=self._options.part_bytes,
            concurrency=self._options.concurrency,
            cheap_head=False,
        )

    def _is_ordered(self) -> bool:
        wanted = self._options.ordered_list
        if wanted != "auto":
            return wanted
        # Amazon promises the order of UTF-8, but not for its directory buckets; SeaweedFS lists by directory.
        return self._requests.is_aws and not self._place.bucket.endswith("--x-s3")

    def create_root(self) -> None:
        """Checks that the bucket is there and may be used; a prefix needs no making.

        Raises:
            BackendError: it is not there. A bucket is never made: its region, versions, rules and rights are
                its owner's to decide.
        """
        try:
            self._requests.send("head_bucket", "look for", "")
        except ObjectNotFoundError as error:
            raise self._no_bucket() from error

    # --- writing --------------------------------------------------------------------------------

    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Stores an object in one request, or a large one in parts; see the contract."""
        check_key(key)
        try:
            views = as_bytes(buffers)
        except (TypeError, BufferError) as error:
            raise BackendError(f"put {key!r}: a buffer cannot be used: {error}") from error
        self._putter.put(key, views, if_absent=if_absent, max_parts=min(_BATCH, MAX_PARTS))
        self._bucket_seen = time.monotonic()

    def sync(self) -> None:
        """Nothing to do: an answered request is durable."""

    def examine(self) -> Iterator[Look]:
        """Lifecycle rules, versioning and object lock of the bucket, as far as they may be read."""
        return _rules.looks(
            lambda operation, verb: self._requests.send(operation, verb, ""), self._place.prefix
        )

    def close(self) -> None:
        """Closes this process's connections; a later call opens them again."""
        self._requests.close()

    # --- reading --------------------------------------------------------------------------------

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Reads a range; see the contract.

        An object that ends early is told by the range that the answer names (ShortReadError); a connection
        that ends before what the answer promised is transient.
        """
        self.read_parts(key, offset, [buffer])

    def read_parts(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Reads a range into several buffers, in one request and without a copy; see the contract."""
        check_key(key)
        if offset < 0 or any(buffer.readonly or not buffer.c_contiguous for buffer in buffers):
            raise BackendError(f"read {key!r}: needs an offset >= 0 and writable, contiguous buffers")
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if not nbytes:
            if self.head(key).size_bytes < offset:
                raise ShortReadError(f"read {key!r} at {self.url}: it ends before byte {offset}")
            return
        wanted = f"bytes {offset}-{offset + nbytes - 1}"
        answer = self._requests.send("get_object", "read", key, Range=wanted.replace(" ", "="))
        with contextlib.closing(answer["Body"]) as body:
            served = str(answer.get("ContentRange", "")).partition("/")[0]
            if served != wanted:
                what = f"read {key!r} at {self.url}: asked for {wanted}, got {served or 'no range'!r}"
                if served.startswith(f"bytes {offset}-"):
                    raise ShortReadError(what)
                raise BackendError(what, hint="the server, or something before it, does not serve ranges")
            self._fill(body, [buffer.cast("B") for buffer in buffers if buffer.nbytes], key)

    def _fill(self, body: Any, views: Sequence[memoryview], key: str) -> None:
        came = 0
        try:
            with straight(body) as source:
                for view in views:
                    count = _receive(source, view)
                    came += count
                    if count < len(view):
                        break
        except self._broken as error:
            raise self._cut(key, error) from error
        wanted = sum(map(len, views))
        if came < wanted:  # the object is longer: the connection ended, not it
            raise self._cut(key, f"{came} of {wanted} bytes came")

    def _cut(self, key: str, why: object) -> BackendError:
        return BackendError(f"read {key!r} at {self.url}: the reply was cut off: {why}", transient=True)

    @functools.cached_property
    def _broken(self) -> tuple[type[Exception], ...]:
        """What reading a reply may raise when the connection breaks."""
        import botocore.exceptions
        import urllib3.exceptions

        return (
            OSError,
            http.client.HTTPException,
            botocore.exceptions.BotoCoreError,
            urllib3.exceptions.HTTPError,
        )

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Reads an object whole; see the contract."""
        check_key(key)
        answer = self._requests.send("get_object", "get", key)
        with contextlib.closing(answer["Body"]) as body:
            size = int(answer["ContentLength"])
            if size > max_bytes:
                raise ObjectTooLargeError(
                    f"get {key!r} at {self.url}: it has {size} bytes, more than {max_bytes}"
                )
            data = bytearray(size)
            self._fill(body, [memoryview(data)], key)
        return bytes(data)

    def head(self, key: str) -> ObjectInfo:
        """Size and time; see the contract."""
        check_key(key)
        try:
            answer = self._requests.send("head_object", "head", key)
        except ObjectNotFoundError:
            self._require_bucket()  # the reply to a HEAD has no body that would tell the two apart
            raise
        return ObjectInfo(key, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    def _require_bucket(self) -> None:
        now = time.monotonic()
        if now - self._bucket_seen < _BUCKET_SECONDS:
            return
        try:
            self._requests.send("head_bucket", "look for", "")
        except ObjectNotFoundError as error:
            raise self._no_bucket() from error
        except PermissionDeniedError as error:  # looking at single objects may be all that is allowed
            logger.debug("%s", error)
        self._bucket_seen = now

    def _no_bucket(self) -> BackendError:
        return BackendError(
            f"there is no bucket {self._place.bucket!r}",
            hint="correct the URL, or have the bucket made: ckptstore makes none",
        )

    # --- listing --------------------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Pages of 1,000 keys, as the server orders them; see the contract."""
        check_prefix(prefix)
        token: dict[str, str] = {}
        while True:
            page = self._requests.send(
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
        """Uploads that were begun and neither finished nor aborted; `delete` aborts them by their keys.

        Their size is not told, and is given as 0.
        """
        check_prefix(prefix)
        marker: dict[str, str] = {}
        while True:
            page = self._requests.send(
                "list_multipart_uploads", "list uploads", "", Prefix=self._place.prefix + prefix, **marker
            )
            for item in page.get("Uploads", ()):
                key = str(item["Key"]).removeprefix(self._place.prefix)
                if is_key(key):
                    folder, slash, name = key.rpartition("/")
                    named = f"{folder}{slash}.{name}.upload-{item['UploadId']}"
                    yield ObjectInfo(named, 0, item["Initiated"].timestamp())
            following = {
                "KeyMarker": page.get("NextKeyMarker") or "",
                "UploadIdMarker": page.get("NextUploadIdMarker") or "",
            }
            if not page.get("IsTruncated") or following == marker:
                return
            marker = following

    # --- deleting -------------------------------------------------------------------------------

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """Deletes in batches; one result per key; see the contract."""
        results: dict[int, DeleteResult] = {}
        wanted: list[int] = []
        for number, key in enumerate(keys):
            upload = _UPLOAD_KEY.fullmatch(key)
            try:
                if upload:
                    check_key(upload[1] + upload[2])
                    abort(self._requests, upload[1] + upload[2], upload[3])
                    results[number] = DeleteResult(key)
                else:
                    check_key(key)
                    wanted.append(number)
            except BackendError as error:
                results[number] = DeleteResult(key, error)
        for start in range(0, len(wanted), _BATCH):
            batch = wanted[start : start + _BATCH]
            found = self._delete_batch([keys[number] for number in batch])
            results.update(zip(batch, found, strict=True))
        return [results[number] for number in range(len(keys))]

    def _delete_batch(self, keys: Sequence[str]) -> DeleteResults:
        if len(keys) == 1:
            return [self._delete_one(keys[0])]
        prefix = self._place.prefix
        objects = [{"Key": prefix + key} for key in keys]
        try:
            answer = self._requests.send("delete_objects", "delete", "", Delete={"Objects": objects})
        except BackendError as error:
            # Older servers want a Content-MD5 that the SDK sends no more, or have no batches at all.
            if error.transient or isinstance(error, PermissionDeniedError):
                return [DeleteResult(key, error) for key in keys]
            logger.debug("deleting one by one: %s", error)
            return [self._delete_one(key) for key in keys]
        gone = {str(item.get("Key")).removeprefix(prefix): item for item in answer.get("Deleted", ())}
        failed = {str(item.get("Key")).removeprefix(prefix): item for item in answer.get("Errors", ())}
        results = []
        for key in keys:
            if key in failed:
                results.append(DeleteResult(key, told_of_key(failed[key], f"delete {key!r} at {self.url}")))
            elif key in gone:
                results.append(_gone(key, gone[key]))
            else:  # of a key that the answer leaves out nothing is known
                results.append(self._delete_one(key))
        return results

    def _delete_one(self, key: str) -> DeleteResult:
        try:
            answer = self._requests.send("delete_object", "delete", key)
        except ObjectNotFoundError:
            return DeleteResult(key)
        except BackendError as error:
            return DeleteResult(key, error)
        return _gone(key, answer)


def _receive(source: Any, view: memoryview) -> int:
    """Fills `view`; how many bytes came before the end."""
    done = 0
    while done < len(view):
        # In pieces: those that are copied on their way are in the processor's cache then.
        count: int = source.readinto(view[done : done + _READ_BYTES])
        if not count:
            break
        done += count
    return done


def _gone(key: str, answer: Mapping[str, Any]) -> DeleteResult:
    """A server that has put a marker where the object was keeps the object as an older version."""
    return DeleteResult(key, is_unfreed=bool(answer.get("DeleteMarker")))
