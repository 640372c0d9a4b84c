"""Copying a state out of training's reach, in waves where the budget is smaller than the state."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, SaveFailedError
from ckptstore.save.arena import Arena, Block
from ckptstore.save.copying import copy_wave
from ckptstore.save.cut import Cut
from ckptstore.save.device import DeviceCopies
from ckptstore.save.packing import Wave, taken_bytes, units_of, waves_of

log = logging.getLogger("ckptstore")

_DEFERRED_BYTES = 16 << 10
_WAVES_OF_A_BUDGET = 4  # the next are copied while the first is written


class Waves:
    """Captured pieces on their way from the thread that captures to the one that writes.

    Iterating gives lists of pieces; the memory of one goes back to the arena when the next is asked for.
    It raises what the capture failed with, so that a part of a state never passes for the whole.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena
        self._waiting: collections.deque[tuple[Sequence[Cut], Sequence[Block]]] = collections.deque()
        self._held: Sequence[Block] = ()
        self._ended = False
        self._abandoned = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @classmethod
    def live(cls, pieces: Sequence[Cut]) -> Waves:
        """Of pieces that stay as they are until they are written: nothing is copied."""
        waves = cls()
        waves.put(pieces)
        waves.end()
        return waves

    @property
    def abandoned(self) -> bool:
        """Whether nobody will write what is put."""
        return self._abandoned

    def put(self, pieces: Sequence[Cut], blocks: Sequence[Block] = ()) -> None:
        """One wave, and the memory that holds it."""
        with self._changed:
            if not self._abandoned:
                self._waiting.append((pieces, blocks))
                self._changed.notify_all()
                return
        self._return(blocks)

    def end(self) -> None:
        """All has been put."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more will be put, and what was put is not all: who iterates gets this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Sequence[Cut]]:
        try:
            while (pieces := self._next()) is not None:
                yield pieces
                self._release()
        finally:
            self._release()

    def _next(self) -> Sequence[Cut] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._error or self._abandoned)
            if self._error is not None:
                raise self._error
            if self._abandoned:
                raise SaveFailedError("the save was given up while its state was captured")
            if not self._waiting:
                return None
            pieces, self._held = self._waiting.popleft()
            return pieces

    def abandon(self) -> None:
        """What was put and is put from now on is given back unwritten: the save has failed.

        Call it when no thread uses the pieces any more: what the writer holds is given back too.
        """
        with self._changed:
            self._abandoned = True
            blocks = [block for _, held in self._waiting for block in held]
            self._waiting.clear()
            self._changed.notify_all()
        self._return(blocks)
        self._release()
        if self._arena is not None:
            self._arena.give_back(())  # a capture that waits for memory looks again

    def _release(self) -> None:
        with self._changed:
            blocks, self._held = self._held, ()
        self._return(blocks)

    def _return(self, blocks: Sequence[Block]) -> None:
        if blocks and self._arena is not None:
            self._arena.give_back(blocks)


def room_for(pieces: Sequence[Cut]) -> int:
    """Bytes of memory that a capture of `pieces` takes."""
    return taken_bytes(pieces)


def capture(
    pieces: Sequence[Cut],
    arena: Arena,
    waves: Waves,
    *,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Copies all pieces; when it returns, their tensors may change.

    If the arena is smaller than the state, this waits for the writing of what came before.

    Args:
        started: called once, when the first wave is put and others follow: from then on someone must write
            what is put, or this waits for memory without end.
    """
    try:
        with arena.capturing:
            planned = _plan(pieces, arena)
            copies = DeviceCopies()
            copies.fork(_devices(planned))
            for wave in planned:
                blocks = arena.take(wave.blocks, lambda: waves.abandoned)
                if not blocks:
                    break
                _fill(wave, blocks, arena, copies)
                waves.put(wave.pieces(), blocks)
                if wave is planned[0] and len(planned) > 1:
                    started()
    except BaseException as error:
        waves.fail(_as_failure(error))
        raise
    waves.end()


class Capturing:
    """A capture of which a part may go on in the background.

    Attributes:
        deferred: whether one does; if not, all was copied before `begin` returned.
    """

    def __init__(self, *, deferred: bool) -> None:
        self.deferred = deferred
        self._done = threading.Event()
        if not deferred:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether the tensors may change: all is copied, or the copy has failed and so has the save."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the tensors may change; raises nothing, an error is the save's.

        Returns:
            False when the time is over first.
        """
        return self._done.wait(timeout)

    def finish(self) -> None:
        """The copier's word."""
        self._done.set()


def split(pieces: Sequence[Cut], storages: Collection[int]) -> tuple[list[Cut], list[Cut]]:
    """Divides pieces into those that are copied before `save` returns and those that may be copied later.

    Pieces under 16 KiB are always copied before: that takes less than to see to it later.

    Args:
        storages: data pointers of the storages whose tensors only an update changes.
    """
    now: list[Cut] = []
    later: list[Cut] = []
    for piece in pieces:
        tensor = piece.tensor
        deferrable = (
            piece.nbytes >= _DEFERRED_BYTES
            and tensor is not None
            and tensor.untyped_storage().data_ptr() in storages
        )
        (later if deferrable else now).append(piece)
    return now, later


