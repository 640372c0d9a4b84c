"""Requests of one process to one bucket: its own client, made when it is first needed, and their errors."""

from __future__ import annotations

import collections
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ckptstore.errors import BackendError, PermissionDeniedError, UsageError
from ckptstore_s3._body import Body
from ckptstore_s3._failures import EXPIRED, code_behind, told
from ckptstore_s3._options import Options, Place, is_aws, wants_path_style

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE_BYTES = 64 << 10


class _Own:
    """What one process has: locks of a parent could be held for ever in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: Any = None
        self.requests: collections.Counter[str] = collections.Counter()


class Requests:
    """Sends requests for one place; thread-safe, and each process has its own client.

    Never retries, with one exception: credentials that have expired are read anew, once.
    """

    def __init__(self, place: Place, options: Options) -> None:
        self.place = place
        self.options = options
        self._own_by_pid: dict[int, _Own] = {}

    @property
    def _own(self) -> _Own:
        pid = os.getpid()
        # setdefault: two threads that come first at once must agree on one.
        return self._own_by_pid.get(pid) or self._own_by_pid.setdefault(pid, _Own())

    @property
    def counts(self) -> collections.Counter[str]:
        """How many requests this process has sent, by botocore's names of them."""
        return self._own.requests

    @property
    def client(self) -> Any:
        """The boto client of this process."""
        own = self._own
        client = own.client
        if client is None:
            with own.lock:
                client = own.client = own.client or _make_client(self.place, self.options)
        return client

    @property
    def is_aws(self) -> bool:
        """Whether the endpoint, wherever it was configured, is Amazon's."""
        return is_aws(self.client.meta.endpoint_url)

    @property
    def sends_checksums(self) -> bool:
        """Whether the server is told checksums in headers of their own, and answers with them."""
        return bool(self.client.meta.config.request_checksum_calculation == "when_supported")

    def close(self) -> None:
        """Closes this process's connections; the next request opens them again."""
        own = self._own
        client, own.client = own.client, None
        if client is not None:
            client.close()

    def send(self, operation: str, verb: str, key: str, **parameters: Any) -> Any:
        """One request.

        Args:
            operation: botocore's name of it.
            verb, key: what is done to what, for error messages; `key` "" is the bucket's own.

        Returns:
            botocore's answer.

        Raises:
            BackendError: or one of its kinds, for whatever went wrong.
        """
        place = self.place
        what = f"{verb} {key!r} at {place.url}" if key else f"{verb} {place.url}"
        if key:
            parameters["Key"] = place.prefix + key

        def send() -> Any:
            own = self._own
            client = self.client
            with own.lock:
                own.requests[operation] += 1
            body = parameters.get("Body")
            if isinstance(body, Body):
                body.seek(0)
            return _translated(lambda: getattr(client, operation)(Bucket=place.bucket, **parameters), what)

        used = self.client
        try:
            return send()
        except BackendError as error:
            if not _may_have_expired(operation, error):
                raise
            logger.info("%s: credentials are read anew", place.url)
            self._forget(used)
            return send()

    def _forget(self, client: Any) -> None:
        """Has a new client made, unless another thread was faster; those that use the old one may finish."""
        own = self._own
        with own.lock:
            if own.client is client:
                own.client = None


def _may_have_expired(operation: str, error: BackendError) -> bool:
    code, status = code_behind(error)
    # The answer to a HEAD has no body that could say why; Amazon's for an expired token is 400.
    return code in EXPIRED or (operation.startswith("head_") and status == 400)


def _translated(send: Callable[[], T], what: str) -> T:
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
    except failures.SSLError as error:
        raise BackendError(
            f"{what}: {error}", hint="name the certificate authority by AWS_CA_BUNDLE or ca_bundle"
        ) from error
    except (failures.HTTPClientError, failures.ConnectionError, OSError) as error:
        raise BackendError(
            f"{what}: no answer: {error}", transient=True, hint="is the endpoint right, and up?"
        ) from error
    except failures.BotoCoreError as error:
        raise BackendError(f"{what}: {error}") from error


@functools.cache
def _loader() -> Any:
    """The API's description, parsed once in a process: it takes 0.1 s, everything else 5 ms."""
    import botocore.loaders

    return botocore.loaders.create_loader()


def _send_at_once(request: Any, **_: Any) -> None:
    """Sends a small body right behind its headers, and does not ask first whether it may.

    That saves a round trip for each document. And SeaweedFS 4.48 keeps an empty object of a client that is
    killed between the two.
    """
    if "Expect" in request.headers and int(request.headers["Content-Length"]) < _AT_ONCE_BYTES:
        del request.headers["Expect"]


def _send_from_memory(request: Any, **_: Any) -> None:
    """Sends a body from where it lies; as a file, it would be read in pieces of 16 KiB."""
    if isinstance(request.body, Body):
        request.body = request.body.pieces()


def _make_client(place: Place, options: Options) -> Any:
    import boto3
    import botocore.config
    import botocore.exceptions

    try:
        # Its own session: the default one is shared with the rest of the program, and not thread-safe.
        session = boto3.session.Session(profile_name=options.profile)
        # boto3 has no public way to share what it has parsed.
        session._session.register_component("data_loader", _loader())

        def client(style: str, checksums: str) -> Any:
            config = botocore.config.Config(
                connect_timeout=options.connect_timeout,
                read_timeout=options.read_timeout,
                retries={"total_max_attempts": 1, "mode": "standard"},  # the store retries, in one place
                max_pool_connections=options.max_pool or 2 * options.concurrency,
                tcp_keepalive=True,
                request_checksum_calculation=checksums,
                response_checksum_validation="when_required",  # every chunk and document is hashed by us
                s3={"addressing_style": style, "payload_signing_enabled": True},
            )
            new = session.client(
                "s3",
                region_name=options.region or session.region_name or "us-east-1",
                endpoint_url=options.endpoint_url,
                verify=options.ca_bundle if options.verify else False,
                config=config,
            )
            new.meta.events.register("request-created.s3.PutObject", _send_at_once)
            new.meta.events.register("before-send.s3", _send_from_memory)
            return new

        made = client("virtual", "when_supported")
        # Only a client knows which of the environment, the profile and its services names the endpoint.
        endpoint = made.meta.endpoint_url
        style, checksums = options.addressing_style, options.checksums
        if style == "auto":
            style = "path" if wants_path_style(place.bucket, endpoint) else "virtual"
        if checksums == "auto":
            checksums = "when_supported" if is_aws(endpoint) else "when_required"
        if (style, checksums) == ("virtual", "when_supported"):
            return made
        made.close()
        return client(style, checksums)
    except (botocore.exceptions.ProfileNotFound, botocore.exceptions.PartialCredentialsError) as error:
        raise PermissionDeniedError(f"{place.url}: {error}", hint="look at AWS_PROFILE and ~/.aws") from error
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(f"{place.url} cannot be used as configured: {error}") from error
