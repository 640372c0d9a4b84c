"""One boto client per process, made when it is first needed."""

from __future__ import annotations

import os
import threading
from typing import Any

from ckptstore.errors import PermissionDeniedError, UsageError
from ckptstore_s3._options import Options, Place, is_aws, wants_path_style


class Clients:
    """The client of this process; a forked or spawned one makes its own, and so does one after expiry."""

    def __init__(self, place: Place, options: Options) -> None:
        self._place = place
        self._options = options
        self._own: tuple[int, Any] | None = None
        self._lock = (os.getpid(), threading.Lock())

    @property
    def client(self) -> Any:
        """The client; thread-safe."""
        own = self._own
        if own is not None and own[0] == os.getpid():
            return own[1]
        if self._lock[0] != os.getpid():  # a thread of the parent may have held it
            self._lock = (os.getpid(), threading.Lock())
        with self._lock[1]:
            own = self._own
            if own is None or own[0] != os.getpid():
                own = self._own = (os.getpid(), self._make())
            return own[1]

    def renew(self) -> None:
        """The next call reads configuration and credentials anew."""
        self._own = None

    def close(self) -> None:
        """Closes connections; the next call opens them again."""
        own, self._own = self._own, None
        if own is not None and own[0] == os.getpid():
            own[1].close()

    def _make(self) -> Any:
        import boto3
        import botocore.config
        import botocore.exceptions

        options = self._options
        try:
            # Its own session: the default one is shared with the rest of the program, and not thread-safe.
            session = boto3.session.Session(profile_name=options.profile)
            endpoint = options.endpoint_url or _configured_endpoint(session)
            style = options.addressing_style
            if style == "auto" and wants_path_style(self._place.bucket, endpoint):
                style = "path"
            checksums = options.checksums
            if checksums == "auto":
                checksums = "when_supported" if is_aws(endpoint) else "when_required"
            config = botocore.config.Config(
                connect_timeout=options.connect_timeout,
                read_timeout=options.read_timeout,
                retries={"total_max_attempts": 1, "mode": "standard"},  # the store retries, in one place
                max_pool_connections=2 * options.concurrency,
                tcp_keepalive=True,
                request_checksum_calculation=checksums,
                response_checksum_validation="when_required",  # every chunk and document is hashed by us
                s3={"addressing_style": style, "payload_signing_enabled": True},
            )
            return session.client(
                "s3",
                region_name=options.region or session.region_name or "us-east-1",
                endpoint_url=options.endpoint_url,
                verify=options.ca_bundle,
                config=config,
            )
        except (botocore.exceptions.ProfileNotFound, botocore.exceptions.PartialCredentialsError) as error:
            raise PermissionDeniedError(
                f"{self._place.url}: {error}", hint="look at AWS_PROFILE and ~/.aws"
            ) from error
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            raise UsageError(f"{self._place.url} cannot be used as configured: {error}") from error


def _configured_endpoint(session: Any) -> str | None:
    """The endpoint that botocore's own configuration names, if any."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return os.environ[name]
    # What the profile says; the public view of a session does not have it.
    found = session._session.get_scoped_config().get("endpoint_url")
    return found if isinstance(found, str) else None
