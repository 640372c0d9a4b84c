"""What a training adds to its state: values, tensors, and objects with `state_dict`, in nested dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckptstore.model.targets import LOAD, TensorSpec
from ckptstore.torch.loader import is_stateful


def capture_extra(value: Any) -> Any:
    """The tree of an extra value; objects with `state_dict` become what it returns."""
    if is_stateful(value):
        return value.state_dict()
    if type(value) is dict:
        return {key: capture_extra(item) for key, item in value.items()}
    return value


def _keeps_identity(value: Any) -> bool:
    """Whether something in there is filled or told, rather than replaced."""
    if type(value) is dict:
        return any(_keeps_identity(item) for item in value.values())
    return is_stateful(value) or isinstance(value, torch.Tensor | np.ndarray)


def _spec_of(value: Any) -> tuple[str, str, tuple[int, ...]] | None:
    if isinstance(value, torch.Tensor):
        return "torch", str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if isinstance(value, np.ndarray):
        return "numpy", value.dtype.name, value.shape
    return None


def extra_target(live: Any, saved: Any) -> Any:
    """The target for one extra value: filled in place where it can be, else loaded.

    A dict that holds tensors or objects is gone through; one of plain values is replaced whole. Keys that
    were saved and are not there come along.
    """
    if is_stateful(live):
        return LOAD
    if type(live) is dict and type(saved) is dict and _keeps_identity(live):
        return {
            key: extra_target(live.get(key), saved.get(key, LOAD))
            for key in [*saved, *(key for key in live if key not in saved)]
        }
    if saved is LOAD and _spec_of(live) is not None:
        return live  # not in the checkpoint: a target that the core finds missing
    if isinstance(saved, TensorSpec) and _spec_of(live) == (saved.kind, saved.dtype, tuple(saved.shape)):
        return live
    return LOAD


def install_extra(live: dict[Any, Any], tree: Mapping[Any, Any]) -> None:
    """Puts what was loaded into the live dict: objects are told, the rest is set."""
    for key, value in tree.items():
        if value is LOAD:
            continue
        here: Any = live.get(key)
        if is_stateful(here):
            here.load_state_dict(value)
        elif type(here) is dict and type(value) is dict and _keeps_identity(here):
            install_extra(here, value)
        else:
            live[key] = value
