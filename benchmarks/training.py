"""A small training on the CPU, for what saving costs it: fixed work per step, all cores, AdamW."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

_WIDTH = 2048
_BATCH = 64
_BYTES_PER_PARAMETER = 12  # the weight and two moments, four bytes each


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps done in a window, and how long the window was, up to the end of its last step."""

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


class Training:
    """Square layers, as many as make the model and both moments at least `mib` MiB.

    They are normalized, so that gradients vanish in none of them and every large tensor changes in each step.
    """

    def __init__(self, mib: float, seed: int = 0) -> None:
        torch.manual_seed(seed)
        layer_bytes = (_WIDTH * _WIDTH + _WIDTH) * _BYTES_PER_PARAMETER
        count = max(1, -(-int(mib * (1 << 20)) // layer_bytes))
        layers: list[torch.nn.Module] = []
        for _ in range(count):
            layers += [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.LayerNorm(_WIDTH), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = torch.randn(_BATCH, _WIDTH)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """What is saved: the state dicts, whose tensors are those that the next step changes in place."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def state_bytes(self) -> int:
        moments = self.optimizer.state_dict()["state"].values()
        return sum(
            tensor.nbytes for group in (self.model.state_dict(), *moments) for tensor in group.values()
        )

    def run(self, seconds: float, begun: float | None = None) -> Pace:
        """Trains until `seconds` after `begun` (default now), and to the end of the step of that moment."""
        start = time.perf_counter() if begun is None else begun
        steps = 0
        while True:
            self.step()
            steps += 1
            spent = time.perf_counter() - start
            if spent >= seconds:
                return Pace(steps, spent)
