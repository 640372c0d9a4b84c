"""States for the tests, and looking at what failed."""

from __future__ import annotations

import datetime
import pathlib

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException

NO_GROUP = "ignore:torch.distributed is :UserWarning"


def training(seed=0, steps=1):
    """A small model and its optimizer after some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": [*model[1].parameters(), *model[2].parameters()]},
        ]
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def nested(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(7, 5, generator=generator),
            "b": torch.randn(5, generator=generator).bfloat16(),
        },
        "layers": [
            {"w": torch.randn(3, generator=generator)},
            {"w": torch.arange(4), "name": f"second {seed}"},
        ],
        "mixed": [torch.randn(2, generator=generator), seed, "text"],
        "numbers": [1, 2, seed],
        "step": seed,
        "name": f"run {seed}",
        "pair": (seed, torch.randn(2, generator=generator)),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3) + seed,
        "scalar": torch.tensor(seed, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "none": None,
        "flag": True,
        "when": datetime.datetime(2025, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "where": pathlib.Path("a/b"),
        "set": {seed, 7},
        "blob": bytes(range(256)) * 300,
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
    }


def same(a, b):
    """Equal in structure, type, dtype and bits."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(
            a.contiguous().view(torch.uint8) if a.ndim else a,
            b.contiguous().view(torch.uint8) if b.ndim else b,
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(map(str, a)) == list(map(str, b))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def blank(state):
    """The same state with other content: what a load has to fill."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, 99)
    if isinstance(state, dict):
        return {key: blank(item) for key, item in state.items()}
    if isinstance(state, list):
        return [blank(item) for item in state]
    return None


def failures(caught):
    """Rank -> error of a CheckpointException."""
    assert isinstance(caught.value, CheckpointException), caught.value
    return {rank: pair[0] for rank, pair in caught.value.failures.items()}


def failure(caught):
    """The one error of a CheckpointException."""
    [error] = failures(caught).values()
    return error
