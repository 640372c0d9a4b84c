"""boto3 and obstore, moving the objects of a checkpoint between a disk and a bucket as their users would.

Only the client differs: the disk is read and written through ckptstore's own backend for disks (O_DIRECT
where it can, every file and its directory synced), and BLAKE3 is ckptstore's. Checked: every chunk is hashed
when it was read from the disk, and when it arrived from the bucket. Raw: nothing is hashed.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from benchmarks.s3_server import REGION
from ckptstore.checkpoint import Checkpoint
from ckptstore.model.ids import Digest, digest_of
from ckptstore_local import LocalBackend

THREADS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk in an object."""

    offset: int
    length: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Object:
    """An object of a checkpoint: one chunk, or a pack of several."""

    key: str
    size: int
    pieces: tuple[Piece, ...]

    def check(self, content: memoryview) -> None:
        """That it is what was saved."""
        for piece in self.pieces:
            if digest_of(content[piece.offset : piece.offset + piece.length]) != piece.digest:
                raise ValueError(f"{self.key}: wrong bytes")


def objects_of(checkpoint: Checkpoint) -> list[Object]:
    """Its chunks and packs, the largest first."""
    contents = checkpoint.contents
    where, keys = contents.locations, contents.keys
    pieces: dict[int, set[Piece]] = {}
    rows = zip(
        where.object.tolist(), where.offset.tolist(), where.length.tolist(), contents.digests, strict=True
    )
    for number, offset, length, digest in rows:
        pieces.setdefault(number, set()).add(Piece(offset, length, digest))
    found = [
        Object(keys.key(number), int(keys.sizes[number]), tuple(sorted(own, key=lambda piece: piece.offset)))
        for number, own in pieces.items()
    ]
    return sorted(found, key=lambda each: each.size, reverse=True)


Put = Callable[[str, bytearray], object]
GetInto = Callable[[str, memoryview], None]


B = TypeVar("B", bytearray, mmap.mmap)


class _Kept(threading.local, Generic[B]):
    """A buffer of each thread, used again for objects of its size: memory touched before is quicker."""

    def __init__(self, make: Callable[[int], B]) -> None:
        self._make: Callable[[int], B] = make
        self._held: B | None = None

    def of(self, size: int) -> B:
        if self._held is None or len(self._held) != size:
            self._held = self._make(size)
        return self._held


class Peer:
    """One client with its options; `name` says which."""

    def __init__(self, client: str, call: str, threads: int) -> None:
        self.client, self.call, self.threads = client, call, threads

    @property
    def name(self) -> str:
        return f"{self.client} {self.call}, {self.threads} threads"

    def connect(self, bucket: str) -> tuple[Put, GetInto]:
        """How it puts and gets, in this bucket; it is given what was read as bytes, which it wants."""
        return (_boto3 if self.client == "boto3" else _obstore)(bucket, self.call, self.threads)

    def push(self, source: LocalBackend, objects: Sequence[Object], put: Put, *, check: bool) -> None:
        """From the disk to the bucket."""
        kept = _Kept(bytearray)

        def move(each: Object) -> None:
            content = kept.of(each.size)
            view = memoryview(content)
            source.read_into(each.key, 0, view)
            if check:
                each.check(view)
            put(each.key, content)

        self._all(move, objects)

    def fetch(
        self, objects: Sequence[Object], get_into: GetInto, target: LocalBackend, *, check: bool
    ) -> None:
        """From the bucket to the disk, durably."""
        kept = _Kept(lambda size: mmap.mmap(-1, size))  # page-aligned, as O_DIRECT wants it

        def move(each: Object) -> None:
            content = kept.of(each.size)
            view = memoryview(content)
            get_into(each.key, view)
            if check:
                each.check(view)
            target.put(each.key, [view])

        self._all(move, objects)
        target.sync()

    def restore(
        self, objects: Sequence[Object], get_into: GetInto, memory: memoryview, *, check: bool
    ) -> None:
        """From the bucket into memory that exists, end to end."""
        ends = itertools.accumulate(each.size for each in objects)
        starts = {each.key: end - each.size for each, end in zip(objects, ends, strict=True)}

        def move(each: Object) -> None:
            view = memory[starts[each.key] : starts[each.key] + each.size]
            get_into(each.key, view)
            if check:
                each.check(view)

        self._all(move, objects)

    def _all(self, move: Callable[[Object], None], objects: Sequence[Object]) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(move, objects))


CALLS = (
    ("boto3", "put_object"),
    ("boto3", "upload_fileobj"),
    ("obstore", "put"),
    ("obstore", "put in parts"),
)
"""What is tried in search of the best; `get` of either is a ranged one of the whole object."""


def candidates() -> list[Peer]:
    """Every client, call and thread count."""
    return [Peer(client, call, count) for client, call in CALLS for count in THREADS]


def _boto3(bucket: str, call: str, threads: int) -> tuple[Put, GetInto]:
    import boto3
    import boto3.s3.transfer
    import botocore.config

    config = botocore.config.Config(s3={"addressing_style": "path"}, max_pool_connections=4 * threads)
    client: Any = boto3.session.Session().client("s3", config=config)
    transfer = boto3.s3.transfer.TransferConfig(max_concurrency=threads)

    def put(key: str, content: bytearray) -> None:
        if call == "put_object":
            client.put_object(Bucket=bucket, Key=key, Body=content)
        else:
            client.upload_fileobj(io.BytesIO(content), bucket, key, Config=transfer)

    def get_into(key: str, view: memoryview) -> None:
        answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes=0-{len(view) - 1}")
        done = 0
        while done < len(view):
            count = answer["Body"].readinto(view[done : done + (1 << 20)])
            if not count:
                raise ValueError(f"{key}: it ends early")
            done += count
        answer["Body"].close()

    return put, get_into


def _obstore(bucket: str, call: str, threads: int) -> tuple[Put, GetInto]:
    import obstore
    import obstore.store

    store = obstore.store.S3Store(
        bucket,
        endpoint=os.environ["AWS_ENDPOINT_URL_S3"],
        access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region=REGION,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def put(key: str, content: bytearray) -> None:
        obstore.put(store, key, content, use_multipart=None if call == "put in parts" else False)

    def get_into(key: str, view: memoryview) -> None:
        view[:] = memoryview(obstore.get_range(store, key, start=0, end=len(view)))

    return put, get_into
