"""What stands in a state that is to be filled: tensors whole or sharded, objects, sentinels."""

from __future__ import annotations

import sys
from typing import Any

from ckptstore import arrays, dtensors, shards
from ckptstore.forms import Form, form_of
from ckptstore.model.boxes import Box
from ckptstore.model.plain import StatePath
from ckptstore.model.targets import LOAD, LoadLike
from ckptstore.model.unpack import walk
from ckptstore.shards import Held, LocalShard, MayDiffer, PerRank


def is_tensor(value: Any) -> bool:
    """Whether it is an array or tensor, or stands for one: a shard, or several of one tensor."""
    return arrays.is_array(value) or isinstance(value, LocalShard) or _is_shard_list(value)


def _is_shard_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], LocalShard)


def plain_form(value: Any) -> Form | None:
    """The form of an ordinary tensor of the CPU that is not empty; None for all else."""
    torch = sys.modules.get("torch")
    if torch is None or (type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter):
        return None
    form = form_of(value)
    return form if form is not None and form[-1] is None and value.numel() else None


def has_tensors(target: Any) -> bool:
    """Whether there is any tensor in a part of a state."""
    return any(
        has_tensors(value.value) if isinstance(value, (PerRank, MayDiffer)) else is_tensor(value)
        for _, value in walk(target)
    )


def held_in(value: Any, path: StatePath) -> Held:
    """What is here of a target tensor, its arrays free of autograd."""
    held = shards.held_of(value, path)
    if held is None:
        shape = tuple(value.shape)
        return Held(value, shape, ((Box.whole(shape), value),))
    parts = tuple((box, array.detach() if hasattr(array, "detach") else array) for box, array in held.parts)
    return Held(held.array, held.shape, parts)


def unwritable(held: Held) -> str | None:
    """Why a target cannot be filled in place, or None when it can."""
    reasons = (arrays.unwritable(array) for _, array in held.parts)
    return next((reason for reason in reasons if reason is not None), None)


def memory_of(held: Held, path: StatePath, info: arrays.ArrayInfo) -> tuple[Any, ...] | None:
    """Equal for targets that are the same memory of the same tensor; None where there is no memory.

    Args:
        info: of ``held.array``.
    """
    ties = tuple(
        (box.offsets, (info if array is held.array else arrays.describe(array, path)).tie)
        for box, array in held.parts
    )
    return (held.shape, *ties) if ties and all(tie is not None for _, tie in ties) else None


def is_sharded_module(value: Any) -> bool:
    """Whether it is a torch module with DTensors among its parameters."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.nn.Module)
        and any(dtensors.is_dtensor(parameter) for parameter in value.parameters())
    )


def sharded_parameters(value: Any) -> dict[int, Any]:
    """The DTensors among a torch optimizer's parameters, by the number that its ``state_dict`` gives them."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.optim.Optimizer):
        return {}
    parameters = (parameter for group in value.param_groups for parameter in group["params"])
    return {number: item for number, item in enumerate(parameters) if dtensors.is_dtensor(item)}


def is_taken_whole(target: Any) -> bool:
    """Whether it asks for all that was saved in its place."""
    if isinstance(target, (PerRank, MayDiffer)):
        return is_taken_whole(target.value)
    return target is LOAD or isinstance(target, LoadLike) or takes_state_dict(target)


def takes_state_dict(value: Any) -> bool:
    """Whether it is an object with ``load_state_dict``."""
    return not isinstance(value, type) and callable(getattr(value, "load_state_dict", None))
