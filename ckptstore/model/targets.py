"""How a state says what it wants from a checkpoint: sentinels and specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final


class _Load:
    """Type of :data:`LOAD`; a class of its own so that it prints well and survives pickling."""

    _only: _Load | None = None

    def __new__(cls) -> _Load:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "LOAD"


LOAD: Final = _Load()
"""In a tree of targets: "give me the saved subtree that belongs here, as new objects"."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoadLike:
    """In a tree of targets: "give me the saved tensor as a new one that is sharded and placed as this one".

    Memory is made only when the checkpoint has the tensor and it was selected; the dtype is the saved one.

    Attributes:
        like: a torch tensor, DTensors included, whose (global) shape the saved tensor must have.
    """

    like: Any


class PerRankValues(dict[int, Any]):
    """What ``ckpt.load()`` gives for a value that every rank kept of its own: ``{rank or key: value}``.

    Attributes:
        world_size: ranks of the save.
    """

    def __init__(self, values: Mapping[int, Any], world_size: int) -> None:
        super().__init__(values)
        self.world_size = world_size

    def __repr__(self) -> str:
        return f"PerRankValues({super().__repr__()}, world_size={self.world_size})"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored tensor, without its bytes: what a saved tree shows in its place.

    Attributes:
        name: of the logical tensor.
        dtype: like ``"bfloat16"``.
        shape: the global shape.
        kind: "torch", "numpy", "bytes", "bytearray" or "str": what it was in the state.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "torch"


@dataclasses.dataclass(frozen=True, slots=True)
class SavedTree:
    """The structure of a checkpoint: its components and values, with specs in place of tensors."""

    tree: Any

    @property
    def components(self) -> tuple[str, ...]:
        """Top-level keys."""
        return tuple(str(key) for key in self.tree)


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """Stands where a value could not be rebuilt here: pickled without leave, or its class is absent.

    Attributes:
        class_path: ``module.Class`` of what was saved.
        reason: why it is not here, and what would bring it.
        payload: the pickle bytes, or the raw inner values by name.
    """

    class_path: str
    reason: str
    payload: Any = dataclasses.field(repr=False, default=None)
