"""What decides how ordinary tensors are stored, besides their address: of one, or of thousands at once."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Sequence
from typing import Any

Form = tuple[Any, ...]

_is_cpu, _device, _layout, _dtype = map(operator.attrgetter, ("is_cpu", "device", "layout", "dtype"))


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

    def are_of(self, tensors: Sequence[Any]) -> bool:
        """Whether as many tensors as there are forms are of these, one each.

        Args:
            tensors: as of :func:`form_of`.
        """
        kind = _torch().Tensor  # its functions take a tensor at half the price of a method call by name
        try:
            return (
                list(map(_dtype, tensors)) == self.dtypes
                and list(map(kind.size, tensors)) == self.shapes
                and list(map(kind.is_neg, tensors)) == self.negated
                and {_torch().strided}.issuperset(map(_layout, tensors))
                and (
                    all(map(kind.is_contiguous, tensors))
                    if self.strides is None
                    else list(map(kind.stride, tensors)) == self.strides
                )
                and (
                    all(map(_is_cpu, tensors))
                    if self.devices is None
                    else list(map(_device, tensors)) == self.devices
                )
                and (self.conjugated is None or list(map(kind.is_conj, tensors)) == self.conjugated)
            )
        except RuntimeError:  # a nested one has no size
            return False


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _torch() -> Any:
    return sys.modules["torch"]
