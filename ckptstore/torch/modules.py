"""The names that the parameters and buffers of a module have in a checkpoint.

They are the names that `state_dict()` would give to the plain module. What a wrapper (DDP, compile,
activation checkpointing) adds is left out by looking at the modules while walking them, never by
editing strings: a user's own submodule called ``module`` keeps its name.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ckptstore.errors import UsageError
from ckptstore.model.targets import LOAD
from ckptstore.shards import MayDiffer

EXTRA_STATE = "_extra_state"  # what nn.Module.state_dict calls it

# Looked up only if the module is loaded already: nobody's model is of a type that was never imported,
# and importing torch._dynamo takes seconds.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
_SHARDED = ("torch.distributed.fsdp", "FSDPModule")
_FLAT_WRAPPER = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")


def _type_if_loaded(module: str, name: str) -> type | None:
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


class _Loaded:
    """The wrappers that this process has imported: looked up once for a whole walk."""

    def __init__(self) -> None:
        found = [(_type_if_loaded(owner, name), attribute) for owner, name, attribute in _WRAPPERS]
        self._wrappers = [(wrapper, attribute) for wrapper, attribute in found if wrapper is not None]
        self._types = tuple(wrapper for wrapper, _ in self._wrappers)
        self._flat = _type_if_loaded(*_FLAT_WRAPPER)
        self.sharded = _type_if_loaded(*_SHARDED)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """See :func:`unwrap`."""
        while True:
            if self._flat is not None and isinstance(module, self._flat):
                raise UsageError(
                    "the model is wrapped by FullyShardedDataParallel, whose parameters are flattened pieces",
                    hint="shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead",
                )
            if not isinstance(module, self._types):
                return module
            for wrapper, attribute in self._wrappers:
                inner = getattr(module, attribute) if isinstance(module, wrapper) else None
                if isinstance(inner, nn.Module):
                    module = inner
                    break
            else:
                return module


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside all wrappers that change names and nothing else.

    Raises:
        UsageError: the module is wrapped by FullyShardedDataParallel, which flattens parameters.
    """
    return _Loaded().unwrap(module)


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every submodule as ``(prefix of its names, module)``, wrappers left out.

    A module that sits in two places comes twice, as in `state_dict`. What `fully_shard` has gathered for a
    forward pass is let go of again: between passes the shards are the parameters.
    """
    loaded = _Loaded()
    left = [(prefix, module)]
    while left:
        prefix, module = left.pop()
        module = loaded.unwrap(module)
        if loaded.sharded is not None and isinstance(module, loaded.sharded):
            reshard: Any = module.reshard
            reshard()
        yield prefix, module
        left += [
            (f"{prefix}{name}.", child)
            for name, child in reversed(module._modules.items())
            if child is not None
        ]


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by name; a tied one under each of its names."""
    return {
        prefix + name: value
        for prefix, owner in walk(module)
        for name, value in owner._parameters.items()
        if value is not None
    }


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleState:
    """What a checkpoint holds of one module.

    Attributes:
        tensors: parameters and persistent buffers by name, live.
        buffers: which of them are buffers: ranks may hold different ones, as BatchNorm's.
        extra_owners: by the name of their entry, the modules that define `get_extra_state`.
    """

    tensors: dict[str, torch.Tensor]
    buffers: frozenset[str]
    extra_owners: dict[str, nn.Module]


def module_state(module: nn.Module, label: str = "model") -> ModuleState:
    """Finds what a checkpoint holds of a module; nothing is copied or called.

    Raises:
        UsageError: a parameter has no storage yet, or a submodule keeps state where only its own
            `state_dict` finds it.
    """
    tensors: dict[str, torch.Tensor] = {}
    buffers: set[str] = set()
    extra_owners: dict[str, nn.Module] = {}
    for prefix, owner in walk(module):
        persistent = {
            name: value
            for name, value in owner._buffers.items()
            if value is not None and name not in owner._non_persistent_buffers_set
        }
        own = {name: value for name, value in owner._parameters.items() if value is not None} | persistent
        for name, value in own.items():
            if nn.parameter.is_lazy(value):
                raise UsageError(
                    f"{label}.{prefix}{name} is not initialized yet (a lazy module)",
                    hint="run one forward pass before building the TrainState",
                )
            tensors[prefix + name] = value.detach()
        buffers.update(prefix + name for name in persistent)
        _refuse_hidden_state(owner, prefix, own, label)
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            extra_owners[prefix + EXTRA_STATE] = owner
    return ModuleState(tensors, frozenset(buffers), extra_owners)


def _refuse_hidden_state(owner: nn.Module, prefix: str, own: dict[str, torch.Tensor], label: str) -> None:
    # A type that writes its own entries would lose them here in silence (quantized layers do this).
    if type(owner)._save_to_state_dict is nn.Module._save_to_state_dict:
        return
    written: dict[str, Any] = {}
    owner._save_to_state_dict(written, "", True)
    hidden = sorted(written.keys() - own.keys() - {EXTRA_STATE})
    if hidden:
        raise UsageError(
            f"{label}.{prefix.rstrip('.') or '<root>'} ({type(owner).__name__}) keeps {', '.join(hidden)} "
            "outside its parameters and buffers",
            hint="make them persistent buffers, return them from get_extra_state, or pass them in extra=",
        )


def capture_module(module: nn.Module, label: str) -> dict[str, Any]:
    """The tree of one module: live tensors by name, and the values of `get_extra_state`.

    Buffers and extra states are marked as what ranks may hold different ones of.
    """
    state = module_state(module, label)
    tree: dict[str, Any] = {
        name: MayDiffer(tensor) if name in state.buffers else tensor for name, tensor in state.tensors.items()
    }
    for name, owner in state.extra_owners.items():
        extra = owner.get_extra_state()
        tree[name] = None if extra is None else MayDiffer(extra)
    return tree


def module_targets(module: nn.Module, label: str) -> dict[str, Any]:
    """Targets for one module: its live tensors, to be filled in place, and LOAD for extra states."""
    state = module_state(module, label)
    return {**state.tensors, **dict.fromkeys(state.extra_owners, LOAD)}


def install_module(module: nn.Module, tree: dict[str, Any], label: str) -> None:
    """Hands the loaded extra states to their modules; the tensors are filled already."""
    for name, owner in module_state(module, label).extra_owners.items():
        if name in tree and tree[name] is not LOAD:
            owner.set_extra_state(tree[name])


class ParameterNames:
    """Parameters by name and names by parameter, over all models of a training.

    A tied parameter has several names; its first one stands for it.

    Raises:
        UsageError: two parameters of different models come to the same name.
    """

    def __init__(self, models: dict[str, nn.Module]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        for key, model in models.items():
            for local, tensor in parameters(model).items():
                name = f"{key}.{local}" if key else local
                if self._tensors.setdefault(name, tensor) is not tensor:
                    raise UsageError(
                        f"two parameters of different models are both called {name}",
                        hint="choose other keys in model={...}",
                    )
                self._names.setdefault(id(tensor), name)

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """All parameters; a tied one under each of its names."""
        return self._tensors.values()

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter, or None when no model has it."""
        return self._names.get(id(tensor))

    def tensor_of(self, name: str) -> torch.Tensor | None:
        """The parameter of this name, any of its names, or None."""
        return self._tensors.get(name)
