"""A proxy between the S3 client and a server, that does harm as a script says.

It forwards each request as it came, with the client's Host header, so that signatures still fit. A
:class:`Fault` says which requests it strikes and what happens to them:

``status``           answered by the proxy with `status` and `code`; the server never hears of it.
``reset_before``     the connection is reset when the request's head has come.
``reset_in_request`` it is reset when half of the body has come.
``reset_in_reply``   the server does it; the connection is reset after half of the reply's body.
``lost_reply``       the server does it; the connection is closed without a word.
``short_body``       half of the reply's body, in good order, under the length of the whole.
``wrong_bytes``      one bit of the reply's body is another.
``strip_condition``  If-None-Match never arrives: a server that does not know it.
``store_framing``    the body is stored as an aws-chunked upload frames it: a server that does not undo that.
``truncate_upload``  only the first `count` bytes are stored.
``delete_errors``    keys of a batch that match `key` are not deleted, and the reply says `code` for them.
``lagging_list``     a listing misses what was written after the fault was made, until it is removed.
``stale_read``       what was written after the fault was made is read as it was before, `times` times.
``require``          refused (`status`, `code`) unless the header `header` is there.
``reject``           refused (`status`, `code`) if a header that matches `header` is there.
``max_parts``        refused (`status`, `code`) if an upload is finished with more than `count` parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import http.client
import re
import socket
import struct
import threading
import urllib.parse
from typing import Literal, TypeAlias
from xml.sax.saxutils import escape

from tests.s3.memory_server import Handler, Reply, Request, Server, deleted, keys_to_delete

Kind: TypeAlias = Literal[
    "status",
    "reset_before",
    "reset_in_request",
    "reset_in_reply",
    "lost_reply",
    "short_body",
    "wrong_bytes",
    "strip_condition",
    "store_framing",
    "truncate_upload",
    "delete_errors",
    "lagging_list",
    "stale_read",
    "require",
    "reject",
    "max_parts",
]

WRITES = (
    "PutObject DeleteObject DeleteObjects CreateMultipartUpload UploadPart CompleteMultipartUpload "
    "AbortMultipartUpload CreateBucket"
)
_UNDER_WAY = ("reset_before", "reset_in_request")
_HOP = ("connection", "keep-alive", "expect", "transfer-encoding", "content-length")


@dataclasses.dataclass(eq=False)
class Fault:
    """What happens, and to which requests; see the module.

    Args:
        operations: names as Amazon's reference has them, with spaces between; ``*`` for all.
        key: pattern of keys, without the bucket (``*`` matches ``/`` too).
        skip: lets that many pass first.
        times: strikes that often; None for ever.
    """

    kind: Kind
    operations: str = "*"
    key: str = "*"
    skip: int = 0
    times: int | None = 1
    status: int = 503
    code: str = "SlowDown"
    count: int = 0
    header: str = ""
    struck: int = 0

    def takes(self, request: Request) -> bool:
        """Whether it strikes this request; counts."""
        names = self.operations.split()
        if self.times is not None and self.struck >= self.times:
            return False
        if "*" not in names and request.operation not in names:
            return False
        # What it asks of the keys of a batch is looked at when that is answered.
        if self.kind != "delete_errors" and not fnmatch.fnmatchcase(request.key, self.key):
            return False
        if not self._is_refused(request):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.struck += 1
        return True

    def _is_refused(self, request: Request) -> bool:
        if self.kind == "require":
            return self.header not in request.headers
        if self.kind == "reject":
            return any(
                re.fullmatch(self.header, f"{name}:{value}") for name, value in request.headers.items()
            )
        if self.kind == "max_parts":
            return request.body.count(b"<PartNumber>") > self.count
        return True


class _Gone(Exception):
    """The client was left without a reply."""


class _ProxyHandler(Handler):
    server: Proxy

    def answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        length = int(headers.get("content-length") or 0)
        fault = self.server.fault_for(Request.parse(self.command, self.path, headers, b""), _UNDER_WAY)
        if fault:
            if fault.kind == "reset_in_request":
                self.rfile.read(length // 2)
            self.reset()
            return
        request = Request.parse(self.command, self.path, headers, self.rfile.read(length))
        with contextlib.suppress(_Gone):
            self.send(self.server.pass_on(request, self))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def reset(self) -> None:
        """Ends the connection with RST, not FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        # The handler's files hold the socket, too: only then is it really closed.
        self.rfile.close()
        self.wfile.close()
        self.connection.close()


