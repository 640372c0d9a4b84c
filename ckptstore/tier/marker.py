"""The marker ``ckptstore.json``: what makes a place a store, and which store it is.

The missing-mount rule rests on it: where the marker is absent or of another store, nothing is written.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from ckptstore.errors import DocumentError, FormatTooNewError, UsageError

FORMAT = 1
FEATURES: frozenset[str] = frozenset()
"""Features of the format that this release knows."""

MIN_CHUNK_BYTES = 1 << 10  # tests use small ones; `init` offers 1 to 64 MiB
MAX_CHUNK_BYTES = 64 << 20
DEFAULT_CHUNK_BYTES = 16 << 20
MAX_BYTES = 1 << 16

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclasses.dataclass(frozen=True, slots=True)
class Marker:
    """The marker's content.

    Attributes:
        features: names of format features in use beyond format 1's own.
    """

    store_uuid: str
    tier_uuid: str
    chunk_bytes: int
    features: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """JSON, one key per line: people open this file."""
        return (
            json.dumps(
                {
                    "format": FORMAT,
                    "what": "a tier of a ckptstore store (docs/format.md); do not delete this file",
                    "store_uuid": self.store_uuid,
                    "tier_uuid": self.tier_uuid,
                    "hash": "blake3-256",
                    "chunk_bytes": self.chunk_bytes,
                    "features": list(self.features),
                },
                indent=2,
            )
            + "\n"
        ).encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> Marker:
        """Reads it back.

        Raises:
            DocumentError: it is not a marker.
            FormatTooNewError: a format or feature of a later release.
        """
        try:
            body: Any = json.loads(data)
            number = body["format"]
            if number != FORMAT:
                if isinstance(number, int) and number > FORMAT:
                    raise FormatTooNewError(
                        f"the store at {where} has format {number}; this release knows up to {FORMAT}",
                        hint="upgrade ckptstore on this machine",
                    )
                raise ValueError("bad format number")
            marker = cls(
                body["store_uuid"],
                body["tier_uuid"],
                check_chunk_bytes(body["chunk_bytes"]),
                tuple(body["features"]),
            )
            if body["hash"] != "blake3-256" or not _UUID.fullmatch(marker.store_uuid):
                raise ValueError("bad hash name or uuid")
        except FormatTooNewError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DocumentError(
                f"the marker of the store at {where} ({error}) cannot be read",
                hint="restore ckptstore.json from another tier or a backup; nothing was changed",
            ) from error
        unknown = set(marker.features) - FEATURES
        if unknown:
            raise FormatTooNewError(
                f"the store at {where} uses {', '.join(sorted(map(str, unknown)))}, unknown to this release",
                hint="upgrade ckptstore on this machine",
            )
        return marker


def check_chunk_bytes(value: object) -> int:
    """A usable chunk size.

    Raises:
        UsageError: not a power of two in the allowed range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"chunk_bytes must be an int, not {type(value).__name__}")
    if not MIN_CHUNK_BYTES <= value <= MAX_CHUNK_BYTES or value & (value - 1):
        raise UsageError(
            f"chunk_bytes must be a power of two from 1 KiB to 64 MiB, not {value}",
            hint="the default is 16 MiB",
        )
    return value