def begin(
    pieces_now: Sequence[Cut],
    pieces_later: Sequence[Cut],
    arena: Arena,
    waves: Waves,
    *,
    started: Callable[[], None] = lambda: None,
    name_of: Callable[[Cut], str] | None = None,
    keep: Sequence[Any] = (),
) -> Capturing:
    """Copies `pieces_now`; starts a thread that copies `pieces_later`, which nothing may change until then.

    The memory for all is taken before this returns, so that the thread waits for nothing. If the budget is
    smaller than the state, all is copied before this returns, as :func:`capture` does.

    Args:
        started: as of :func:`capture`.
        name_of: what an error calls a piece whose tensor has been changed too early.
        keep: what keeps the memory under the pieces' views; it is held until all is copied.
    """
    everything = [*pieces_now, *pieces_later]
    deferred: list[Wave] = []
    if pieces_later:
        with arena.capturing:
            block_bytes = arena.fit(_largest(everything))
            at_once = _whole(pieces_now, block_bytes)
            deferred = _whole(pieces_later, block_bytes)
            count = sum(wave.blocks for wave in (*at_once, *deferred))
            if count <= arena.total_blocks:
                copies = DeviceCopies()
                copies.fork(_devices([*at_once, *deferred]))
                blocks = arena.take(count, lambda: waves.abandoned)
                return _begin(
                    at_once, deferred[0], blocks, arena, waves, copies, name_of=name_of or _name, keep=keep
                )
        log.info("capture_bytes holds no whole copy of the state: all of it is copied before save returns")
    capture(everything, arena, waves, started=started)
    return Capturing(deferred=False)


def _begin(
    at_once: Sequence[Wave],
    deferred: Wave,
    blocks: Sequence[Block],
    arena: Arena,
    waves: Waves,
    copies: DeviceCopies,
    *,
    name_of: Callable[[Cut], str],
    keep: Sequence[Any],
) -> Capturing:
    if not blocks:  # abandoned while it waited
        waves.end()
        return Capturing(deferred=False)
    first, second = blocks[: -deferred.blocks], blocks[-deferred.blocks :]
    capturing = Capturing(deferred=True)
    pieces = deferred.pieces()
    versions = [(piece.row, piece.tensor, _version(piece.tensor)) for piece in pieces]
    try:
        for wave in at_once:
            _fill(wave, first, arena, copies)
            waves.put(wave.pieces(), first)
    except BaseException as error:
        arena.give_back(second)
        waves.fail(_as_failure(error))
        raise

    def copy_later(_keep: Sequence[Any]) -> None:
        try:
            _fill(deferred, second, arena, copies)
            changed = {row for row, tensor, version in versions if _version(tensor) != version}
        except BaseException as error:  # noqa: BLE001 - the save fails with it; training goes on
            capturing.finish()
            waves.fail(_as_failure(error))
            return
        capturing.finish()
        if changed:
            arena.give_back(second)
            waves.fail(_changed_early([name_of(p) for p in pieces if p.row in changed]))
            return
        waves.put(pieces, second)
        waves.end()

    try:
        threading.Thread(target=copy_later, args=(keep,), name="ckptstore-capture", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down, or the system has no more threads
        copy_later(keep)
    return capturing


def _plan(pieces: Sequence[Cut], arena: Arena) -> list[Wave]:
    if not pieces:
        return []
    block_bytes = arena.fit(_largest(pieces))
    units = units_of(pieces, block_bytes)
    planned = list(waves_of(units, block_bytes))
    if planned[0].blocks > arena.total_blocks:
        planned = list(waves_of(units, block_bytes, max(arena.total_blocks // _WAVES_OF_A_BUDGET, 1)))
    return planned


def _whole(pieces: Sequence[Cut], block_bytes: int) -> list[Wave]:
    """All pieces in one wave; none if there are none."""
    return list(waves_of(units_of(pieces, block_bytes), block_bytes))


def _fill(wave: Wave, blocks: Sequence[Block], arena: Arena, copies: DeviceCopies) -> None:
    try:
        copy_wave(wave, blocks, copies)
    except BaseException:
        arena.give_back(blocks)
        raise


def _largest(pieces: Sequence[Cut]) -> int:
    return max([piece.nbytes for piece in pieces])


def _devices(planned: Sequence[Wave]) -> set[Any]:
    return {device for wave in planned for device in wave.devices}


def _version(tensor: Any) -> int | None:
    """Counts the changes in place of a tensor and its views; None for one that does not count (inference)."""
    try:
        version: int = tensor._version
    except RuntimeError:
        return None
    return version


def _name(piece: Cut) -> str:
    return f"a tensor of {piece.component} (chunk {piece.row})"


def _as_failure(error: BaseException) -> BaseException:
    """What the thread that writes is told."""
    if isinstance(error, CkptstoreError):
        return error
    failure = SaveFailedError(f"the state could not be captured: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _changed_early(names: Sequence[str]) -> SaveFailedError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return SaveFailedError(
        f"{', '.join(names[:4])}{more} changed while they were captured",
        hint='change tensors inside `with run.capture_lock():`, or save with capture="copy"',
    )
