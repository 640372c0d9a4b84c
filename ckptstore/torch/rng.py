"""Random states: of Python, NumPy and torch, and of generators that a training holds itself.

Taking a state draws nothing, and no accelerator is ever initialized by asking for one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from ckptstore.errors import UsageError
from ckptstore.model.targets import LOAD

ACCELERATORS: Final = ("cuda", "xpu")
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    (torch.Generator, "torch"),
    (np.random.Generator, "numpy"),
    (np.random.RandomState, "numpy-legacy"),
    (random.Random, "python"),
)


def _context_exists(kind: str, index: int) -> bool:
    """Whether this process uses the device: another rank's device has a generator here too, unused."""
    if index == getattr(torch, kind).current_device():
        return True
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None) if kind == "cuda" else None
    return bool(has_context(index)) if has_context is not None else True


def used_devices(kind: str) -> list[int]:
    """Indices of the devices of one kind that this process uses; none if it has not begun to."""
    backend = getattr(torch, kind, None)
    if backend is None or not backend.is_initialized():
        return []
    return [index for index in range(backend.device_count()) if _context_exists(kind, index)]


def check_generators(generators: Mapping[str, Any]) -> None:
    """Looks at what was given as generators.

    Raises:
        UsageError: one is not a generator.
    """
    for name, generator in generators.items():
        _kind(name, generator)


def _kind(name: str, generator: Any) -> str:
    for cls, kind in _KINDS:
        if isinstance(generator, cls):
            return kind
    raise UsageError(
        f"generators[{name!r}] is a {type(generator).__name__}",
        hint="give a torch.Generator, numpy.random.Generator, numpy.random.RandomState or random.Random",
    )


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def capture(generators: Mapping[str, Any]) -> dict[str, Any]:
    """All random states of this process, each exactly as its library gives it.

    Returns:
        ``{"python", "numpy", "torch"}``, ``{"cuda": {index: state}}`` for the devices in use, and
        ``{"generators": {name: {"kind", "state"}}}`` when some were given.
    """
    tree: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    for kind in ACCELERATORS:
        states = {index: getattr(torch, kind).get_rng_state(index) for index in used_devices(kind)}
        if states:
            tree[kind] = states
    # torch.mps.get_rng_state starts Metal; a process with tensors there has done so already.
    if torch.backends.mps.is_available():
        tree["mps"] = torch.mps.get_rng_state()
    if generators:
        tree["generators"] = {
            name: {"kind": _kind(name, generator), "state": _generator_state(generator)}
            for name, generator in generators.items()
        }
    return tree


def targets(saved: Any, generators: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Targets for the random states, and what stands against taking them.

    Args:
        saved: the saved tree under ``"rng"``.
        generators: what this training holds itself.
    """
    wanted: dict[str, Any] = {key: LOAD for key in saved if key != "generators"}
    saved_generators: Mapping[str, Any] = saved.get("generators", {})
    problems: list[str] = []
    for name, generator in generators.items():
        kind = _kind(name, generator)
        wanted.setdefault("generators", {})[name] = LOAD
        entry = saved_generators.get(name)
        if entry is None:
            continue  # the core reports what is missing
        problem = f"rng.generators.{name}: saved from a {entry['kind']} generator, here it is {kind}"
        if entry["kind"] != kind:
            problems.append(problem)
        elif isinstance(generator, torch.Generator):
            here = tuple(generator.get_state().shape)
            if here != tuple(entry["state"].shape):
                problems.append(f"{problem} of another device ({generator.device})")
        elif isinstance(generator, np.random.Generator):
            saved_name, here_name = (
                entry["state"]["bit_generator"],
                generator.bit_generator.state["bit_generator"],
            )
            if saved_name != here_name:
                problems.append(f"{problem} with {here_name} where {saved_name} was saved")
    return wanted, problems


def install(tree: Mapping[str, Any], generators: Mapping[str, Any]) -> list[str]:
    """Puts all random states back; call it when nothing afterwards draws.

    Returns:
        Notes about what could not be put back as it was, for people.
    """
    notes: list[str] = []
    for name, entry in _loaded(tree, "generators", {}).items():
        if entry is not LOAD and name in generators:
            _set_generator_state(generators[name], entry["state"])
    for kind in ACCELERATORS:
        notes += _install_devices(kind, _loaded(tree, kind, {}))
    mps = _loaded(tree, "mps", None)
    if mps is not None:
        if torch.backends.mps.is_available():
            torch.mps.set_rng_state(mps)
        else:
            notes.append("the random state of an MPS device was saved; there is none here")
    if (numpy_state := _loaded(tree, "numpy", None)) is not None:
        np.random.set_state(numpy_state)
    if (torch_state := _loaded(tree, "torch", None)) is not None:
        torch.set_rng_state(torch_state)
    if (python_state := _loaded(tree, "python", None)) is not None:
        random.setstate(python_state)
    return notes


def _loaded(tree: Mapping[str, Any], key: str, default: Any) -> Any:
    value = tree.get(key, LOAD)
    return default if value is LOAD else value


def match_devices(saved: list[int], visible: int, used: list[int]) -> dict[int, int]:
    """Which saved device's state goes to which device here.

    The same index where it exists. Saved ones without a counterpart go, in order, to devices that are
    in use and got none: a rank that trained on device 3 may find itself on device 0.

    Args:
        saved: indices in the checkpoint.
        visible: how many devices there are here.
        used: indices in use here.
    """
    chosen = set(used) or set(range(visible))
    pairs = {index: index for index in saved if index in chosen}
    free = sorted(chosen - pairs.keys())
    for index in sorted(set(saved) - pairs.keys()):
        if not free:
            break
        pairs[index] = free.pop(0)
    return pairs


def _install_devices(kind: str, states: Mapping[int, Any]) -> list[str]:
    if not states:
        return []
    backend = getattr(torch, kind, None)
    visible = backend.device_count() if backend is not None and backend.is_available() else 0
    used = used_devices(kind)
    pairs = match_devices(list(states), visible, used)
    for source, destination in pairs.items():
        # Not initialized yet: torch keeps the state and sets it when it initializes.
        getattr(torch, kind).set_rng_state(states[source], destination)
    moved = {source: destination for source, destination in pairs.items() if source != destination}
    present = len(used) or visible
    notes = []
    if len(states) != present:
        notes.append(
            f"{len(states)} {kind.upper()} generators saved, {present} present: restored {len(pairs)}"
        )
    notes += [f"{kind}:{source}'s random state went to {kind}:{to}" for source, to in moved.items()]
    return notes
