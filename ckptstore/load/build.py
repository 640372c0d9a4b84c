"""New arrays for stored tensors, and values out of them once their bytes are in."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.load.plan import Want
from ckptstore.model.boxes import Box
from ckptstore.model.layout import Tensor
from ckptstore.model.plain import Composite
from ckptstore.model.targets import Opaque
from ckptstore.shards import MayDiffer, PerRank
from ckptstore.tier.contents import Contents

log = logging.getLogger("ckptstore")


class Builder:
    """Makes new objects for stored tensors; tied ones come back tied.

    Attributes:
        wants: to be fetched before :meth:`finish`.
    """

    def __init__(self, contents: Contents, *, device: Any = None, allow_pickle: bool = False) -> None:
        self._contents = contents
        self._device = device
        self._allow_pickle = allow_pickle
        self._made: dict[tuple[int, str, str | None], Any] = {}
        self.wants: list[Want] = []

    def tensor(self, index: int, kind: str, detail: str | None) -> Any:
        """A placeholder that :meth:`finish` replaces by the loaded object, or the array itself."""
        key = (index, kind, detail)
        if key not in self._made:
            tensor = self._contents.layout.tensors[index]
            raw = self._allocate(index, tensor, Box.whole(tensor.shape))
            made: Any = (
                arrays.from_raw(raw, kind, tensor.dtype, tensor.shape, detail)
                if kind in ("torch", "numpy")
                else Blob(raw, kind)
            )
            if kind == "torch" and self._device is not None:
                made = _Later(functools.partial(made.to, self._device))
            elif kind == "numpy" and detail is not None and detail.startswith(">"):
                made = _Later(functools.partial(arrays.in_byte_order, made, detail))
            self._made[key] = made
        return self._made[key]

    def box(self, index: int, box: Box, kind: str) -> Any:
        """A new array, torch or numpy, of a box of a stored tensor, filled by the fetch."""
        tensor = self._contents.layout.tensors[index]
        if box == Box.whole(tensor.shape):
            return self.tensor(index, kind, None)
        return arrays.from_raw(self._allocate(index, tensor, box), kind, tensor.dtype, box.sizes, None)

    def _allocate(self, index: int, tensor: Tensor, box: Box) -> npt.NDArray[Any]:
        raw = np.empty(box.numel * tensor.dtype.itemsize, np.uint8)
        if len(raw):
            view = raw.view(arrays.raw_dtype(tensor.dtype.itemsize)).reshape(box.sizes)
            self.wants.append(Want(index, box, view))
        return raw

    def finish(self, node: Any) -> Any:
        """The tree with everything that had to wait for its bytes put together."""
        if isinstance(node, (Blob, _Later)):
            return node.value()
        if isinstance(node, Composite):
            parts = {name: self.finish(part) for name, part in node.parts.items()}
            return self._composed(Composite(node.kind, node.head, parts))
        if isinstance(node, Opaque) and isinstance(node.payload, bytes):
            return self._unpickled(node)
        if isinstance(node, (PerRank, MayDiffer)):
            return dataclasses.replace(node, value=self.finish(node.value))
        return map_containers(node, self.finish)

    def _composed(self, composite: Composite) -> Any:
        made = arrays.rebuild_composite(composite)
        if isinstance(made, Composite):
            class_path = composite.head[0] if composite.kind == "subclass" else f"torch.{composite.head[0]}"
            reason = f"import {class_path.rpartition('.')[0]} first, then load again"
            log.warning("a %s comes back as its parts: %s", class_path, reason)
            return Opaque(class_path, reason, composite.parts)
        return made

    def _unpickled(self, opaque: Opaque) -> Any:
        if not self._allow_pickle:
            log.warning("a pickled %s was not loaded: %s", opaque.class_path, opaque.reason)
            return opaque
        try:
            return pickle.loads(opaque.payload)  # noqa: S301 - the caller asked for it on both sides
        except Exception as error:  # noqa: BLE001 - its class may be gone, or its __setstate__ may raise anything
            log.warning("a pickled %s cannot be rebuilt: %s", opaque.class_path, error)
            return Opaque(opaque.class_path, f"it cannot be rebuilt: {error}", opaque.payload)


class Blob:
    """Bytes or text that is stored as a tensor, until it is read."""

    def __init__(self, raw: npt.NDArray[np.uint8], kind: str) -> None:
        self._raw = raw
        self._kind = kind

    def value(self) -> bytes | bytearray | str:
        """The object it was."""
        if self._kind == "bytearray":
            return bytearray(self._raw.data)
        data = self._raw.tobytes()
        return data.decode("utf-8", "surrogatepass") if self._kind == "str" else data


class _Later:
    """An array that is made of another when its bytes are in: moved to a device, or swapped."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def value(self) -> Any:
        """What it becomes; once, so that tied arrays stay tied."""
        if self._made is None:
            self._made = self._make()
        return self._made


def map_containers(node: Any, call: Callable[[Any], Any]) -> Any:
    """A container of the same kind with `call` applied to its items; all else as it is."""
    if isinstance(node, dict):
        for key, item in node.items():
            made = call(item)
            if made is not item:
                node[key] = made
        return node
    if isinstance(node, (list, collections.deque)):
        for i, item in enumerate(node):
            node[i] = call(item)
        return node
    if type(node) is tuple:
        return tuple(call(item) for item in node)
    return node
