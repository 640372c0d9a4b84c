"""Names that never collide: ULIDs, attempt ids, run keys, digests and object keys.

Pure: time and randomness are arguments.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NewType, cast

import blake3
import numpy as np

from ckptstore.errors import UsageError

Digest = NewType("Digest", bytes)
"""BLAKE3-256 of raw bytes, 32 bytes."""

DIGEST_BYTES = 32
MAX_STEP = 2**63 - 1

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ATTEMPT = re.compile(r"([0-9A-HJKMNP-TV-Z]{26})-(-?[0-9]{1,19})-([0-9]{1,10})")
_OBJECT_KEY = re.compile(
    r"(chunks|packs)/([0-9a-f]{2})/(\2[0-9a-f]{62})\.([0-9A-HJKMNP-TV-Z]{26}-(?:-?[0-9]{1,19})-[0-9]{1,10})\.([0-9]{1,10})"
)
_OBJECT_KEYS = re.compile(rf"^{_OBJECT_KEY.pattern}$", re.MULTILINE)
_SLUG_DROP = re.compile(r"[^a-z0-9]+")
_finish = cast(Callable[[Any], Digest], blake3.blake3.digest)


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    """BLAKE3-256 of `data`."""
    return Digest(blake3.blake3(data).digest())


def digests_of(parts: Iterable[bytes | memoryview]) -> list[Digest]:
    """BLAKE3-256 of each: of thousands of small ones in less time than one by one."""
    return list(map(_finish, map(blake3.blake3, parts)))


def ulid(milliseconds: int, randomness: bytes) -> str:
    """A ULID (26 characters, Crockford base 32): 48 bits of time, 80 bits of randomness.

    Source: https://github.com/ulid/spec. Here it only ever breaks ties and makes names unique.
    """
    value = (milliseconds & (2**48 - 1)) << 80 | int.from_bytes(randomness[:10], "big")
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -5, -5))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One try to write one checkpoint into one tier: ``<session ulid>-<step>-<try>``."""

    session: str
    step: int
    number: int

    def __str__(self) -> str:
        return f"{self.session}-{self.step}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> Attempt:
        """Reads an attempt id back; raises ValueError when it is none."""
        match = _ATTEMPT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an attempt id: {text[:80]!r}")
        return cls(match[1], int(match[2]), int(match[3]))


def run_key(name: str) -> str:
    """The path segment for a run: a readable slug plus 16 hex digits of the name's BLAKE3.

    The digest alone identifies it; the slug is for people who look at the bucket.
    """
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    slug = _SLUG_DROP.sub("-", ascii_name).strip("-")[:40].strip("-") or "run"
    return f"{slug}-{digest_of(name.encode('utf-8', 'surrogatepass')).hex()[:16]}"


def check_name(what: str, name: object) -> str:
    """A usable run, tag or metric name: a non-empty str of at most 1,000 characters without NUL.

    Raises:
        UsageError: names what is wrong with it.
    """
    if not isinstance(name, str):
        raise UsageError(f"{what} must be a str, not {type(name).__name__}")
    if not name or len(name) > 1000 or "\0" in name:
        raise UsageError(f"{what} must have 1 to 1,000 characters and no NUL, got {name[:60]!r}")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} {name[:60]!r} is not valid Unicode text") from error
    return name


def check_step(step: object) -> int:
    """A step as a plain int; bool, float and what does not fit 64 bits are refused.

    Raises:
        UsageError: with the remedy.
    """
    dtype = str(getattr(step, "dtype", ""))  # of a numpy integer or a torch tensor with one
    whole = isinstance(step, (int, np.integer)) or (getattr(step, "ndim", 1) == 0 and "int" in dtype)
    if isinstance(step, bool) or not whole:
        raise UsageError(
            f"step must be an int, not {type(step).__name__} ({step!r:.60})", hint="pass int(step)"
        )
    value: int = int(step)  # type: ignore[call-overload]
    if not -MAX_STEP - 1 <= value <= MAX_STEP:
        raise UsageError(f"step {value} does not fit in 64 bits")
    return value


def chunk_key(digest: Digest, attempt: str, rank: int) -> str:
    """Key of one large chunk; written once, by one rank of one attempt."""
    text = digest.hex()
    return f"chunks/{text[:2]}/{text}.{attempt}.{rank}"


def pack_key(digest: Digest, attempt: str, rank: int) -> str:
    """Key of a pack; `digest` is over the digests of its chunks in order."""
    text = digest.hex()
    return f"packs/{text[:2]}/{text}.{attempt}.{rank}"


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectName:
    """The parts of a chunk or pack key."""

    is_pack: bool
    digest: Digest
    attempt: str
    rank: int

    @classmethod
    def parse(cls, key: str) -> ObjectName:
        """Reads a key back; raises ValueError when it is not one of ours."""
        match = _OBJECT_KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"not an object key: {key[:120]!r}")
        return cls(match[1] == "packs", Digest(bytes.fromhex(match[3])), match[4], int(match[5]))

    @property
    def key(self) -> str:
        make = pack_key if self.is_pack else chunk_key
        return make(self.digest, self.attempt, self.rank)


def split_object_keys(keys: Sequence[str]) -> tuple[list[bool], bytes, list[str], list[int]]:
    """As of :meth:`ObjectName.parse`, of many: whether each is a pack, digests end to end, attempts, ranks.

    Raises:
        ValueError: one is not one of ours.
    """
    text = "\n".join(keys)
    found = _OBJECT_KEYS.findall(text)
    if len(found) != len(keys) or text.count("\n") >= max(len(keys), 1):
        for key in keys:
            ObjectName.parse(key)  # says which it is
    if not found:
        return [], b"", [], []
    kinds, _, digests, attempts, ranks = zip(*found, strict=True)
    is_pack = [kind == "packs" for kind in kinds]
    return is_pack, bytes.fromhex("".join(digests)), list(attempts), list(map(int, ranks))
