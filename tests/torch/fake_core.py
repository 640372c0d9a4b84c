"""The least that can stand in for the store: holds a copy of a tree, and fills targets from it."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import torch

from ckptstore.errors import StateMismatchError
from ckptstore.model.plain import Composite
from ckptstore.model.targets import LOAD, LoadLike, PerRankValues, SavedTree, TensorSpec
from ckptstore.shards import MayDiffer, PerRank


@dataclasses.dataclass
class Cell:
    value: Any
    kind: str
    dtype: str
    shape: tuple


def _copy(node, ties):
    if isinstance(node, MayDiffer):
        return _copy(node.value, ties)  # one process: there is nobody to differ from
    if isinstance(node, PerRank):
        return Composite("per_rank", [1], {"0": _copy(node.value, ties)})
    if isinstance(node, torch.Tensor):
        place = (node.data_ptr() if node.numel() else id(node), node.dtype, tuple(node.shape), node.stride())
        if place not in ties:
            dtype = str(node.dtype).removeprefix("torch.")
            ties[place] = Cell(node.detach().cpu().clone(), "torch", dtype, tuple(node.shape)), node
        return ties[place][0]
    if isinstance(node, np.ndarray):
        return Cell(node.copy(), "numpy", node.dtype.name, node.shape)
    if isinstance(node, dict):
        return type(node)((key, _copy(value, ties)) for key, value in node.items())
    if isinstance(node, list):
        return [_copy(value, ties) for value in node]
    if isinstance(node, tuple):
        return tuple(_copy(value, ties) for value in node)
    assert not callable(node), f"cannot be stored: {node!r}"
    return node


def _map(node, leaf):
    if isinstance(node, Composite):
        return Composite(node.kind, node.head, _map(node.parts, leaf))
    if isinstance(node, Cell):
        return leaf(node)
    if isinstance(node, dict):
        return type(node)((key, _map(value, leaf)) for key, value in node.items())
    if isinstance(node, list | tuple):
        return type(node)(_map(value, leaf) for value in node)
    return node


def _own(node):
    if isinstance(node, Composite):
        return _own(node.parts["0"])
    if isinstance(node, dict):
        return type(node)((key, _own(value)) for key, value in node.items())
    return node


def _part_of(target, saved):
    """The saved parts that a target wants: one rank's, or several by rank."""
    if not isinstance(saved, Composite):
        return saved
    parts = {int(key): part for key, part in saved.parts.items()}
    return {key: parts[key] for key in target} if isinstance(target, PerRankValues) else parts[0]


class Checkpoint:
    """One save; `data` is bytes, so nothing can be shared with the training by accident."""

    def __init__(self, data: bytes, not_captured: tuple[str, ...] = ()) -> None:
        self.data = data
        self.not_captured = not_captured

    @classmethod
    def of_tree(cls, tree) -> Checkpoint:
        return cls(pickle.dumps(_copy(tree, {})))

    @property
    def tree(self):
        return pickle.loads(self.data)

    @property
    def saved(self) -> SavedTree:
        return SavedTree(_map(self.tree, lambda cell: TensorSpec("", cell.dtype, cell.shape, cell.kind)))

    def values(self):
        """The whole tree as new objects, as its only rank sees it."""
        return _own(_map(self.tree, lambda cell: cell.value))

    def restore(self, state, *, strict=True, skip_samples=0, tree=None) -> list[str]:
        targets = state.restore_targets(self.saved, skip_samples=skip_samples)
        problems: list[str] = []
        saved = self.tree
        _compare(targets, saved, "", problems)
        if strict and problems:
            raise StateMismatchError("; ".join(problems), problems=problems)
        return state.install(_fill(targets, saved), skip_samples=skip_samples)


def save(state, step=1) -> Checkpoint:
    tree, not_captured = state.capture_state(step)
    return Checkpoint(pickle.dumps(_copy(tree, {})), not_captured)


def _compare(target, saved, path, problems):
    if isinstance(target, PerRank):
        target = target.value
    saved = _part_of(target, saved)
    if target is LOAD:
        return
    if isinstance(target, LoadLike):
        target = target.like.detach().to(getattr(torch, saved.dtype))
    if isinstance(saved, Cell):
        here = (str(target.dtype).removeprefix("torch."), tuple(target.shape))
        if here != (saved.dtype, saved.shape):
            problems.append(f"{path}: saved {saved.dtype}{saved.shape}, here {here[0]}{here[1]}")
    elif isinstance(target, dict):
        problems.extend(f"missing {path}.{key}" for key in target if key not in saved)
        problems.extend(f"unexpected {path}.{key}" for key in saved if key not in target)
        for key in target:
            if key in saved:
                _compare(target[key], saved[key], f"{path}.{key}", problems)
    elif isinstance(target, list):
        assert len(target) == len(saved)
        for index, (one, other) in enumerate(zip(target, saved, strict=True)):
            _compare(one, other, f"{path}[{index}]", problems)


def _fill(target, saved):
    if isinstance(target, PerRank):
        return dataclasses.replace(target, value=_fill(target.value, saved))
    saved = _part_of(target, saved)
    if isinstance(target, PerRankValues):
        return PerRankValues({key: _fill(part, saved[key]) for key, part in target.items()}, 1)
    if target is LOAD:
        return _map(saved, lambda cell: cell.value)
    if isinstance(target, LoadLike):
        return torch.empty_like(target.like.detach(), dtype=saved.value.dtype).copy_(saved.value)
    if isinstance(saved, Cell):
        if isinstance(target, torch.Tensor):
            with torch.no_grad():
                target.copy_(saved.value)
        else:
            target[...] = saved.value
        return target
    if isinstance(target, dict):
        return {key: _fill(value, saved[key]) if key in saved else LOAD for key, value in target.items()}
    if isinstance(target, list):
        return [_fill(one, other) for one, other in zip(target, saved, strict=True)]
    return target


def same(one, other) -> bool:
    """Equal in type, dtype, shape and every bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.detach()
            .cpu()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(other.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
