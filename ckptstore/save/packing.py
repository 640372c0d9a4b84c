"""Where captured pieces lie in blocks of memory: large ones page by page, small ones side by side."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from ckptstore.save.arena import PAGE_BYTES
from ckptstore.save.cut import Cut

LARGE_BYTES = 1 << 20
"""From this size a piece begins at a page, so that the disk can take it from there (O_DIRECT)."""

_GROUP_BYTES = 4 << 20
_OPEN_BLOCKS = 8  # looked at for a place; more would cost time and save little


@dataclasses.dataclass(slots=True)
class Unit:
    """Pieces that lie side by side and are copied together.

    Attributes:
        pieces: one large one, or small ones of one device and, on a device, of one dtype.
        device: a torch.device; None for what the CPU reads.
        block, offset: where it lies.
    """

    pieces: list[Cut]
    nbytes: int
    device: Any
    block: int = 0
    offset: int = 0


@dataclasses.dataclass(slots=True)
class Wave:
    """What is in memory at one time.

    Attributes:
        blocks: how many it takes.
    """

    units: list[Unit] = dataclasses.field(default_factory=list)
    blocks: int = 0

    @property
    def devices(self) -> set[Any]:
        """Of its pieces, without the CPU."""
        return {unit.device for unit in self.units if unit.device is not None}

    def pieces(self) -> list[Cut]:
        """All, in the order of the table: neighbours there are stored together."""
        pieces = [piece for unit in self.units for piece in unit.pieces]
        return sorted(pieces, key=operator.attrgetter("row"))


def taken_bytes(pieces: Sequence[Cut]) -> int:
    """Bytes of memory that `pieces` take, without what stays unused at the ends of blocks."""
    small = large = 0
    for piece in pieces:
        nbytes = piece.nbytes
        if nbytes < LARGE_BYTES:
            small += nbytes
        else:
            large += _pages(nbytes)
    return _pages(small) + large


def units_of(pieces: Sequence[Cut], block_bytes: int) -> list[Unit]:
    """Groups small pieces; no unit is larger than a block if no piece is."""
    units: list[Unit] = []
    groups: dict[Any, Unit] = {}
    limit = min(_GROUP_BYTES, block_bytes)
    key: Any
    for piece in pieces:
        nbytes = piece.nbytes
        key = device = None
        if piece.view is None and piece.tensor is not None:
            device = piece.tensor.device
            key = (device, piece.tensor.dtype)
        if nbytes >= LARGE_BYTES:
            units.append(Unit([piece], nbytes, device))
            continue
        group = groups.get(key)
        if group is None or group.nbytes + nbytes > limit:
            group = groups[key] = Unit([], 0, device)
            units.append(group)
        group.pieces.append(piece)
        group.nbytes += nbytes
    return units


def waves_of(units: Sequence[Unit], block_bytes: int, most_blocks: int | None = None) -> Iterator[Wave]:
    """Gives each unit its place, in their order: waves of at most `most_blocks` blocks, or one for all."""
    wave = Wave()
    left: dict[int, int] = {}  # block -> bytes left at its end
    for unit in units:
        need = _pages(unit.nbytes)
        block = next((number for number, room in left.items() if room >= need), None)
        if block is None:
            if wave.blocks == most_blocks:
                yield wave
                wave = Wave()
                left.clear()
            block = wave.blocks
            wave.blocks += 1
            left[block] = block_bytes
            if len(left) > _OPEN_BLOCKS:
                del left[min(left, key=left.__getitem__)]
        unit.block, unit.offset = block, block_bytes - left[block]
        left[block] -= need
        wave.units.append(unit)
    if wave.units:
        yield wave


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
