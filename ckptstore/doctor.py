"""Doctor: does a store work here, for this user, through the code that saves and loads use?

Every finding says what was looked at, what was found and what that means. Nothing of a checkpoint is
touched. What is written to try the place out has keys under ``doctor/``, where no part of the store ever
looks, and is deleted again, whatever happens in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from ckptstore import _version
from ckptstore.backend import Backend
from ckptstore.errors import CkptstoreError, ObjectExistsError, ObjectNotFoundError, PermissionDeniedError
from ckptstore.manifest import Manifest, place
from ckptstore.model.documents import END_LIMIT_BYTES
from ckptstore.model.record import CommitRecord, IntentDoc
from ckptstore.store import Store
from ckptstore.tier import commits, intents, layout
from ckptstore.tier.tier import Tier

Status = Literal["ok", "warn", "fail"]

PREFIX = "doctor/"
RACERS = 16
ROUND_TRIP_BYTES = (1 << 20) + 12_345
MAX_CLOCK_SECONDS = 5.0
SILENT_SECONDS = 15 * 60.0
MIN_FREE_BYTES = 1 << 30
MIN_FREE_INODES = 10_000
_DIRECT_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: of the probe; stable.
        status: "warn": it works, but a person should know; "fail": something does not work.
        found: what was seen.
        meaning: what follows from it, or what to do; empty where all is well.
    """

    name: str
    status: Status
    found: str
    meaning: str = ""


def examine_installation() -> Iterator[Finding]:
    """What is installed here. torch is not imported."""
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("ckptstore", "ok", f"{_version.__version__}, Python {platform.python_version()}, {system}")
    old = sqlite3.sqlite_version_info < (3, 37, 0)  # STRICT tables
    meaning = "the manifest needs SQLite 3.37: install a Python with a newer one" if old else ""
    yield Finding("sqlite", "fail" if old else "ok", sqlite3.sqlite_version, meaning)
    for name in ("blake3", "numpy", "msgpack"):
        yield Finding(name, "ok", importlib.metadata.version(name))
    yield _torch()


def _torch() -> Finding:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch", "ok", "not installed", "only TrainState needs it: pip install 'ckptstore[torch]'"
        )
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < (2, 6):
        return Finding("torch", "warn", version, "torch 2.6 or newer is what this release is tested with")
    return Finding("torch", "ok", version)


def examine(store: Store, *, write: bool = True) -> Iterator[Finding]:
    """Looks at a store, one finding after the other as they are made.

    Args:
        write: try writing, too; otherwise nothing in the store is changed, and no manifest is made.
    """
    tier = store.tier
    probes: list[Callable[[], Iterator[Finding]]] = [
        lambda: _marker(tier),
        lambda: _space(tier),
        lambda: _file_system(tier),
        lambda: _manifest(store, write=write),
        lambda: _records(tier),
        lambda: _intents(tier),
        lambda: _leftovers(tier),
    ]
    if write:
        probes.append(lambda: _writing(tier))
    for probe in probes:
        try:
            yield from probe()
        except CkptstoreError as error:
            yield Finding("probe", "fail", error.message, error.hint or "")
        except OSError as error:
            yield Finding("probe", "fail", str(error), "the file system did not answer")


# --- what is there ------------------------------------------------------------------------------------


def _marker(tier: Tier) -> Iterator[Finding]:
    tier.check_marker()
    marker = tier.marker
    yield Finding(
        "marker", "ok", f"store {marker.store_uuid} at {tier.url}, chunks up to {marker.chunk_bytes} bytes"
    )


