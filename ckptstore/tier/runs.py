"""Runs and their sessions (epochs) as documents in a tier."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ckptstore.errors import BackendError, BusyError, DocumentError, ObjectExistsError, WrongStoreError
from ckptstore.model.documents import Fields, decode_epoch, encode_epoch, seal, unseal
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import EpochDoc
from ckptstore.tier import layout
from ckptstore.tier.asking import ask
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

_TRIES = 20

MISSING_TIER_HINT = "wait for it, or train on without it: store.run(..., offline=True)"


def ensure_run(tier: Tier, run: str) -> str:
    """Makes the run's document if there is none; returns the run key."""
    run_key = run_key_of(run)
    key = layout.run_document(run_key)
    if not tier.exists(key):
        with contextlib.suppress(ObjectExistsError):  # another process made the same run just now
            tier.put_new(key, seal("run", {"run": run, "created_at": tier.environment.now()}))
    return run_key


def read_run(tier: Tier, run_key: str) -> tuple[str, float] | None:
    """(name, created at) of a run; None when it has no document.

    Raises:
        DocumentError, FormatTooNewError: it cannot be read.
    """
    key = layout.run_document(run_key)
    data = tier.read(key)
    if data is None:
        return None
    fields = Fields(unseal(data, "run", what=key)[1], key)
    name = fields.get("run", str)
    if run_key_of(name) != run_key:
        raise DocumentError(f"{key} names another run, {name[:60]!r}")
    return name, fields.number("created_at")


def epoch_numbers(tier: Tier, run_key: str) -> list[int]:
    """Numbers of all sessions of a run, ascending."""
    numbers = []
    for info in tier.listing(layout.epoch_prefix(run_key)):
        text = layout.stem(info.key)
        if text.isascii() and text.isdigit():
            numbers.append(int(text))
    return sorted(numbers)


def read_epoch(tier: Tier, run_key: str, number: int) -> EpochDoc | None:
    """One session; None when there is none of that number.

    Raises:
        DocumentError, FormatTooNewError: it cannot be read.
    """
    key = layout.epoch_key(run_key, number)
    data = tier.read(key)
    return None if data is None else decode_epoch(data, f"{key} at {tier.url}")


def open_epoch(
    tier: Tier,
    run: str,
    *,
    resumed_from: str | None,
    rewound: bool,
    session_key: str = "",
    exclusive: bool = False,
    others: Sequence[Tier] = (),
    offline: bool = False,
) -> EpochDoc:
    """Opens the run's next session: n = 1 + the highest there is in any tier, created if absent.

    The later opener takes over, so that a restart needs no human; whom it replaces is logged.

    Args:
        others: the store's other tiers: asked for sessions, and told of this one.
        offline: one of them that does not answer is left out: sessions that only it knows of are not seen.

    Raises:
        BusyError: `exclusive`, and the former holder is seen alive on this host.
        BackendError, WrongStoreError: a tier does not answer, or is not there, so that it is not known how
            many sessions there were.
    """
    environment = tier.environment
    run_key = ensure_run(tier, run)
    elsewhere = {other: _highest_elsewhere(other, run, offline=offline) for other in others}
    known = max((highest for highest in elsewhere.values() if highest is not None), default=0)
    for _ in range(_TRIES):
        number = 1 + max(known, *epoch_numbers(tier, run_key), 0)
        former = _former(tier, run_key, number - 1)
        if former is not None:
            alive = is_alive_here(former, environment.host, environment.boot_id)
            if exclusive and alive:
                raise BusyError(
                    f"run {run!r} is being trained by process {former.pid} on {former.host}",
                    hint="stop that process, or open without exclusive=True to take the run over",
                )
            log.info(
                "run %r: epoch %d takes over from epoch %d (process %d on %s%s)",
                run,
                number,
                former.number,
                former.pid,
                former.host,
                ", still alive" if alive and former.pid != environment.pid else "",
            )
        epoch = EpochDoc(
            run=run,
            number=number,
            session=environment.new_ulid(),
            host=environment.host,
            boot_id=environment.boot_id,
            pid=environment.pid,
            started_at=environment.now(),
            resumed_from=resumed_from,
            rewound=rewound,
            session_key=session_key,
        )
        try:
            tier.put_new(layout.epoch_key(run_key, number), encode_epoch(epoch))
        except ObjectExistsError:
            known = max(known, number)  # a listing may lag behind
            continue  # somebody opened this very number between the listing and now
        for other, highest in elsewhere.items():
            if highest is not None:
                _tell(other, epoch, run_key)
        return epoch
    raise BusyError(
        f"run {run!r}: other processes keep opening sessions", hint="let only one process train a run"
    )


def _highest_elsewhere(tier: Tier, run: str, *, offline: bool) -> int | None:
    """The highest number of a session there, 0 without one; None where it is not known and need not be."""

    def look() -> int:
        tier.check_marker()  # an empty mount point knows of no session either
        return max(epoch_numbers(tier, run_key_of(run)), default=0)

    try:
        return ask(tier.backend, tier.name, look)
    except (BackendError, WrongStoreError) as error:
        if not offline:
            raise type(error)(
                f"run {run!r}: no session can be opened while tier {tier.name!r} does not say which there "
                f"were: {error.message}",
                hint=MISSING_TIER_HINT,
            ) from error
        log.warning("run %r: tier %s is not asked for later sessions: %s", run, tier.name, error.message)
        return None


def _tell(tier: Tier, epoch: EpochDoc, run_key: str) -> None:
    """Writes a session down in a colder tier; where that fails, replication brings it."""

    def tell() -> None:
        ensure_run(tier, epoch.run)
        tier.put_new(layout.epoch_key(run_key, epoch.number), encode_epoch(epoch))

    try:
        ask(tier.backend, tier.name, tell)
    except BackendError as error:
        log.warning("tier %s does not know of epoch %d yet: %s", tier.name, epoch.number, error.message)


def wait_for_epoch(
    tier: Tier, run: str, is_it: Callable[[str], bool], wait: Callable[[], bool]
) -> EpochDoc | None:
    """The newest session whose session key `is_it`, opened by another rank; None when `wait` gives up.

    Args:
        wait: pauses a little; False when it has been long enough.
    """
    run_key = run_key_of(run)
    seen: set[int] = set()
    while True:
        for number in reversed(epoch_numbers(tier, run_key)):
            if number in seen:
                continue
            seen.add(number)
            try:
                epoch = read_epoch(tier, run_key, number)
            except DocumentError as error:
                log.warning("epoch %d cannot be read: %s", number, error.message)
                continue
            if epoch is not None and is_it(epoch.session_key):
                return epoch
        if not wait():
            return None


def _former(tier: Tier, run_key: str, number: int) -> EpochDoc | None:
    """The session before; only told about, so one that cannot be read does not stop the next."""
    try:
        return read_epoch(tier, run_key, number) if number > 0 else None
    except DocumentError as error:
        log.warning("the session before cannot be read: %s", error.message)
        return None


class OfProcess(Protocol):
    """A document that says which process wrote it."""

    @property
    def host(self) -> str: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def pid(self) -> int: ...


def is_alive_here(document: OfProcess, host: str, boot_id: str) -> bool:
    """Whether the process of a document, of a session say, can be seen running on this very host and boot."""
    if (document.host, document.boot_id) != (host, boot_id):
        return False
    try:
        with open(f"/proc/{document.pid}/stat", "rb") as file:
            # The state letter follows the last parenthesis of the command name.
            return file.read(4096).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
