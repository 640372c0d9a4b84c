"""What tiers cost apart from time: bytes that move, requests, and memory."""

from __future__ import annotations

import collections
import multiprocessing
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckptstore
from benchmarks import states
from benchmarks.s3_server import S3Server, Traffic, counted
from benchmarks.tiers_places import COLD, RUN, change, change_share, save, two_tiers
from ckptstore.replicate.copying import BUDGET_BYTES, OTHER_BYTES

_MIB = 1 << 20
_UNCHANGED = 0.99
_SHAPES = (0.25, 1.0)
"""Sizes of the states of which requests are counted, as shares of the larger."""
KINDS = {
    "PUT": ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
    "HEAD": ("HeadObject", "HeadBucket"),
    "GET": ("GetObject",),
    "DELETE": ("DeleteObject", "DeleteObjects"),
    "LIST": ("ListObjectsV2", "ListParts", "ListMultipartUploads"),
}


@dataclass(frozen=True, slots=True)
class Moved:
    """The second of two checkpoints.

    Attributes:
        changed_share: of the bytes of the state.
        stored_share: of the bytes of the state, which the bucket grew by, tables and record included.
    """

    changed_share: float
    stored_share: float


def second_checkpoint(server: S3Server, folder: Path, state: states.State) -> Moved:
    """Two checkpoints are replicated, the second with 99 % of its bytes unchanged."""
    with server.bucket() as bucket:
        toml = two_tiers(folder / "second.toml", folder / "second", f"s3://{bucket}/store")
        with ckptstore.init(toml) as store:
            save(store, 1, state)
            store.replication.run([store.tier_named(COLD)])
            before = server.stored_bytes(bucket)
            share = change_share(state, 1 - _UNCHANGED)
            save(store, 2, state)
            store.replication.run([store.tier_named(COLD)])
            grown = server.stored_bytes(bucket) - before
    return Moved(share, grown / states.size_bytes(state))


@dataclass(frozen=True, slots=True)
class Counted:
    """Requests by kind of one operation, `objects` the chunks and packs that it put or had to get."""

    objects: int
    requests: Mapping[str, int]
    bytes_got: int

    @classmethod
    def of(cls, traffic: Traffic, objects: int) -> Counted:
        known = {name: kind for kind, names in KINDS.items() for name in names}
        by_kind: collections.Counter[str] = collections.Counter()
        for name, count in traffic.requests.items():
            by_kind[known.get(name, name)] += count
        return cls(objects, dict(by_kind), traffic.bytes_got)


@dataclass(frozen=True, slots=True)
class OneTensor:
    """One tensor read out of a checkpoint in a bucket.

    Attributes:
        bytes_got: of all objects, the tables of the checkpoint included.
        opening: requests to open the store, find the checkpoint and read its tables.
        reading: requests for the tensor itself.
    """

    name: str
    tensor_bytes: int
    checkpoint_bytes: int
    bytes_got: int
    table_bytes: int
    opening: Counted
    reading: Counted


def requests(
    server: S3Server, gib: float, seed: int
) -> tuple[dict[str, list[Counted]], OneTensor, dict[str, str]]:
    """On a store that has no other tier than a bucket: saves, restores, one tensor, and the formulas."""
    found: dict[str, list[Counted]] = {"save": [], "restore": []}
    for share in _SHAPES:
        state = states.adamw_state(gib * share, seed)
        with server.bucket() as bucket:
            url = f"s3://{bucket}/store"
            with ckptstore.init(url) as store:
                run = store.run(RUN)
                run.save(1, state, wait=True)  # opens the session, and finds out what the server can do
                change(state)
                with counted() as traffic:
                    run.save(2, state, wait=True)
                found["save"].append(Counted.of(traffic, traffic.objects_put))
                run.close()
            with ckptstore.open(url) as store:
                target = states.blank_like(state)
                checkpoint = store.checkpoint(f"{RUN}@latest")
                with counted() as traffic:
                    checkpoint.restore(target)
                found["restore"].append(Counted.of(traffic, len(checkpoint.contents.keys.sizes)))
                if states.differences(states.flat(state), states.flat(target)):
                    raise RuntimeError("the restore from the bucket is wrong")
            if share == _SHAPES[-1]:
                tensor = _one_tensor(url, state)
    return found, tensor, {what: formula(counts) for what, counts in found.items()}


