"""Which file system a URL means, how it is written to, and what of its options is secret."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import fsspec

from ckptstore.errors import UnknownSchemeError, UsageError

PREFIX = "fsspec+"
"""Before a protocol: fsspec's file system of that name, whatever else serves the scheme."""

_BUCKETS = frozenset({"gs", "gcs", "az", "abfs", "abfss", "s3", "s3a", "oci", "oss"})
"""Object stores: the first segment is a bucket, an object appears whole or not at all."""

_EXCLUSIVE = frozenset({"gs", "gcs", "az", "abfs", "abfss", "s3", "s3a", "memory"})
"""Where fsspec's ``mode="create"`` is one conditional request (in memory: under a lock of ours)."""

_SECRET = re.compile(
    r"token|secret|passw|passphrase|credential|connection_string|sas|auth|pkey|private|cookie|session|client_kwargs"
    r"|(^|_)(key|keys|pass|pwd)($|_)",
    re.IGNORECASE,
)
_PLAIN_TOKENS = frozenset({"anon", "cloud", "cache", "browser", "google_default"})
"""Values of gcsfs's option ``token`` that name a way to find credentials and are none themselves."""

_NO_SECRETS = frozenset({"host_key_policy", "key_filename"})

Writes = Literal["whole", "move", "local"]


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Our own options, the table ``[tiers.options.ckptstore]``; see docs/fsspec.md.

    Attributes:
        writes: "whole": the file system itself shows an object whole or not at all; "move": write to another
            name, then move.
        create_if_absent: "auto": where it is known to be atomic; True: you know it is; both are probed.
        concurrency: transfers at once.
        create_bucket: make the bucket with the store, if it is not there.
    """

    writes: Literal["auto", "whole", "move"] = "auto"
    create_if_absent: Literal["auto"] | bool = "auto"
    concurrency: int = 16
    create_bucket: bool = False

    @classmethod
    def of(cls, given: object) -> Settings:
        """Checked settings.

        Raises:
            UsageError: an unknown one, or of the wrong kind; names it.
        """
        if not isinstance(given, Mapping):
            raise UsageError(f"option ckptstore must be a table, not {given!r}")
        choices: Mapping[str, tuple[object, ...]] = {
            "writes": ("auto", "whole", "move"),
            "create_if_absent": ("auto", True, False),
            "create_bucket": (True, False),
        }
        for name, value in given.items():
            if name == "concurrency":
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1000:
                    raise UsageError(f"option ckptstore.concurrency must be from 1 to 1000, not {value!r}")
            elif name not in choices:
                known = ", ".join(sorted([*choices, "concurrency"]))
                raise UsageError(f"there is no option ckptstore.{name}", hint=f"there are {known}")
            elif not any(type(value) is type(choice) and value == choice for choice in choices[name]):
                wanted = ", ".join(map(repr, choices[name]))
                raise UsageError(f"option ckptstore.{name} must be one of {wanted}, not {value!r}")
        return cls(**given)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A directory or bucket prefix in one of fsspec's file systems.

    Attributes:
        url: as it was written; holds no password.
        protocol: fsspec's name of the file system.
        root: path in that file system, without ``/`` at the end.
        options: `storage_options` of the file system; may hold secrets.
        settings: our own.
        withheld: names of options that were secret and did not come along when this was pickled.
    """

    url: str
    protocol: str
    root: str
    options: Mapping[str, Any] = dataclasses.field(repr=False)
    settings: Settings
    withheld: tuple[str, ...] = ()

    def path(self, key: str) -> str:
        """Where an object is in that file system."""
        return f"{self.root}/{key}"

    @classmethod
    def parse(cls, url: str, options: Mapping[str, object] | None, withheld: tuple[str, ...] = ()) -> Place:
        """Reads a URL; imports the file system's package and connects to nothing.

        Raises:
            UnknownSchemeError: fsspec does not know the protocol, or its package is not installed.
            UsageError: the URL names no place, or holds a password; an option of ours is wrong.
        """
        scheme, separator, rest = url.partition("://")
        protocol = scheme.lower().removeprefix(PREFIX)
        if not separator or not rest.strip("/"):
            raise UsageError(f"{url!r} names no place", hint=f"write {protocol}://PLACE/PATH")
        user, at, _ = rest.partition("/")[0].rpartition("@")
        if at and ":" in user:
            raise UsageError(
                f"a password does not belong in the URL of a store ({scheme}://...)",
                hint="put it in [tiers.options], or where the file system's own package looks for it",
            )
        values: dict[str, Any] = dict(options or {})
        settings = Settings.of(values.pop("ckptstore", {}))
        made = file_system_class(protocol)
        plain = f"{protocol}://{rest}"
        root = str(made._strip_protocol(plain)).rstrip("/")
        if not root.strip("/"):
            raise UsageError(f"{url!r} names the whole file system", hint="give the store a path of its own")
        # What the options say goes before what the URL says: fsspec itself does it so.
        from_url = {
            name: value for name, value in made._get_kwargs_from_urls(plain).items() if value is not None
        }
        return cls(
            f"{scheme.lower()}://{rest.rstrip('/')}", protocol, root, from_url | values, settings, withheld
        )

    @property
    def in_bucket(self) -> bool:
        """Whether the root is a bucket (with a prefix) and not a directory."""
        return self.protocol in _BUCKETS

    @property
    def bucket(self) -> str:
        """What must be there: the bucket, or the root directory."""
        return self.root.strip("/").partition("/")[0] if self.in_bucket else self.root

    @property
    def writes(self) -> Writes:
        """How an object is made to appear whole or not at all."""
        if self.settings.writes != "auto":
            return self.settings.writes
        if self.protocol in ("file", "local"):
            return "local"
        return "whole" if self.in_bucket or self.protocol == "memory" else "move"

    @property
    def may_create(self) -> bool:
        """Whether create-if-absent is worth a probe."""
        if self.settings.create_if_absent == "auto":
            return self.writes == "local" or (self.writes == "whole" and self.protocol in _EXCLUSIVE)
        # A create in place shows parts of an object, and a crash would leave one at the key of a commit.
        return self.settings.create_if_absent and self.writes != "move"

    def portable(self) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        """(url, options without secrets, names of those left out): what a pickle may hold."""
        secret = tuple(sorted({*self.withheld, *(n for n, v in self.options.items() if is_secret(n, v))}))
        kept = {name: value for name, value in self.options.items() if name not in secret}
        return self.url, kept | {"ckptstore": dataclasses.asdict(self.settings)}, secret


def is_secret(name: str, value: object) -> bool:
    """Whether an option may hold a secret: by its name, or by the names inside of it."""
    if value is None or name in _NO_SECRETS or (name == "token" and value in _PLAIN_TOKENS):
        return False
    if _SECRET.search(name):
        return True
    return isinstance(value, Mapping) and any(is_secret(str(inner), held) for inner, held in value.items())


def file_system_class(protocol: str) -> Any:
    """The class for a protocol.

    Raises:
        UnknownSchemeError: it knows none, or what it needs is not installed.
    """
    try:
        found = fsspec.get_filesystem_class(protocol)
        if protocol in ("gs", "gcs"):
            # Over this one gcsfs puts a class with gRPC channels, for zonal buckets. These survive no fork,
            # and objects of such buckets can be seen before they are whole.
            found = importlib.import_module("gcsfs.core").GCSFileSystem
        return found
    except ImportError as error:
        raise UnknownSchemeError(
            f"fsspec cannot serve {protocol}://: {error}",
            hint="install the package that fsspec names for this protocol (docs/fsspec.md)",
        ) from error
    except ValueError as error:
        raise UnknownSchemeError(
            f"fsspec knows no protocol {protocol!r}", hint="see fsspec.available_protocols()"
        ) from error
