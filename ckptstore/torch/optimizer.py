"""Optimizers, read and written as they are: by parameter name, without `load_state_dict` or `step`.

`torch.optim.Optimizer.load_state_dict` casts, numbers parameters by their order and cannot fill what is
not there. Here `optimizer.state` and `optimizer.param_groups` are read and set directly, so dtypes,
devices, Python types and missing entries come back as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import torch

from ckptstore.errors import UsageError
from ckptstore.model.targets import LOAD, LoadLike, TensorSpec
from ckptstore.torch.modules import ParameterNames

# torch keeps the parameters' own names there; they say nothing that "params" does not, and belong to the
# live group's order.
_NOT_SAVED: Final = ("params", "param_names")


class OptimizerLike(Protocol):
    """What is needed of an optimizer: torch.optim's, and wrappers that pass these through."""

    state: Any
    param_groups: list[dict[str, Any]]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def moved(value: Any, device: torch.device) -> Any:
    """The same value with its tensors on `device`; containers keep their type."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, list):
        value[:] = [moved(item, device) for item in value]
    elif isinstance(value, dict):
        for key in value:
            value[key] = moved(value[key], device)
    elif isinstance(value, tuple):
        items = [moved(item, device) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _groups(
    optimizer: OptimizerLike, names: ParameterNames, label: str
) -> list[list[tuple[str, torch.Tensor]]]:
    """The parameters of every group with their names.

    Raises:
        UsageError: one belongs to no model that was given.
    """
    strangers: list[str] = []
    groups: list[list[tuple[str, torch.Tensor]]] = []
    for index, group in enumerate(optimizer.param_groups):
        found: list[tuple[str, torch.Tensor]] = []
        for place, parameter in enumerate(group["params"]):
            name = names.name_of(parameter)
            if name is None:
                strangers.append(
                    f"param_groups[{index}]['params'][{place}] of shape {tuple(parameter.shape)}"
                )
            else:
                found.append((name, parameter))
        groups.append(found)
    if strangers:
        raise UsageError(
            f"{label} trains parameters that no model given here has: {', '.join(strangers)}",
            hint="give every module that it trains, like model={'net': net, 'loss': loss}; build the "
            "optimizer after the model has been moved, sharded or compiled",
        )
    return groups


def check_optimizer(optimizer: OptimizerLike, names: ParameterNames, label: str) -> None:
    """Looks at one optimizer before the first save.

    Raises:
        UsageError: it is no optimizer, or trains parameters that no model given has.
    """
    if not hasattr(optimizer, "state") or not hasattr(optimizer, "param_groups"):
        raise UsageError(f"{label} ({type(optimizer).__name__}) has no state and param_groups")
    _groups(optimizer, names, label)


# --- saving -------------------------------------------------------------------------------------


def capture_optimizer(optimizer: OptimizerLike, names: ParameterNames, label: str) -> dict[str, Any]:
    """The tree of one optimizer; its tensors are the live ones, and nothing of it changes.

    Returns:
        ``state`` ({parameter name: entry}), ``param_groups`` (each with ``params``, its names) and ``device``
        (what type its parameters are on); where needed also ``elsewhere`` (entries on another type than
        their parameter: {key: {type: names, or True for all that have the key}}) and ``shared`` (state that
        belongs to no parameter).

    Raises:
        UsageError: a parameter or a piece of state cannot be named.
    """
    groups = _groups(optimizer, names, label)
    state: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    beside: set[str] = set()  # keys of entries on the type of device that their parameter is on
    placed: dict[str, dict[str, list[str]]] = {}  # key -> device type -> names, of all others
    for owner, entry in optimizer.state.items():
        if isinstance(owner, str):
            shared[owner] = {
                "value": entry,
                "device": next((t.device.type for t in tensors_in(entry)), None),
            }
            continue
        name = names.name_of(owner) if isinstance(owner, torch.Tensor) else None
        if name is None:
            what = (
                f"a tensor of shape {tuple(owner.shape)}" if isinstance(owner, torch.Tensor) else repr(owner)
            )
            raise UsageError(
                f"{label} has state for {what}, which no model given here has as a parameter",
                hint="give the module in model=, or drop the entry from optimizer.state",
            )
        state[name] = dict(entry) if type(entry) is dict else entry
        if not isinstance(entry, Mapping):
            continue
        is_on_cpu = owner.is_cpu
        for key, value in entry.items():
            if is_on_cpu and isinstance(value, torch.Tensor) and value.is_cpu:  # as nearly always there
                beside.add(key)
                continue
            kinds = {tensor.device.type for tensor in tensors_in(value)}
            if kinds:
                kind = kinds.pop()
                if kind == owner.device.type:
                    beside.add(key)
                else:
                    placed.setdefault(key, {}).setdefault(kind, []).append(name)
    tree: dict[str, Any] = {
        "device": _first_device(optimizer).type,
        "state": state,
        "param_groups": [
            {"params": [name for name, _ in found]}
            | {key: value for key, value in group.items() if key not in _NOT_SAVED}
            for group, found in zip(optimizer.param_groups, groups, strict=True)
        ],
    }
    elsewhere = {
        key: {kind: True if len(kinds) == 1 and key not in beside else of for kind, of in kinds.items()}
        for key, kinds in placed.items()
    }
    if elsewhere:
        tree["elsewhere"] = elsewhere
    if shared:
        tree["shared"] = shared
    return tree


# --- what a checkpoint must fit ------------------------------------------------------------------


def optimizer_problems(
    optimizer: OptimizerLike, saved: Mapping[str, Any], names: ParameterNames, label: str
) -> list[str]:
    """Why this optimizer cannot take what was saved, one line each.

    The groups must be the same: how many, and which parameters are in each. The order within a group may
    differ, except for LBFGS, whose state runs over all parameters in their order.
    """
    live = _groups(optimizer, names, label)
    saved_groups = saved["param_groups"]
    if len(live) != len(saved_groups):
        return [f"{label}: {len(saved_groups)} parameter groups were saved, here there are {len(live)}"]
    problems: list[str] = []
    unknown = {name for group in saved_groups for name in group["params"] if names.tensor_of(name) is None}
    for index, (found, group) in enumerate(zip(live, saved_groups, strict=True)):
        here = [name for name, _ in found]
        there = [_canonical(name, names) for name in group["params"]]
        where = f"{label}.param_groups[{index}]"
        problems += [
            f"{where}: {name} was saved, but no model here has it" for name in there if name in unknown
        ]
        problems += [
            f"{where}: {name} was saved in this group, here it is not"
            for name in there
            if name not in here and name not in unknown
        ]
        problems += [
            f"{where}: {name} is here, but was not saved in this group" for name in here if name not in there
        ]
        if here != there and sorted(here) == sorted(there) and isinstance(optimizer, torch.optim.LBFGS):
            problems.append(f"{where}: LBFGS needs its parameters in the order in which they were saved")
    problems += [
        f"{label}.state: {name} was saved, but no model here has it"
        for name in saved["state"]
        if name not in unknown and names.tensor_of(name) is None
    ]
    return problems


def _canonical(name: str, names: ParameterNames) -> str:
    tensor = names.tensor_of(name)
    return (names.name_of(tensor) if tensor is not None else None) or name


# --- restoring ----------------------------------------------------------------------------------


def optimizer_targets(
    optimizer: OptimizerLike, saved: Mapping[str, Any], names: ParameterNames
) -> dict[str, Any]:
    """Targets shaped like what was saved, for an optimizer that has no `optimizer_problems`.

    A live tensor of the saved shape and dtype is filled in place. What is not here yet and has the shape of
    its parameter is made like that, so that the moments of a sharded parameter are sharded as it is.
    Everything else is loaded, and put where it belongs by `install_optimizer`.
    """
    state: dict[str, Any] = {}
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, Mapping)]
    uses = _counted(value for entry in entries for value in entry.values())
    for name, saved_entry in saved["state"].items():
        parameter = names.tensor_of(name)
        entry = optimizer.state.get(parameter)
        live = entry if isinstance(entry, Mapping) else {}
        state[name] = LOAD
        if type(saved_entry) is dict and saved_entry:
            state[name] = {
                key: live[key]
                if _fits(live.get(key), value) and uses[id(live[key])] == 1
                else _new_entry(value, parameter, _elsewhere(saved, key, name))
                for key, value in saved_entry.items()
            }
    targets: dict[str, Any] = {"state": state, "param_groups": _group_targets(optimizer, saved)}
    targets |= {key: LOAD for key in saved if key not in targets}
    return targets


def _new_entry(saved: Any, parameter: torch.Tensor | None, elsewhere: str | None) -> Any:
    is_like = (
        parameter is not None
        and elsewhere is None
        and isinstance(saved, TensorSpec)
        and saved.kind == "torch"
        and len(saved.shape) > 0
        and tuple(saved.shape) == tuple(parameter.shape)
    )
    return LoadLike(parameter) if is_like else LOAD


def _group_targets(optimizer: OptimizerLike, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    # torch puts one default tensor (a tensor lr) into all groups: filling it for each would leave the last.
    uses = _counted(value for group in optimizer.param_groups for value in group.values())
    targets = []
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        target: dict[str, Any] = dict.fromkeys(saved_group, LOAD)
        for key, value in saved_group.items():
            live = group.get(key)
            if _fits(live, value) and uses.get(id(live)) == 1:
                target[key] = live
        targets.append(target)
    return targets


def _fits(live: Any, saved: Any) -> bool:
    return (
        isinstance(live, torch.Tensor)
        and isinstance(saved, TensorSpec)
        and saved.kind == "torch"
        and tuple(live.shape) == tuple(saved.shape)
        and str(live.dtype).removeprefix("torch.") == saved.dtype
    )


def _device(
    key: Any,
    name: str,
    value: Any,
    parameter: torch.Tensor,
    saved: Mapping[str, Any],
    group: Mapping[str, Any],
) -> torch.device:
    """Where an entry belongs: on the kind of device it was saved from, beside its parameter otherwise."""
    kind = _elsewhere(saved, key, name)
    if kind is not None:
        return torch.device(kind)
    # Saved beside parameters on the CPU, "step" does not say whether it would stay there beside parameters
    # on an accelerator; torch's rule: unless capturable or fused.
    is_step = key == "step" and isinstance(value, torch.Tensor) and not value.shape
    if is_step and _selected(saved, "device", "cpu") == "cpu":
        return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    return parameter.device


def _elsewhere(saved: Mapping[str, Any], key: Any, name: str) -> str | None:
    """The type of device that an entry was kept on, if not its parameter's."""
    found = _selected(saved, "elsewhere", {}).get(key, {})
    return next((kind for kind, which in found.items() if which is True or name in which), None)