def _one_tensor(url: str, state: states.State) -> OneTensor:
    with counted() as opening, ckptstore.open(url) as store:
        checkpoint = store.checkpoint(f"{RUN}@latest")
        tensors = checkpoint.tensors
        middle = sorted(tensors.values(), key=lambda each: each.nbytes)[-4]
        with counted() as reading:
            middle[:]
    return OneTensor(
        middle.name,
        middle.nbytes,
        states.size_bytes(state),
        reading.bytes_got,
        opening.bytes_got - reading.bytes_got,
        Counted.of(opening, 0),
        Counted.of(reading, 0),
    )


def formula(counts: Sequence[Counted]) -> str:
    """Requests as a line through the two sizes: `PUT = 1.00 N + 2, ...`, N the objects."""
    small, large = counts[0], counts[-1]
    spread = large.objects - small.objects
    parts = []
    for kind in sorted(set(small.requests) | set(large.requests), key=_place):
        first, last = small.requests.get(kind, 0), large.requests.get(kind, 0)
        each = (last - first) / spread if spread else 0.0
        rest = last - each * large.objects
        line = f"{each:.2f} N {'-' if rest < -0.005 else '+'} {abs(rest):.1f}" if each else f"{last}"
        parts.append(f"{kind} = {line}")
    return ", ".join(parts)


def _place(kind: str) -> int:
    return list(KINDS).index(kind) if kind in KINDS else len(KINDS)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process that replicates, beyond what it had before."""

    grown_bytes: int
    budget_bytes: int
    """What is lent and kept, and what threads and connections take besides."""


def memory(server: S3Server, folder: Path, state: states.State) -> Memory:
    """The peak of a new process that replicates one checkpoint."""
    with server.bucket() as bucket:
        toml = two_tiers(folder / "memory.toml", folder / "memory", f"s3://{bucket}/store")
        with ckptstore.init(toml) as store:
            save(store, 1, state)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            grown = pool.submit(replicate_and_measure, str(toml)).result()
    return Memory(grown, BUDGET_BYTES + OTHER_BYTES)


def replicate_and_measure(toml: str) -> int:
    """Replicates what is owed; by how many bytes the resident memory rose meanwhile, at its peak."""
    with ckptstore.open(toml) as store:
        store.refresh()
        cold = store.tier_named(COLD)
        store.replication.to(cold).owing()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        store.replication.run([cold])
        return _status("VmHWM") - before


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"the kernel tells no {field}")
    return int(found[1]) << 10


def lines(moved: Moved, found: Mapping[str, Sequence[Counted]], tensor: OneTensor) -> Iterable[str]:
    """For people."""
    yield "a second checkpoint, replicated to the bucket"
    yield f"  changed {moved.changed_share:.2%} of the bytes; the bucket grew by {moved.stored_share:.2%}"
    yield ""
    yield "one tensor out of a checkpoint that is only in the bucket"
    yield (
        f"  {tensor.tensor_bytes / _MIB:.2f} MiB of {tensor.checkpoint_bytes / _MIB:.0f}: "
        f"{tensor.bytes_got / _MIB:.2f} MiB got in {tensor.reading.requests.get('GET', 0)} GET; before it, "
        f"to open and to find it, {tensor.table_bytes / _MIB:.2f} MiB"
    )
    yield ""
    yield "requests, store in a bucket only, one rank, N objects"
    for what, counts in found.items():
        for each in counts:
            by_kind = ", ".join(f"{each.requests[kind]} {kind}" for kind in sorted(each.requests, key=_place))
            yield f"  {what:<8} N = {each.objects:>3}: {by_kind}"
        yield f"  {what:<8} {formula(counts)}"


def as_json(value: Any) -> Any:
    """Dataclasses within lists and dicts."""
    import dataclasses

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value
