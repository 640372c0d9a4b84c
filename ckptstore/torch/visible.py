"""The modules, optimizers and trainable tensors that can be seen in a state as a caller gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckptstore.torch.optimizer import tensors_in
from ckptstore.torch.train_state import TrainState


def trained(state: Any) -> tuple[list[nn.Module], dict[str, Any], str | None]:
    """The modules and optimizers of a state; and, if it has no optimizer, that, in a clause."""
    if isinstance(state, TrainState):
        optimizers = {state._optimizers.label(name): part for name, part in state._optimizers.parts.items()}
        return list(state._models.parts.values()), optimizers, None
    modules: list[nn.Module] = []
    found: dict[str, Any] = {}
    _look(state, "", modules, found)
    reason = None if found else "no optimizer is in the state"
    return modules, found, reason


def _look(value: Any, path: str, modules: list[nn.Module], optimizers: dict[str, Any]) -> None:
    if isinstance(value, nn.Module):
        modules.append(value)
    elif hasattr(value, "param_groups") and not isinstance(value, Mapping):
        optimizers[path] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _look(item, f"{path}.{key}" if path else str(key), modules, optimizers)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _look(item, f"{path}.{index}", modules, optimizers)


def trainable_addresses(state: Any) -> frozenset[int]:
    """Where parameters and other tensors of a state lie that gradients are computed for."""
    modules, optimizers, _ = trained(state)
    found: list[torch.Tensor] = [parameter for module in modules for parameter in module.parameters()]
    for optimizer in optimizers.values():
        found += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(state, Mapping):
        found += tensors_in(state)
    return frozenset(
        part.data_ptr() for tensor in found if tensor.requires_grad for part in local_parts(tensor)
    ) - {0}


def renormalised(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters that a forward writes: those of embeddings with ``max_norm``, at any depth."""
    for part in module.modules():
        if getattr(part, "max_norm", None) is not None:  # nn.Embedding, nn.EmbeddingBag and their like
            yield from part.parameters(recurse=False)


def local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's memory here; none for kinds that have no one storage."""
    to_local = getattr(tensor, "to_local", None)  # DTensor
    if callable(to_local):
        with torch.no_grad():
            tensor = to_local()
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return [tensor] if plain else []


def storage_of(tensor: torch.Tensor) -> int:
    """Where the memory begins that it is a view of."""
    return int(tensor.untyped_storage().data_ptr())
