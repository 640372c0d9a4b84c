"""Memory that captured states are kept in until they are written: allocated once, and reused.

Touching memory for the first time is ten times slower than copying into it, so it is kept from save to
save and can be touched ahead. It is handed out in blocks of one size, so states of any sizes may follow one
another: nothing is ever too small to be reused, and nothing is allocated beyond the budget.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UsageError
from ckptstore.memory import pages
from ckptstore.save import free_memory, pinned

log = logging.getLogger("ckptstore")

PAGE_BYTES = 4096
MIN_BUDGET_BYTES = 1 << 20
"""The least that a caller may give; one chunk must fit, so a budget below that is raised to it."""

_BLOCK_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
_BLOCKS_OF_A_SMALL_BUDGET = 8
_SHARE_OF_FREE = 0.4
_LEAST_DEFAULT_BYTES = 64 << 20

Bytes = npt.NDArray[np.uint8]


def default_capture_bytes(local_ranks: int | None = None) -> int:
    """Two fifths of the memory that is free now, divided among the ranks of this host; at least 64 MiB.

    Free is what the host has available, or what the cgroup limit (v1 or v2) leaves if that is less.

    Args:
        local_ranks: how many ranks share the host; from the launcher's environment if not given.
    """
    ranks = free_memory.local_ranks() if local_ranks is None else max(local_ranks, 1)
    return max(int(free_memory.free_bytes() * _SHARE_OF_FREE) // ranks, _LEAST_DEFAULT_BYTES)


class Block:
    """Page-aligned memory.

    Attributes:
        array: uint8, (block bytes,).
        touched_bytes: from its start, what the system has given for sure.
    """

    def __init__(self, nbytes: int) -> None:
        self.array: Bytes = np.frombuffer(pages(nbytes), np.uint8)
        self.touched_bytes = 0
        self._registration: pinned.Registration | None = None

    def touch(self, nbytes: int) -> None:
        """Makes the system give the first `nbytes` now rather than when training waits for them."""
        self.array[self.touched_bytes : nbytes : PAGE_BYTES] = 0
        self.touched_bytes = max(self.touched_bytes, nbytes)

    def pin(self) -> None:
        """Locks it for CUDA, so that a device copies into it at full speed; once."""
        if self._registration is None:
            self._registration = pinned.Registration(self.array)
            self.touched_bytes = len(self.array)

    def close(self) -> None:
        """Unlocks it; the memory itself goes when no view of it is left."""
        if self._registration is not None:
            self._registration.close()
            self._registration = None


class Arena:
    """Blocks under one budget.

    Attributes:
        capturing: held by whoever takes blocks in several goes, so that two such never wait for each other.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < MIN_BUDGET_BYTES:
            raise UsageError(
                f"capture_bytes={budget_bytes} is too little to capture anything",
                hint=f"give at least {MIN_BUDGET_BYTES}, better twice the bytes of the state",
            )
        self.capturing = threading.Lock()
        self._budget_bytes = budget_bytes
        self._block_bytes = _block_size(budget_bytes)
        self._blocks: list[Block] = []  # all there are; those first that are used first
        self._free: set[Block] = set()
        self._changed = threading.Condition()

    @property
    def budget_bytes(self) -> int:
        """What all captures may hold together."""
        return self._budget_bytes

    @property
    def block_bytes(self) -> int:
        """Of each block: 64 MiB, less for a budget under half a GiB."""
        return self._block_bytes

    @property
    def total_blocks(self) -> int:
        """As many as the budget allows."""
        return max(self._budget_bytes // self._block_bytes, 1)

    @property
    def allocated_bytes(self) -> int:
        """All memory that it holds, in use or kept (what was never touched takes none yet)."""
        with self._changed:
            return sum(len(block.array) for block in self._blocks)

    @property
    def used_bytes(self) -> int:
        """Of that, what captures hold now."""
        with self._changed:
            return sum(len(block.array) for block in self._blocks if block not in self._free)

    def has_room(self, nbytes: int) -> bool:
        """Whether a capture of `nbytes` need not wait."""
        with self._changed:
            wanted = min(-(-nbytes // self._block_bytes), self.total_blocks)
            return wanted <= self._available()

    def fit(self, piece_bytes: int) -> int:
        """Makes blocks that hold a piece of `piece_bytes`; waits for those in use if they do not.

        A budget that is less than one such block is raised to it, with a warning.

        Returns:
            `block_bytes`.
        """
        wanted = -(-piece_bytes // PAGE_BYTES) * PAGE_BYTES
        with self._changed:
            if wanted > self._block_bytes:
                self._changed.wait_for(lambda: len(self._free) == len(self._blocks))
                self._drop_free()
                self._block_bytes = wanted
                if wanted > self._budget_bytes:
                    log.warning(
                        "capture_bytes=%d does not hold one chunk: %d bytes are used",
                        self._budget_bytes,
                        wanted,
                    )
                    self._budget_bytes = wanted
            return self._block_bytes

    def take(self, count: int, cancelled: Callable[[], bool] = lambda: False) -> list[Block]:
        """`count` blocks, those first that are touched; waits until so many are free.

        Args:
            count: at most `total_blocks`.
            cancelled: asked whenever something changes; once true, no block is given.
        """
        with self._changed:
            self._changed.wait_for(lambda: count <= self._available() or cancelled())
            if cancelled():
                return []
            blocks = [block for block in self._blocks if block in self._free][:count]
            while len(blocks) < count:
                blocks.append(self._new())
            self._free.difference_update(blocks)
            return blocks

    def give_back(self, blocks: Sequence[Block]) -> None:
        """The end of their use; they are kept for the next capture."""
        with self._changed:
            self._free.update(blocks)
            self._changed.notify_all()

    def prepare(self, nbytes: int, count: int, *, pin: bool | None = None) -> None:
        """Allocates and touches what `count` captures of `nbytes` need, as far as the budget goes.

        A capture may begin meanwhile; it waits for one block at most.

        Args:
            nbytes: of one capture.
            count: how many may be in flight.
            pin: lock it for CUDA too; if not given, when this process uses CUDA.
        """
        pin = pinned.cuda_in_use() if pin is None else pin
        full, rest = divmod(nbytes, self._block_bytes)
        of_each = [self._block_bytes] * full + [rest] * bool(rest)
        for number, wanted in enumerate((of_each * count)[: self.total_blocks]):
            block = self._reserve(number)
            if block is not None:
                try:
                    block.touch(wanted)
                    if pin:
                        block.pin()
                finally:
                    self.give_back([block])

    def release(self) -> None:
        """Gives all memory that is not in use back to the system."""
        with self._changed:
            self._drop_free()

    def _reserve(self, number: int) -> Block | None:
        """The block of this number, new if need be; None if it is in use."""
        with self._changed:
            if number >= len(self._blocks):
                if len(self._blocks) >= self.total_blocks:
                    return None
                self._new()
                number = len(self._blocks) - 1
            elif self._blocks[number] not in self._free:
                return None
            block = self._blocks[number]
            self._free.discard(block)
            return block

    def _available(self) -> int:
        return self.total_blocks - len(self._blocks) + len(self._free)

    def _new(self) -> Block:
        block = Block(self._block_bytes)
        self._blocks.append(block)
        return block

    def _drop_free(self) -> None:
        for block in self._free:
            block.close()
        self._blocks = [block for block in self._blocks if block not in self._free]
        self._free.clear()


def _block_size(budget_bytes: int) -> int:
    size = min(_BLOCK_BYTES, budget_bytes // _BLOCKS_OF_A_SMALL_BUDGET)
    unit = _HUGE_PAGE_BYTES if size >= _HUGE_PAGE_BYTES else PAGE_BYTES
    return size // unit * unit
