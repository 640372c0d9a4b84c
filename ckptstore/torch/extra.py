"""What a training adds to its state: values, tensors, and objects with `state_dict`, in nested dicts.

Tensors may be sharded (DTensors, LocalShards), and anything may be one rank's own (PerRank).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckptstore.model.targets import LOAD, TensorSpec
from ckptstore.shards import LocalShard, MayDiffer, PerRank
from ckptstore.torch.loader import is_stateful


def capture_extra(value: Any) -> Any:
    """The tree of an extra value; objects with `state_dict` become what it returns."""
    if isinstance(value, PerRank | MayDiffer):
        return dataclasses.replace(value, value=capture_extra(value.value))
    if is_stateful(value):
        return value.state_dict()
    if type(value) is dict:
        return {key: capture_extra(item) for key, item in value.items()}
    return value


def _keeps_identity(value: Any) -> bool:
    """Whether something in there is filled or told, rather than replaced."""
    if type(value) is dict:
        return any(_keeps_identity(item) for item in value.values())
    if isinstance(value, PerRank | MayDiffer):
        return True
    return is_stateful(value) or _spec_of(value) is not None


def _spec_of(value: Any) -> tuple[str, str, tuple[int, ...]] | None:
    if isinstance(value, torch.Tensor):
        return "torch", str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if isinstance(value, np.ndarray):
        return "numpy", value.dtype.name, value.shape
    shard = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(shard, LocalShard):
        kind, dtype, _ = _spec_of(shard.array) or ("", "", ())
        return kind, dtype, shard.global_shape
    return None


def extra_target(live: Any, saved: Any) -> Any:
    """The target for one extra value: filled in place where it can be, else loaded.

    A dict that holds tensors or objects is gone through; one of plain values is replaced whole. Keys that
    were saved and are not there come along.
    """
    if isinstance(live, PerRank | MayDiffer):
        target = extra_target(live.value, saved)
        return PerRank(target, live.key) if isinstance(live, PerRank) and live.key is not None else target
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
        live[key] = _installed(live.get(key), value)


def _installed(here: Any, value: Any) -> Any:
    if isinstance(here, PerRank | MayDiffer):
        return dataclasses.replace(here, value=_installed(here.value, value))
    if is_stateful(here):
        here.load_state_dict(value)
        return here
    if type(here) is dict and type(value) is dict and _keeps_identity(here):
        install_extra(here, value)
        return here
    return value