def _space(tier: Tier) -> Iterator[Finding]:
    path = tier.backend.capabilities.local_path
    if path is None:
        return
    status = os.statvfs(path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    share = 100 * free // total if total else 0
    low = free < MIN_FREE_BYTES
    meaning = "saves will fail soon: free space, or use another disk" if low else ""
    yield Finding(
        "space", "warn" if low else "ok", f"{free >> 20} MiB free of {total >> 20} ({share} %)", meaning
    )
    if status.f_files:
        few = status.f_favail < MIN_FREE_INODES
        meaning = "a disk without free inodes takes no files, however much space it has" if few else ""
        yield Finding(
            "inodes", "warn" if few else "ok", f"{status.f_favail} free of {status.f_files}", meaning
        )
    else:
        yield Finding("inodes", "ok", "this file system makes them as needed")


def _file_system(tier: Tier) -> Iterator[Finding]:
    path = tier.backend.capabilities.local_path
    if path is None:
        return
    kind = place.network_file_system(Path(path), place.read_mounts(Path("/proc/self/mountinfo")))
    if kind is None:
        yield Finding("file system", "ok", "local")
        return
    meaning = (
        "it works when the probes below do; the manifest is kept elsewhere, since SQLite cannot lock here"
    )
    yield Finding("file system", "warn", f"network ({kind})", meaning)


def _manifest(store: Store, *, write: bool) -> Iterator[Finding]:
    if write:
        store.catalog.refresh()
        manifest = store.catalog.manifest
        manifest.check()
        if manifest.path is None:
            meaning = (
                "`ls` reads every record anew each time: set CKPTSTORE_MANIFEST to a writable local file"
            )
            yield Finding("manifest", "warn", "in memory: no place for a file may be written", meaning)
        else:
            yield Finding("manifest", "ok", str(manifest.path))
        return
    local = store.tier.backend.capabilities.local_path
    where = place.choose(None if local is None else Path(local), store.uuid)
    if where.path is None or not where.path.is_file():
        yield Finding("manifest", "ok", f"none yet ({where.why})", "the first `ls` makes it")
        return
    with Manifest.open(where.path, store_uuid=store.uuid, read_only=True) as manifest:
        manifest.check()
    yield Finding("manifest", "ok", str(where.path))


def _records(tier: Tier) -> Iterator[Finding]:
    good, bad = 0, []
    for run_key in tier.run_keys():
        for attempt, info in commits.list_commits(tier, run_key):
            if info.size_bytes < END_LIMIT_BYTES:
                continue  # a VOID or a GONE
            try:
                good += isinstance(commits.read_commit(tier, run_key, attempt), CommitRecord)
            except CkptstoreError as error:
                bad.append(f"{info.key}: {error.message}")
    if not bad:
        yield Finding("records", "ok", f"{good} readable")
    for text in bad:
        yield Finding(
            "records", "fail", text, "that checkpoint cannot be restored; `ckptstore verify` names all damage"
        )


# --- what was left behind -----------------------------------------------------------------------------


def _intents(tier: Tier) -> Iterator[Finding]:
    counts = {"pin": 0, "live": 0}
    dead: list[IntentDoc] = []
    for document in intents.list_intents(tier):
        if document.kind == "pin":
            counts["pin"] += 1
        elif _is_dead(tier, document):
            dead.append(document)
        else:
            counts["live"] += 1
    yield Finding("intents", "ok", f"{counts['live']} under way, {counts['pin']} pins")
    for document in dead:
        meaning = "its process was killed. Harmless: nothing it wrote counts, and collecting clears it away"
        who = f"process {document.pid} on {document.host}"
        yield Finding(
            "intents", "warn", f"a {document.kind} of run {document.run!r} by {who}, unfinished", meaning
        )


def _is_dead(tier: Tier, document: IntentDoc) -> bool:
    environment = tier.environment
    is_here = document.host == environment.host and os.path.isdir("/proc/self")
    if is_here and not os.path.isdir(f"/proc/{document.pid}"):
        return True
    last = document.created_at
    with contextlib.suppress(ObjectNotFoundError):  # it has not beaten yet
        last = max(last, tier.backend.head(layout.beat_key(document.attempt)).modified)
    return environment.now() - last > SILENT_SECONDS


def _leftovers(tier: Tier) -> Iterator[Finding]:
    now = tier.environment.now()
    old = [item for item in tier.backend.list_temporaries("") if now - item.modified > SILENT_SECONDS]
    if not old:
        yield Finding("leftovers", "ok", "none")
        return
    size = sum(item.size_bytes for item in old)
    meaning = "left by killed processes; harmless but for the space"
    yield Finding("leftovers", "warn", f"{len(old)} temporary files, {size >> 20} MiB", meaning)


# --- trying it out ------------------------------------------------------------------------------------


def _writing(tier: Tier) -> Iterator[Finding]:
    """Everything under one fresh name; deleted at the end, whatever happened."""
    name = f"{PREFIX}{tier.environment.new_ulid()}"
    try:
        try:
            tier.backend.put(f"{name}.first", [b"x"])
        except PermissionDeniedError as error:
            meaning = "loading and looking work, saving does not; `--no-write` leaves this out"
            yield Finding("write", "fail", error.message, meaning)
            return
        yield Finding("write", "ok", "allowed")
        yield _clock(tier, f"{name}.clock")
        yield _round_trip(tier.backend, f"{name}.bytes", tier.environment.random_bytes(ROUND_TRIP_BYTES))
        yield _race(tier.backend, f"{name}.race")
        yield _listing(tier.backend, name)
        yield from _direct(tier, name)
    finally:
        _clean(tier, name)


def _clean(tier: Tier, name: str) -> None:
    keys = [info.key for info in tier.backend.list(PREFIX) if info.key.startswith(name)]
    tier.backend.delete(keys)
    path = tier.backend.capabilities.local_path
    if path is not None:
        with contextlib.suppress(OSError):  # another doctor is at work, or it was never made
            os.rmdir(os.path.join(path, PREFIX))


def _clock(tier: Tier, key: str) -> Finding:
    before = tier.environment.now()
    tier.backend.put(key, [b"tick"])
    after = tier.environment.now()
    there = tier.backend.head(key).modified
    # File systems keep times of a tick (some 4 ms) ago, object stores whole seconds.
    offset = min(0.0, there - before + 1.0) + max(0.0, there - after)
    text = f"the store's clock and this machine's are {abs(offset):.1f} s apart"
    if abs(offset) > MAX_CLOCK_SECONDS:
        meaning = "no data is at risk; ages and grace periods are off by that much: set the clocks (NTP)"
        return Finding("clock", "warn", text, meaning)
    return Finding("clock", "ok", text)


def _round_trip(backend: Backend, key: str, data: bytes) -> Finding:
    backend.put(key, [data[:4097], memoryview(data)[4097:]])
    backend.sync()
    middle = bytearray(len(data) // 3)
    backend.read_into(key, 1001, memoryview(middle))
    exact = (
        backend.get(key, max_bytes=len(data)) == data
        and backend.head(key).size_bytes == len(data)
        and middle == data[1001 : 1001 + len(middle)]
    )
    if exact:
        return Finding("round trip", "ok", f"{len(data)} bytes came back exact")
    return Finding("round trip", "fail", "other bytes came back than were written", "do not use this place")


def _race(backend: Backend, key: str) -> Finding:
    """Threads that create one key at once: one must win, and its bytes must stay."""
    barrier = threading.Barrier(RACERS)
    won: list[int] = []
    failures: list[str] = []

    def create(number: int) -> None:
        barrier.wait()
        try:
            backend.put(key, [f"racer {number}".encode()], if_absent=True)
        except ObjectExistsError:
            return
        except CkptstoreError as error:
            failures.append(error.message)
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        return Finding("create if absent", "fail", failures[0], "one writer at a time only")
    if len(won) != 1 or backend.get(key, max_bytes=100) != f"racer {won[0]}".encode():
        text = f"{len(won)} of {RACERS} threads were told that they had created the same object"
        return Finding(
            "create if absent", "fail", text, "two trainings could take one run over: use another place"
        )
    if not backend.capabilities.create_if_absent:
        return Finding("create if absent", "warn", "not promised here", "one writer at a time only")
    return Finding("create if absent", "ok", f"one of {RACERS} threads won")


def _listing(backend: Backend, name: str) -> Finding:
    keys = [f"{name}.list{number}" for number in range(8)]
    for key in keys:
        backend.put(key, [b"x"])
    there = {info.key for info in backend.list(PREFIX)}
    backend.delete(keys[::2])
    after = {info.key for info in backend.list(PREFIX)}
    if set(keys) <= there and after & set(keys) == set(keys[1::2]):
        return Finding("listing", "ok", "shows what was written, and not what was deleted")
    meaning = "a checkpoint could be overlooked: use another place"
    return Finding("listing", "fail", "it lags behind writes or deletes", meaning)


def _direct(tier: Tier, name: str) -> Iterator[Finding]:
    """O_DIRECT, in a file that counts as a temporary one should this process die now."""
    path = tier.backend.capabilities.local_path
    if path is None:
        return
    import mmap

    flag = getattr(os, "O_DIRECT", 0)
    base = os.path.basename(name)
    file = os.path.join(path, PREFIX, f".{base}.direct.{os.urandom(8).hex()}.tmp")
    buffer = mmap.mmap(-1, _DIRECT_BYTES)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600)
        try:
            works = bool(flag) and os.write(descriptor, buffer) == _DIRECT_BYTES
        finally:
            os.close(descriptor)
    except OSError:
        works = False
    finally:
        buffer.close()
        Path(file).unlink(missing_ok=True)
    if works:
        yield Finding("direct I/O", "ok", "works")
    else:
        meaning = "saves go through the page cache: right, but slower"
        yield Finding("direct I/O", "warn" if sys.platform == "linux" else "ok", "not here", meaning)
