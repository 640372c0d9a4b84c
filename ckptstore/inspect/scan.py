"""What lies in a tier that no record names, and what records name that is not there."""

from __future__ import annotations

import dataclasses

import numpy as np

from ckptstore.inspect.census import Census
from ckptstore.tier.tier import Tier

MAX_LISTED = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as listed."""

    key: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """The objects of a tier against what its records name.

    Attributes:
        objects, bytes: all that was listed under ``chunks/`` and ``packs/``.
        unaccounted, unaccounted_bytes: named by no record: what failed or killed saves left, what garbage
            collection is about to take, or a save under way.
        listed: the first 1,000 of them by key.
        unfinished, unfinished_bytes: temporary files of interrupted writes.
        missing, missing_bytes: named by a record, and not there or of another size: ``verify`` tells which.
    """

    objects: int
    bytes: int
    unaccounted: int
    unaccounted_bytes: int
    listed: tuple[StoredObject, ...]
    unfinished: int
    unfinished_bytes: int
    missing: int
    missing_bytes: int


def scan_tier(tier: Tier, census: Census) -> Scan:
    """Lists every object. What was written since the records were read counts as unaccounted.

    Raises:
        BackendError: the tier does not answer.
    """
    index = dict(zip(census.prints.tolist(), range(len(census.prints)), strict=True))
    sizes = census.sizes.tolist()
    seen = np.zeros(len(sizes), bool)
    objects = total = count = unaccounted_bytes = 0
    listed: list[StoredObject] = []
    for prefix in ("chunks/", "packs/"):
        for info in tier.listing(prefix):
            objects += 1
            total += info.size_bytes
            row = _row_of(census, index, info.key)
            if row is not None:
                seen[row] = sizes[row] == info.size_bytes
                continue
            count += 1
            unaccounted_bytes += info.size_bytes
            if len(listed) < MAX_LISTED:
                listed.append(StoredObject(info.key, info.size_bytes))
    unfinished = [info.size_bytes for info in tier.backend.list_temporaries("")]
    return Scan(
        objects=objects,
        bytes=total,
        unaccounted=count,
        unaccounted_bytes=unaccounted_bytes,
        listed=tuple(sorted(listed, key=lambda item: item.key)),
        unfinished=len(unfinished),
        unfinished_bytes=sum(unfinished),
        missing=int(np.count_nonzero(~seen)),
        missing_bytes=int(census.sizes[~seen].sum()),
    )


def _row_of(census: Census, index: dict[int, int], key: str) -> int | None:
    try:
        return index.get(census.print_of(key))
    except ValueError:
        return None  # somebody's own file
