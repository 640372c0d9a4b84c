"""Storing one object: in one request, or a large one in parts; and whether servers keep conditions."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from ckptstore.errors import BackendError, ObjectExistsError, ObjectNotFoundError, PermissionDeniedError
from ckptstore_s3._body import Body, parts
from ckptstore_s3._client import Requests
from ckptstore_s3._failures import code_behind

logger = logging.getLogger(__name__)

MAX_PARTS = 1000
"""Amazon takes 10,000, but some servers list no more than these when an upload ends."""

_JOINED_BYTES = 64 << 10
_PROBE = "doctor/create-if-absent"


class Putter:
    """Puts objects of one place.

    What was stored is compared with what was sent before a put returns: by the server, where it takes a
    SHA-256 and answers with it; else by its size, for which it is asked. (That size and not its ETag: an ETag
    is the MD5 of what arrived only without encryption, and costs us another pass over the bytes.)

    Attributes:
        exclusive: whether the server refuses to create what is there; None until a probe has shown it.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        wanted = requests.options.create_if_absent
        self.exclusive: bool | None = None if wanted == "auto" else wanted
        self._probing: dict[int, threading.Lock] = {}

    def put(self, key: str, views: list[memoryview], *, if_absent: bool, max_parts: int = MAX_PARTS) -> None:
        """Stores `views` under `key`; as :meth:`ckptstore.backend.Backend.put` says."""
        if if_absent:
            self._require_exclusive(key)
        options = self._requests.options
        size = sum(map(len, views))
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        if size > 2 * options.part_bytes and options.multipart:
            self._put_parts(key, views, size, condition, max_parts)
        else:
            self._put_whole(key, views, size, condition)

    def _put_whole(self, key: str, views: list[memoryview], size: int, condition: dict[str, str]) -> None:
        digest = self._digest(views)
        answer = self._requests.send(
            "put_object",
            "put",
            key,
            Body=b"".join(views) if size < _JOINED_BYTES else Body(views),
            ContentLength=size,
            **self._storing(),
            **digest,
            **condition,
        )
        if not _confirmed(answer, digest):
            self._check_size(key, size, answer)

    def _storing(self) -> dict[str, Any]:
        """Parameters of every new object: where and how to keep it."""
        options = self._requests.options
        given = {
            "StorageClass": options.storage_class,
            "ServerSideEncryption": options.sse,
            "SSEKMSKeyId": options.sse_kms_key_id,
        }
        return {name: value for name, value in given.items() if value is not None}

    def _digest(self, views: Sequence[memoryview]) -> dict[str, str]:
        """The SHA-256 as a parameter, for servers that know it; for others it is in the signature alone."""
        if not self._requests.sends_checksums:
            return {}
        digest = hashlib.sha256()
        for view in views:
            digest.update(view)
        return {"ChecksumSHA256": base64.b64encode(digest.digest()).decode()}

    def _check_size(self, key: str, size: int, answer: Any) -> None:
        """That a server which says nothing of what it stored has stored all of it."""
        try:
            found = self._requests.send("head_object", "check", key)
        except ObjectNotFoundError as error:
            # Listings and reads of some servers lag; and a collector may have been faster.
            raise BackendError(
                f"put {key!r} at {self._requests.place.url}: it was stored and is not there", transient=True
            ) from error
        except PermissionDeniedError as error:
            raise PermissionDeniedError(
                error.message, hint="a put is checked by a HEAD, which wants s3:GetObject (docs/s3.md)"
            ) from error
        if int(found["ContentLength"]) == size:
            return
        if found.get("ETag") == answer.get("ETag"):  # else it is another's, who came after us
            self._requests.send("delete_object", "delete", key)
        raise BackendError(
            f"put {key!r} at {self._requests.place.url}: {size} bytes were sent and "
            f"{found['ContentLength']} stored",
            transient=True,
        )

    # --- in parts -------------------------------------------------------------------------------

    def _put_parts(
        self, key: str, views: list[memoryview], size: int, condition: dict[str, str], max_parts: int
    ) -> None:
        send = self._requests.send
        part_bytes = max(self._requests.options.part_bytes, -(-size // max_parts))
        algorithm = {"ChecksumAlgorithm": "SHA256"} if self._requests.sends_checksums else {}
        upload = send("create_multipart_upload", "begin to put", key, **self._storing(), **algorithm)[
            "UploadId"
        ]
        sent: list[dict[str, Any]] = []
        try:
            for number, part in enumerate(parts(views, part_bytes), 1):
                digest = self._digest(part)
                answer = send(
                    "upload_part",
                    f"put part {number} of",
                    key,
                    UploadId=upload,
                    PartNumber=number,
                    Body=Body(part),
                    ContentLength=sum(map(len, part)),
                    **digest,
                )
                sent.append({"PartNumber": number, "ETag": answer["ETag"], **digest})
        except BaseException:
            self._abort(key, upload)
            raise
        answer = self._complete(key, upload, sent, condition)
        self._check_size(key, size, answer)

    def _complete(self, key: str, upload: str, sent: list[dict[str, Any]], condition: dict[str, str]) -> Any:
        try:
            return self._requests.send(
                "complete_multipart_upload",
                "finish putting",
                key,
                UploadId=upload,
                MultipartUpload={"Parts": sent},
                **condition,
            )
        except BackendError as error:
            # Only the reply may have been lost. A server forgets an upload when it has become an object, and
            # nobody else knows this one; for a conditional put the caller repeats it and reads back.
            if condition or isinstance(error, ObjectExistsError) or not self._is_forgotten(key, upload):
                self._abort(key, upload)
                raise
            logger.info("the reply was lost, the upload is complete: %s", error)
            return {}

    def _is_forgotten(self, key: str, upload: str) -> bool:
        try:
            self._requests.send("list_parts", "look at", key, UploadId=upload, MaxParts=1)
        except BackendError as error:
            return is_unknown_upload(error)
        return False

    def _abort(self, key: str, upload: str) -> None:
        try:
            abort(self._requests, key, upload)
        except BackendError as error:
            logger.warning("an unfinished upload stays, for gc: %s", error)

    # --- if absent ------------------------------------------------------------------------------

    def _require_exclusive(self, key: str) -> None:
        """Once per process: that the server really refuses what is there already.

        Raises:
            BackendError: it does not; `exclusive` says so from now on.
        """
        if self.exclusive is None:
            # A lock for each process: in a forked child the parent's could be held for ever.
            with self._probing.setdefault(os.getpid(), threading.Lock()):
                if self.exclusive is None:
                    self.exclusive = self._refuses_what_is_there()
        if not self.exclusive:
            raise BackendError(
                f"put {key!r} at {self._requests.place.url}: this server does not keep If-None-Match",
                hint="one writer at a time only; or use a server with conditional writes (docs/providers.md)",
            )

    def _refuses_what_is_there(self) -> bool:
        send = self._requests.send
        name = f"{_PROBE}.{os.urandom(8).hex()}"
        # The first makes sure that something is there, whatever the server thinks of conditions.
        send("put_object", "put", name, Body=b"probe", ContentLength=5, **self._storing())
        try:
            send(
                "put_object", "put", name, Body=b"again", ContentLength=5, IfNoneMatch="*", **self._storing()
            )
        except ObjectExistsError:
            return True
        except BackendError as error:
            if error.transient or isinstance(error, PermissionDeniedError):
                raise
            logger.warning("%s: conditional writes are refused: %s", self._requests.place.url, error)
            return False
        finally:
            send("delete_object", "delete", name)
        return False


def abort(requests: Requests, key: str, upload: str) -> None:
    """Ends an upload; one that has ended already is no error."""
    try:
        requests.send("abort_multipart_upload", "abort putting", key, UploadId=upload)
    except BackendError as error:
        if not is_unknown_upload(error):
            raise


def is_unknown_upload(error: BackendError) -> bool:
    """Whether the server says that there is no such upload."""
    return code_behind(error)[0] == "NoSuchUpload"


def _confirmed(answer: Any, digest: dict[str, str]) -> bool:
    return bool(digest) and answer.get("ChecksumSHA256") == digest["ChecksumSHA256"]