class Proxy(Server):
    """The proxy; a context manager.

    Args:
        upstream: endpoint of the server, ``http://host:port``.

    Attributes:
        script: the faults; the first that fits strikes.
        endpoint: for the client.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(_ProxyHandler)
        self.script: list[Fault] = []
        self._upstream = urllib.parse.urlsplit(upstream)
        self._lock = threading.Lock()
        self._fresh: set[str] = set()
        self._former: dict[str, Reply] = {}

    def add(self, kind: Kind, operations: str = "*", key: str = "*", **given: int | str | None) -> Fault:
        """Puts a fault at the end of the script."""
        fault = Fault(kind, operations, key, **given)  # type: ignore[arg-type]
        self.script.append(fault)
        return fault

    def heal(self) -> None:
        """Nothing goes wrong from here on."""
        with self._lock:
            self.script.clear()
            self._fresh.clear()
            self._former.clear()

    def fault_for(self, request: Request, kinds: tuple[str, ...], *, but: bool = False) -> Fault | None:
        with self._lock:
            for fault in self.script:
                if (fault.kind in kinds) != but and fault.takes(request):
                    return fault
        return None

    def pass_on(self, request: Request, handler: _ProxyHandler) -> Reply:
        """Forwards, with what the script says for this request."""
        self._remember(request)
        fault = self.fault_for(request, _UNDER_WAY, but=True)
        if fault is None:
            return self._forward(request)
        kind = fault.kind
        if kind in ("status", "require", "reject", "max_parts"):
            return Reply.error(fault.status, fault.code)
        if kind == "stale_read":
            return self._former.get(request.key) or self._forward(request)
        if kind == "lagging_list":
            return self._without_fresh(self._forward(request))
        if kind == "delete_errors":
            return self._with_errors(request, fault)
        reply = self._forward(_spoiled(request, fault))
        if kind == "lost_reply":
            handler.close_connection = True
            raise _Gone
        if kind in ("short_body", "reset_in_reply"):
            handler.send(reply, body_bytes=len(reply.body) // 2)
            handler.close_connection = True
            if kind == "reset_in_reply":
                handler.reset()
            raise _Gone
        if kind == "wrong_bytes" and reply.body:
            middle = len(reply.body) // 2
            changed = bytes([reply.body[middle] ^ 1])
            return dataclasses.replace(reply, body=reply.body[:middle] + changed + reply.body[middle + 1 :])
        return reply

    def _remember(self, request: Request) -> None:
        """What listings and reads are to miss, while the script has such a fault."""
        kinds = {fault.kind for fault in self.script}
        if request.operation not in ("PutObject", "CompleteMultipartUpload"):
            return
        if "lagging_list" in kinds:
            self._fresh.add(request.key)
        if "stale_read" in kinds and request.key not in self._former:
            target = request.target.partition("?")[0]
            headers = {"host": request.headers["host"]}
            self._former[request.key] = self._forward(Request.parse("GET", target, headers, b""))

    def _forward(self, request: Request) -> Reply:
        connection = http.client.HTTPConnection(
            self._upstream.hostname or "", self._upstream.port, timeout=30
        )
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name not in _HOP:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            answer = connection.getresponse()
            body = answer.read()
            headers = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in _HOP or (name.lower() == "content-length" and request.method == "HEAD")
            }
            return Reply(answer.status, body, headers)
        finally:
            connection.close()

    def _without_fresh(self, reply: Reply) -> Reply:
        def keep(match: re.Match[bytes]) -> bytes:
            key = re.search(rb"<Key>(.*?)</Key>", match[0], re.DOTALL)
            assert key is not None
            return b"" if urllib.parse.unquote(key[1].decode()) in self._fresh else match[0]

        body = re.sub(rb"<Contents>.*?</Contents>", keep, reply.body, flags=re.DOTALL)
        return dataclasses.replace(reply, body=body)

    def _with_errors(self, request: Request, fault: Fault) -> Reply:
        keys = keys_to_delete(request.body)
        hit = [key for key in keys if fnmatch.fnmatchcase(key, fault.key)]
        spared = [key for key in keys if key not in hit]
        objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in spared)
        body = f"<Delete>{objects}</Delete>".encode()
        self._forward(dataclasses.replace(request, body=body, headers=_unsigned(request)))
        return deleted(spared, [(key, fault.code) for key in hit])


def _spoiled(request: Request, fault: Fault) -> Request:
    """The request as the server gets it."""
    if fault.kind == "strip_condition":
        headers = {name: value for name, value in request.headers.items() if name != "if-none-match"}
        return dataclasses.replace(request, headers=headers)
    if fault.kind == "truncate_upload":
        return dataclasses.replace(request, body=request.body[: fault.count], headers=_unsigned(request))
    if fault.kind == "store_framing":
        body = request.body
        signature = b"0" * 64
        framed = b"%x;chunk-signature=%s\r\n%s\r\n0;chunk-signature=%s\r\n\r\n" % (
            len(body),
            signature,
            body,
            signature,
        )
        return dataclasses.replace(request, body=framed, headers=_unsigned(request))
    return request


def _unsigned(request: Request) -> dict[str, str]:
    """Headers that say nothing of the body."""
    kept = {name: value for name, value in request.headers.items() if "md5" not in name}
    return {**kept, "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
