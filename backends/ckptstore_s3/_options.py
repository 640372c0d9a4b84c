"""Where a bucket is and how to talk to it: the URL and ``[tiers.options]``."""

from __future__ import annotations

import dataclasses
import ipaddress
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal

from ckptstore.errors import UsageError

MIB = 1 << 20
LEAST_PART_BYTES = 5 * MIB
"""S3 takes no smaller part of an upload but the last."""
_NO_CREDENTIALS = "botocore finds them: AWS_PROFILE, the environment, or the machine's role"
MAX_PREFIX_BYTES = 511
"""With a slash and the longest key of the store's it fills what S3 takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """See docs/s3.md; what is None is left to botocore's own configuration.

    Attributes:
        checksums: "when_required" for servers that do not know the newer checksum headers; "auto" takes that
            for every endpoint that is not of AWS.
        create_if_absent: whether conditional writes work; "auto" finds out at the first.
        multipart: False for servers without it.
        part_bytes: of uploads that are cut; an object of up to twice as many goes in one request.
        max_pool: connections kept open at most; None: twice `concurrency`.
        ordered_list: whether listings are in code-point order; "auto" takes that for Amazon's endpoints.
        verify: False takes any certificate.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    checksums: Literal["auto", "when_required", "when_supported"] = "auto"
    create_if_absent: Literal["auto"] | bool = "auto"
    multipart: bool = True
    part_bytes: int = 64 * MIB
    concurrency: int = 16
    storage_class: str | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None
    ca_bundle: str | None = None
    verify: bool = True
    connect_timeout: float = 10.0
    read_timeout: float = 60.0
    max_pool: int | None = None
    ordered_list: Literal["auto"] | bool = "auto"

    @classmethod
    def of(cls, given: Mapping[str, object] | None) -> Options:
        """Checked options.

        Raises:
            UsageError: an unknown one, or of the wrong kind; names it.
        """
        values: dict[str, Any] = dict(given or {})
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise UsageError(
                    f"the s3 backend has no option {name!r}", hint=f"it has {', '.join(sorted(known))}"
                )
            _check(name, value)
        if "@" in urllib.parse.urlsplit(str(values.get("endpoint_url", ""))).netloc:
            raise UsageError("credentials do not belong in option endpoint_url", hint=_NO_CREDENTIALS)
        return cls(**values)


_CHOICES: Mapping[str, tuple[object, ...]] = {
    "addressing_style": ("auto", "path", "virtual"),
    "checksums": ("auto", "when_required", "when_supported"),
    "create_if_absent": ("auto", True, False),
    "multipart": (True, False),
    "ordered_list": ("auto", True, False),
    "verify": (True, False),
}
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "part_bytes": (LEAST_PART_BYTES, 5 << 30),
    "concurrency": (1, 1000),
    "max_pool": (1, 10_000),
    "connect_timeout": (0.001, 86_400),
    "read_timeout": (0.001, 86_400),
}


def _check(name: str, value: object) -> None:
    if name in _CHOICES:
        if not any(type(value) is type(choice) and value == choice for choice in _CHOICES[name]):
            raise UsageError(
                f"option {name} must be one of {', '.join(map(repr, _CHOICES[name]))}, not {value!r}"
            )
    elif name in _NUMBERS:
        least, most = _NUMBERS[name]
        whole = name in ("part_bytes", "concurrency", "max_pool")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise UsageError(f"option {name} must be a number, not {value!r}")
        if not least <= value <= most:
            raise UsageError(f"option {name} must be from {least:g} to {most:g}, not {value!r}")
    elif not isinstance(value, str) or not value:
        raise UsageError(f"option {name} must be a text, not {value!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A bucket, and what the keys in it begin with: empty, or ending in ``/``."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Place:
        """Reads ``s3://bucket/prefix``; the prefix is taken as it stands, nothing in it is decoded.

        Raises:
            UsageError: it is no such URL, or holds credentials.
        """
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme.lower() != "s3" or not bucket:
            raise UsageError("an S3 place is written s3://bucket/prefix")
        if "@" in bucket or ":" in bucket:
            raise UsageError(
                "credentials do not belong in the URL of a bucket",
                hint=_NO_CREDENTIALS,
            )
        segments = prefix.strip("/").split("/")
        if prefix.strip("/") and any(segment in ("", ".", "..") for segment in segments):
            raise UsageError(f"the prefix {prefix!r} has an empty or dotted segment")
        clean = "/".join(segments)
        if len(clean.encode("utf-8", "surrogatepass")) > MAX_PREFIX_BYTES:
            raise UsageError(f"the prefix is longer than {MAX_PREFIX_BYTES} bytes: S3 takes keys of 1,024")
        return cls(bucket, f"{clean}/" if clean else "")

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def wants_path_style(bucket: str, endpoint: str | None) -> bool:
    """Whether ``https://endpoint/bucket`` must be used: hosts that have no subdomains, buckets with dots."""
    if "." in bucket:
        return True  # a wildcard certificate covers one label
    host = urllib.parse.urlsplit(endpoint or "").hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_aws(endpoint: str | None) -> bool:
    """Whether an endpoint is Amazon's own; the default one is."""
    host = urllib.parse.urlsplit(endpoint or "").hostname
    return host is None or host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
