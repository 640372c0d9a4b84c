"""What decides how ordinary tensors are stored, besides their address: of one, or of thousands at once."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Sequence
from typing import Any

Form = tuple[Any, ...]

_LOOKED_AT_ONCE = 256
"""So many tensors stay in a core's own cache while one thing after the other is asked of all of them."""

_is_cpu, _device, _dtype = map(operator.attrgetter, ("is_cpu", "device", "dtype"))


def form_of(tensor: Any) -> Form | None:
    """What decides how an ordinary tensor is stored, besides its address: equal forms are stored alike.

    Args:
        tensor: exactly a ``torch.Tensor`` or ``Parameter``, of no subclass.

    Returns:
        (dtype, shape, strides, conjugated, negated, device or None for the CPU). With the address it is the
        tensor's tie, as of :func:`ckptstore.arrays.describe`. None for what that one and
        :func:`ckptstore.arrays.composite_of` must look at.
    """
    is_cpu = tensor.is_cpu
    if tensor.is_nested or tensor.layout is not _torch().strided or not (is_cpu or tensor.is_cuda):
        return None
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
        None if is_cpu else tensor.device,
    )


@dataclasses.dataclass(slots=True)
class Memory:
    """Where ordinary tensors lie.

    Attributes:
        addresses: of the first element of each.
        storages: what holds the memory of each; `nbytes`: how much that is.
    """

    addresses: list[int] = dataclasses.field(default_factory=list)
    storages: list[Any] = dataclasses.field(default_factory=list)
    nbytes: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Forms:
    """The forms of many tensors as columns, which calls in C compare: in half the time of one by one.

    Attributes:
        strides: None if all are contiguous, for shapes then say the rest (but for sides of length 1, along
            which nobody strides).
        conjugated: None if none is, or can be: only complex tensors are.
        devices: None if all are on the CPU.
    """

    dtypes: list[Any]
    shapes: list[Any]
    strides: list[Any] | None
    conjugated: list[bool] | None
    negated: list[bool]
    devices: list[Any] | None

    @classmethod
    def of(cls, forms: Sequence[Form]) -> Forms:
        """Of tensors that have one each; none is empty."""
        dtypes, shapes, strides, conjugated, negated, devices = map(list, zip(*forms, strict=True))
        cpu = _torch().device("cpu")
        return cls(
            dtypes,
            shapes,
            None if all(map(_is_contiguous, shapes, strides)) else strides,
            conjugated if any(dtype.is_complex for dtype in dtypes) else None,
            negated,
            [device or cpu for device in devices] if any(devices) else None,
        )

    def memory_of(self, tensors: Sequence[Any]) -> Memory | None:
        """Where tensors lie, if they are of these forms, one each; else None.

        Args:
            tensors: as of :func:`form_of`, as many as there are forms.
        """
        kind = _torch().Tensor
        found = Memory()
        try:
            for start in range(0, len(tensors), _LOOKED_AT_ONCE):
                part = slice(start, start + _LOOKED_AT_ONCE)
                own = tensors[part]
                if not self._are_of(own, part):
                    return None
                storages = list(map(kind.untyped_storage, own))
                found.addresses += map(kind.data_ptr, own)
                found.storages += storages
                found.nbytes += map(len, storages)
        except RuntimeError:  # a nested one has no size, and what is not strided has no address
            return None
        return found

    def _are_of(self, tensors: Sequence[Any], part: slice) -> bool:
        kind = _torch().Tensor  # its functions take a tensor at half the price of a method call by name
        return (
            list(map(_dtype, tensors)) == self.dtypes[part]
            and list(map(kind.size, tensors)) == self.shapes[part]
            and list(map(kind.is_neg, tensors)) == self.negated[part]
            and (
                all(map(kind.is_contiguous, tensors))
                if self.strides is None
                else list(map(kind.stride, tensors)) == self.strides[part]
            )
            and (
                all(map(_is_cpu, tensors))
                if self.devices is None
                else list(map(_device, tensors)) == self.devices[part]
            )
            and (self.conjugated is None or list(map(kind.is_conj, tensors)) == self.conjugated[part])
        )


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _torch() -> Any:
    return sys.modules["torch"]
