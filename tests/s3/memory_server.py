"""An S3 server in memory, as small as the tests of faults need it: it lets them see exactly what arrived.

It checks the SHA-256 that a request names for its body, as real servers do, and no signature: the proxy may
change what it forwards. Whether the backend speaks S3 as others understand it is for the tests against a
real server to say.
"""

from __future__ import annotations

import dataclasses
import email.utils
import hashlib
import http.server
import itertools
import threading
import time
import urllib.parse
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_TIME = "%Y-%m-%dT%H:%M:%S.000Z"


@dataclasses.dataclass(frozen=True)
class Request:
    """One request as it arrived; `key` is decoded, and without the bucket; `target` is as it was sent."""

    method: str
    target: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @classmethod
    def parse(cls, method: str, target: str, headers: dict[str, str], body: bytes) -> Request:
        path, _, query = target.partition("?")
        bucket, _, key = path.lstrip("/").partition("/")
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        return cls(method, target, bucket, urllib.parse.unquote(key), asked, headers, body)

    @property
    def operation(self) -> str:
        """The name in Amazon's reference: ``PutObject``, ``ListObjectsV2``, ..."""
        query, method = self.query, self.method
        if not self.key:
            if method == "GET":
                return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
            return {"POST": "DeleteObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket"}.get(method, method)
        if method == "POST":
            return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
        if "uploadId" in query:
            return {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload", "GET": "ListParts"}[method]
        return f"{method.title()}Object"


@dataclasses.dataclass(frozen=True)
class Reply:
    """What goes back."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def error(cls, status: int, code: str, message: str = "on purpose") -> Reply:
        text = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
        return cls(status, text.encode(), {"Content-Type": "application/xml"})


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection, kept open between requests; the server's `answer` says what goes back."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = Request.parse(
            self.command,
            self.path,
            {name.lower(): value for name, value in self.headers.items()},
            self.rfile.read(length),
        )
        self.send(self.server.answer(request))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def send(self, reply: Reply, *, body_bytes: int | None = None) -> None:
        """Writes a reply; of its body only the first `body_bytes`."""
        headers = {"Content-Length": str(len(reply.body)), **reply.headers}
        head = f"HTTP/1.1 {reply.status} -\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers.items())
        body = b"" if self.command == "HEAD" or reply.status in (204, 304) else reply.body[:body_bytes]
        self.wfile.write(head.encode() + b"\r\n" + body)

    def log_message(self, *_args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """A server on a port of its own, on loopback; a context manager."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, *_args: object) -> None:
        """Clients that hang up are what these tests are about."""


@dataclasses.dataclass
class _Upload:
    key: str
    parts: dict[int, bytes] = dataclasses.field(default_factory=dict)


class MemoryS3(Server):
    """The server.

    Attributes:
        objects: key -> content, of the one bucket ``bucket``.
        requests: all that arrived, in order.
        puts: key -> contents that were stored there, one after the other.
        versioned: a delete keeps the bytes, under a marker, as a bucket with versions does.
        kept: what such deletes left: (key, content).
    """

    def __init__(self) -> None:
        super().__init__(Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.puts: dict[str, list[bytes]] = {}
        self.versioned = False
        self.kept: list[tuple[str, bytes]] = []
        self._modified: dict[str, float] = {}
        self._uploads: dict[str, _Upload] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def uploads(self) -> list[str]:
        """Keys of uploads that were begun and neither finished nor aborted."""
        return [upload.key for upload in self._uploads.values()]

    def operations(self, name: str, key: str = "") -> list[Request]:
        """Requests of one kind, for keys that hold `key`."""
        return [request for request in self.requests if request.operation == name and key in request.key]

    def answer(self, request: Request) -> Reply:
        declared = request.headers.get("x-amz-content-sha256", "")
        with self._lock:
            self.requests.append(request)
            if len(declared) == 64 and hashlib.sha256(request.body).hexdigest() != declared:
                return Reply.error(400, "XAmzContentSHA256Mismatch")
            if request.bucket != "bucket":
                return Reply.error(404, "NoSuchBucket")
            handle = getattr(self, f"_{request.operation.lower()}", None)
            return handle(request) if handle else Reply.error(501, "NotImplemented")

    def _headbucket(self, _request: Request) -> Reply:
        return Reply(200)

    def _refusal(self, request: Request) -> Reply | None:
        if request.headers.get("if-none-match") == "*" and request.key in self.objects:
            return Reply.error(412, "PreconditionFailed")
        return None

    def _store(self, key: str, content: bytes) -> dict[str, str]:
        self.objects[key] = content
        self.puts.setdefault(key, []).append(content)
        self._modified[key] = time.time()
        return {"ETag": f'"{hashlib.md5(content).hexdigest()}"'}

    def _putobject(self, request: Request) -> Reply:
        return self._refusal(request) or Reply(200, headers=self._store(request.key, request.body))

    def _getobject(self, request: Request) -> Reply:
        content = self.objects.get(request.key)
        if content is None:
            return Reply.error(404, "NoSuchKey")
        headers = {
            "Last-Modified": email.utils.formatdate(self._modified[request.key], usegmt=True),
            "ETag": f'"{hashlib.md5(content).hexdigest()}"',
        }
        asked = request.headers.get("range")
        if not asked:
            return Reply(200, content, headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if int(first) >= len(content):
            return Reply.error(416, "InvalidRange")
        part = content[int(first) : int(last) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        return Reply(206, part, headers)

    def _headobject(self, request: Request) -> Reply:
        return self._getobject(request)

    def _remove(self, key: str) -> None:
        content = self.objects.pop(key, None)
        if content is not None and self.versioned:
            self.kept.append((key, content))

    def _deleteobject(self, request: Request) -> Reply:
        self._remove(request.key)
        return Reply(204, headers={"x-amz-delete-marker": "true"} if self.versioned else {})

    def _deleteobjects(self, request: Request) -> Reply:
        keys = keys_to_delete(request.body)
        for key in keys:
            self._remove(key)
        return deleted(() if b"<Quiet>true" in request.body else keys, has_versions=self.versioned)

    def _listobjectsv2(self, request: Request) -> Reply:
        query = request.query
        after = query.get("continuation-token", query.get("start-after", ""))
        prefix, most = query.get("prefix", ""), int(query.get("max-keys", 1000))
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        encode = urllib.parse.quote if query.get("encoding-type") == "url" else escape
        items = "".join(
            f"<Contents><Key>{encode(key)}</Key><LastModified>{_stamp(self._modified[key])}</LastModified>"
            f"<Size>{len(self.objects[key])}</Size></Contents>"
            for key in keys[:most]
        )
        more = len(keys) > most
        token = f"<NextContinuationToken>{escape(keys[most - 1])}</NextContinuationToken>" if more else ""
        encoding = "<EncodingType>url</EncodingType>" if encode is urllib.parse.quote else ""
        return _xml(
            f"<ListBucketResult>{encoding}<IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}"
            "</ListBucketResult>"
        )

    def _createmultipartupload(self, request: Request) -> Reply:
        upload = f"upload{next(self._numbers)}"
        self._uploads[upload] = _Upload(request.key)
        return _xml(
            f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        )

    def _uploadpart(self, request: Request) -> Reply:
        upload = self._uploads.get(request.query["uploadId"])
        if upload is None:
            return Reply.error(404, "NoSuchUpload")
        upload.parts[int(request.query["partNumber"])] = request.body
        return Reply(200, headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})

    def _completemultipartupload(self, request: Request) -> Reply:
        if refusal := self._refusal(request):
            return refusal
        upload = self._uploads.pop(request.query["uploadId"], None)
        if upload is None:
            return Reply.error(404, "NoSuchUpload")
        named = [int(item.text or 0) for item in _elements(request.body, "PartNumber")]
        if any(len(upload.parts[number]) < 5 << 20 for number in named[:-1]):
            return Reply.error(400, "EntityTooSmall")
        self._store(upload.key, b"".join(upload.parts[number] for number in named))
        return _xml("<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

    def _abortmultipartupload(self, request: Request) -> Reply:
        found = self._uploads.pop(request.query["uploadId"], None)
        return Reply(204) if found else Reply.error(404, "NoSuchUpload")

    def _listmultipartuploads(self, request: Request) -> Reply:
        items = "".join(
            f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{number}</UploadId>"
            f"<Initiated>{_stamp(time.time())}</Initiated></Upload>"
            for number, upload in sorted(self._uploads.items())
            if upload.key.startswith(request.query.get("prefix", ""))
        )
        return _xml(
            f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{items}"
            "</ListMultipartUploadsResult>"
        )


def keys_to_delete(body: bytes) -> list[str]:
    """The keys that a DeleteObjects names."""
    return [item.text or "" for item in _elements(body, "Key")]


def deleted(
    keys: Iterable[str], errors: Iterable[tuple[str, str]] = (), *, has_versions: bool = False
) -> Reply:
    """The reply to a DeleteObjects: what went, and (key, code) of what did not."""
    marker = "<DeleteMarker>true</DeleteMarker>" if has_versions else ""
    gone = "".join(f"<Deleted><Key>{escape(key)}</Key>{marker}</Deleted>" for key in keys)
    left = "".join(
        f"<Error><Key>{escape(key)}</Key><Code>{code}</Code><Message>on purpose</Message></Error>"
        for key, code in errors
    )
    return _xml(f"<DeleteResult>{gone}{left}</DeleteResult>")


def _elements(body: bytes, name: str) -> list[ElementTree.Element]:
    return [item for item in ElementTree.fromstring(body).iter() if item.tag.rpartition("}")[2] == name]


def _xml(text: str) -> Reply:
    return Reply(200, f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode())


def _stamp(seconds: float) -> str:
    return time.strftime(_TIME, time.gmtime(seconds))
