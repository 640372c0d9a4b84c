"""Copies from devices (CUDA and others) into captured memory. torch is never imported here.

A CUDA copy goes over a stream of its own, which first waits for all that training has given its stream
before the save; training's stream never waits. Small tensors are put side by side on the device, so that
one transfer takes them all. Other devices are copied synchronously by the same code.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.model.boxes import Shape
from ckptstore.model.dtypes import DType

if TYPE_CHECKING:
    from ckptstore.save.cut import Piece

Bytes = npt.NDArray[np.uint8]


class Streams(Protocol):
    """Order between what training has given a device and the copies; what a test puts a fake for."""

    def fork(self, device: Any) -> None:
        """Copies from here on see what the calling thread has given the device so far."""

    def copying(self, device: Any) -> contextlib.AbstractContextManager[Any]:
        """What is started inside is a copy."""

    def join(self, device: Any) -> None:
        """Waits until all copies have arrived."""


class CudaStreams:
    """One copy stream per device of this process."""

    def __init__(self, cuda: Any) -> None:
        """Makes none yet.

        Args:
            cuda: ``torch.cuda``, or what stands for it: current_stream, Stream, Event, stream.
        """
        self._cuda = cuda
        self._streams: dict[Any, Any] = {}

    def fork(self, device: Any) -> None:
        if device not in self._streams:
            self._streams[device] = self._cuda.Stream(device=device)
        self._streams[device].wait_stream(self._cuda.current_stream(device))

    def copying(self, device: Any) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._cuda.stream(self._streams[device])
        return context

    def join(self, device: Any) -> None:
        arrived = self._cuda.Event(blocking=True)  # the waiting thread leaves the core to others
        arrived.record(self._streams[device])
        arrived.synchronize()


class NoStreams:
    """For devices whose copies are synchronous."""

    def fork(self, device: Any) -> None:
        """Nothing to order."""

    def copying(self, device: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def join(self, device: Any) -> None:
        """Nothing to wait for."""


@functools.cache
def streams_of(kind: str) -> Streams:
    """The streams of a kind of device ("cuda" has some, all others none), the same for all captures."""
    return CudaStreams(sys.modules["torch"].cuda) if kind == "cuda" else NoStreams()


class DeviceCopies:
    """The copies of one capture."""

    def __init__(self, streams: Callable[[str], Streams] | None = None) -> None:
        self._streams = streams or streams_of

    def fork(self, devices: Collection[Any]) -> None:
        """Call it in the thread that trains, before anything changes: this moment's tensors are copied."""
        for device in devices:
            self._streams(device.type).fork(device)

    def copy(self, pieces: Sequence[Piece], target: Bytes) -> None:
        """Starts copying pieces of one device and dtype, one after another in memory.

        Args:
            pieces: the caller keeps their tensors until `join` returns.
            target: uint8, (all their bytes,); on CUDA pinned, or the copy is slower and waited for.
        """
        torch = sys.modules["torch"]
        tensors = [piece.tensor for piece in pieces]
        device = tensors[0].device
        with self._streams(device.type).copying(device), torch.no_grad():
            torch.from_numpy(target).copy_(_side_by_side(pieces), non_blocking=device.type == "cuda")

    def join(self, devices: Collection[Any]) -> None:
        """Waits until all that was started has arrived."""
        for device in devices:
            self._streams(device.type).join(device)


class DeviceReads:
    """Reads device tensors that nothing changes meanwhile, piece by piece, from any thread."""

    def __init__(self, streams: Callable[[str], Streams] | None = None) -> None:
        self._streams = streams or streams_of
        self._forked: set[Any] = set()

    def lazy(self, tensor: Any, dtype: DType, shape: Shape) -> arrays.LazyArray:
        """A device tensor as an array whose bytes are fetched when they are asked for."""
        if tensor.device not in self._forked:
            self._streams(tensor.device.type).fork(tensor.device)
            self._forked.add(tensor.device)
        return arrays.LazyArray(dtype, shape, "torch", None, functools.partial(self._read, tensor))

    def _read(self, tensor: Any, start: int, stop: int) -> memoryview:
        with self._streams(tensor.device.type).copying(tensor.device):
            return memoryview(flat_bytes(tensor, start, stop).cpu().numpy())


def is_fetched(value: Any) -> bool:
    """Whether it is a torch tensor whose bytes must be made: on a device, or laid out otherwise.

    They are made chunk by chunk: a whole copy would be memory beyond any budget.
    """
    return arrays.is_torch_tensor(value) and not (
        value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
    )


def flat_bytes(tensor: Any, start: int, stop: int) -> Any:
    """Bytes `start` to `stop` of a tensor's elements in row-major order: uint8, (stop - start,), same device.

    A view where the memory is laid out so; else a copy of the rows that hold them.
    """
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    size = tensor.element_size()
    first, count = start // size, (stop - start) // size
    if not tensor.is_contiguous():
        while tensor.shape[0] == 1:  # then a row is less than all
            tensor = tensor[0]
        row = tensor.numel() // tensor.shape[0]
        begin = first // row
        tensor = tensor[begin : -(-(first + count) // row)]
        first -= begin * row
        if not (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.contiguous()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a single element may keep any stride there.
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + first).view(torch.uint8)


def _side_by_side(pieces: Sequence[Piece]) -> Any:
    """The bytes of several pieces of one dtype, joined on their device."""
    torch = sys.modules["torch"]
    if len(pieces) == 1:
        return flat_bytes(pieces[0].tensor, pieces[0].start, pieces[0].start + pieces[0].nbytes)
    if all(piece.nbytes == piece.tensor.nbytes and piece.tensor.is_contiguous() for piece in pieces):
        # One call each instead of six: there may be ten thousand of them.
        parts = [piece.tensor.view(-1) for piece in pieces]
        if parts[0].dtype.itemsize in (2, 4, 8) and not parts[0].is_complex():
            return torch.cat(parts).view(torch.uint8)
    return torch.cat([flat_bytes(piece.tensor, piece.start, piece.start + piece.nbytes) for piece in pieces])