def _selected(tree: Mapping[str, Any], key: str, default: Any) -> Any:
    value = tree.get(key, default)
    return default if value is LOAD else value


def _first_device(optimizer: OptimizerLike) -> torch.device:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _counted(values: Iterable[Any]) -> dict[int, int]:
    """How often each tensor object occurs, by its id."""
    uses: dict[int, int] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            uses[id(value)] = uses.get(id(value), 0) + 1
    return uses


def install_optimizer(optimizer: OptimizerLike, tree: Mapping[str, Any], names: ParameterNames) -> None:
    """Makes the optimizer hold exactly what was saved.

    Groups keep their identity, their parameter lists and the order in them; a scheduler that refers to the
    optimizer is not disturbed. What is still LOAD in `tree` was not selected: it stays as it is, and then
    nothing is taken away either.
    """
    for group, loaded in zip(optimizer.param_groups, _selected(tree, "param_groups", []), strict=False):
        _install_group(group, loaded)
    flags: dict[str, Mapping[str, Any]] = {}
    for group in optimizer.param_groups:
        flags |= dict.fromkeys((names.name_of(parameter) or "" for parameter in group["params"]), group)
    restored: dict[Any, Any] = {}
    complete = True
    for name, loaded in _selected(tree, "state", {}).items():
        parameter = names.tensor_of(name)
        if type(loaded) is dict:
            unselected = [key for key, value in loaded.items() if value is LOAD]
            complete = complete and not unselected
            if parameter is None or (loaded and len(unselected) == len(loaded)):
                continue
            live = optimizer.state.get(parameter)
            placed = {
                key: moved(
                    value,
                    _device(key, name, value, parameter, tree, flags.get(names.name_of(parameter) or "", {})),
                )
                for key, value in loaded.items()
                if value is not LOAD
            }
            restored[parameter] = _replaced(live if type(live) is dict else {}, placed, keep=unselected)
        elif loaded is LOAD:
            complete = False
        elif parameter is not None:
            restored[parameter] = loaded
    beside = _first_device(optimizer)
    for key, shared in _selected(tree, "shared", {}).items():
        device = torch.device("cpu") if shared["device"] in {None, "cpu"} else beside
        restored[key] = moved(shared["value"], device)
    if complete and tree.get("state") is not LOAD:
        optimizer.state.clear()
    optimizer.state.update(restored)


def _install_group(group: dict[str, Any], loaded: Any) -> None:
    if loaded is LOAD:
        return
    if loaded["params"] is not LOAD:
        for key in [key for key in group if key not in _NOT_SAVED and key not in loaded]:
            del group[key]
    for key, value in loaded.items():
        if key not in _NOT_SAVED and value is not LOAD:
            live: Any = group.get(key)
            move = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)
            group[key] = value.to(live.device) if move else value


def _replaced(live: dict[Any, Any], loaded: dict[Any, Any], *, keep: list[Any]) -> dict[Any, Any]:
    """The same dict with other content; only the `keep` keys of the old one stay."""
    kept = {key: live[key] for key in keep if key in live}
    live.clear()
    live.update(kept | loaded)
    return live
