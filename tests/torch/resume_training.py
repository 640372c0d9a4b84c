"""A small training with everything in it; run as a program it continues from a checkpoint file.

python resume_training.py SCENARIO CHECKPOINT STEPS  ->  pickled losses and final state on stdout
"""

from __future__ import annotations

import pickle
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from ckptstore.torch import ResumableLoader, TrainState
from tests.torch.fake_core import Checkpoint, save


class Noisy(Dataset):
    """Augmented with all three global random states, in the main process."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 6) * index + random.random() + np.random.normal()
        return x + torch.randn(6), torch.tensor(float(index % 3))


class Fixed(Dataset):
    """The same everywhere: draws made in workers cannot be resumed within an epoch."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.linspace(0, 1, 6) * index, torch.tensor(float(index % 3))


class MasterSGD(torch.optim.SGD):
    """bf16 weights; fp32 master copies and moments in its state."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                entry = self.state[p]
                if not entry:
                    entry["master"] = p.detach().float()
                    entry["moment"] = torch.zeros_like(entry["master"])
                    entry["steps"] = 0
                entry["steps"] += 1
                entry["moment"].mul_(0.9).add_(p.grad.float())
                entry["master"].add_(entry["moment"], alpha=-group["lr"])
                p.copy_(entry["master"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.late = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, x, use_late):
        x = self.drop(self.norm(torch.relu(self.first(x))))
        if use_late:
            x = x + self.late(x)
        return self.last(x).squeeze(-1)


class Training:
    def __init__(self, scenario, seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        workers = {"num_workers": 2, "multiprocessing_context": "fork"} if scenario == "workers" else {}
        self.scenario = scenario
        self.dtype = torch.bfloat16 if scenario == "bf16" else torch.float32
        self.model = Net().to(self.dtype)
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for n, p in self.model.named_parameters() if p.ndim <= 1], "weight_decay": 0.0},
            {"params": []},
        ]
        make = MasterSGD if scenario == "bf16" else torch.optim.AdamW
        self.optimizer = make(groups, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=64.0, growth_interval=4, enabled=scenario == "scaler"
        )
        data = Noisy() if scenario != "workers" else Fixed()
        self.loader = ResumableLoader(data, 4, seed=11, **workers)
        self.noise = torch.Generator().manual_seed(seed)
        self.extra = {"seen": [], "ema": torch.zeros(())}
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            loader=self.loader,
            generators={"noise": self.noise},
            extra=self.extra,
        )

    def run(self, steps):
        """Trains on to the given step; yields after each with its loss."""
        at = self.state.step
        while at < steps:
            for x, y in self.loader:
                at += 1
                x = (x + 0.01 * torch.randn(x.shape, generator=self.noise)).to(self.dtype)
                self.optimizer.zero_grad(set_to_none=True)
                # `late` has no gradient, and so no optimizer state, before step 9.
                loss = functional.mse_loss(self.model(x, use_late=at >= 9).float(), y)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.extra["ema"].lerp_(loss.detach(), 0.1)
                self.extra["seen"] = [*self.extra["seen"][-3:], at]
                yield at, loss.item()
                if at == steps:
                    return


def main():
    scenario, path, steps = sys.argv[1:]
    results = {}
    with open(path, "rb") as file:
        checkpoints = pickle.load(file)
    for at, data in checkpoints.items():
        training = Training(scenario, seed=999 + at)  # nothing here is as it was
        Checkpoint(data).restore(training.state)
        losses = list(training.run(int(steps)))
        results[at] = losses, save(training.state, int(steps)).values()
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    main()
