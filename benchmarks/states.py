"""The state that is saved: what a GPT trained with AdamW leaves in memory, fp32, mixed tensor sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

State = dict[str, Any]
"""A nested dict with string keys and tensors as leaves."""

_GIB = 1 << 30
_BYTES_PER_PARAMETER = 12  # the weight and two moments, four bytes each
_WIDTHS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
_CONTEXT = 1024


def adamw_state(gib: float, seed: int = 0) -> State:
    """A model and its AdamW moments, at least `gib` GiB in all.

    The width is the largest at which the embedding is at most 40 % of the state, so that a small state
    still has the mixture of a large one: an embedding, square and wide matrices, many norms and biases.

    Returns `{"model": {name: weight}, "optimizer": {name: {"step", "exp_avg", "exp_avg_sq"}}}`.
    """
    wanted_parameters = gib * _GIB / _BYTES_PER_PARAMETER
    width = max((w for w in _WIDTHS if _vocabulary(w) * w <= 0.4 * wanted_parameters), default=_WIDTHS[0])
    outside = sum(math.prod(shape) for shape in _outer_shapes(width).values())
    per_layer = sum(math.prod(shape) for shape in _layer_shapes(width, 0).values())
    layers = max(1, math.ceil((wanted_parameters - outside) / per_layer))

    shapes = _outer_shapes(width)
    for layer in range(layers):
        shapes |= _layer_shapes(width, layer)

    random = torch.Generator().manual_seed(seed)
    model: State = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    optimizer: State = {
        name: {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.randn(shape, generator=random),
            "exp_avg_sq": torch.rand(shape, generator=random),
        }
        for name, shape in shapes.items()
    }
    return {"model": model, "optimizer": optimizer}


def _vocabulary(width: int) -> int:
    return 50257 if width >= 768 else 16 * width + 1


def _outer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "wte.weight": (_vocabulary(width), width),
        "wpe.weight": (_CONTEXT, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }


def _layer_shapes(width: int, layer: int) -> dict[str, tuple[int, ...]]:
    parts: dict[str, tuple[int, ...]] = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.qkv.weight": (3 * width, width),
        "attn.qkv.bias": (3 * width,),
        "attn.out.weight": (width, width),
        "attn.out.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.up.weight": (4 * width, width),
        "mlp.up.bias": (4 * width,),
        "mlp.down.weight": (width, 4 * width),
        "mlp.down.bias": (width,),
    }
    return {f"layers.{layer}.{part}": shape for part, shape in parts.items()}


def tensors(state: State, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its path, the keys joined by `/`, in the order of the state."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from tensors(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def flat(state: State) -> dict[str, torch.Tensor]:
    """The same tensors in one dict, for formats that know no nesting."""
    return dict(tensors(state))


def size_bytes(state: State) -> int:
    return sum(tensor.nbytes for _, tensor in tensors(state))


def blank_like(state: State) -> State:
    """A state of the same names and shapes to load into, its memory touched."""
    return {
        key: blank_like(value) if isinstance(value, dict) else torch.zeros_like(value)
        for key, value in state.items()
    }


def poison(state: State) -> None:
    """Overwrite every element, so that a load that leaves one untouched is seen."""
    for _, tensor in tensors(state):
        tensor.fill_(-12345.0)


def copy_into(target: State, loaded: State) -> None:
    """Copy `loaded` over the tensors of `target`, for loaders that only make new tensors."""
    for key, value in target.items():
        if isinstance(value, dict):
            copy_into(value, loaded[key])
        else:
            value.copy_(loaded[key])


def differences(expected: State, actual: State) -> list[str]:
    """The paths of the tensors whose bytes, shape or dtype are not those of `expected`."""
    found = flat(actual)
    wanted = flat(expected)
    wrong = sorted(wanted.keys() ^ found.keys())
    for path in wanted.keys() & found.keys():
        if not _same_bytes(wanted[path], found[path]):
            wrong.append(path)
    return wrong


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
