"""A small training that uses everything which a resume can get wrong; also run as the new process.

`python -m tests.roundtrip.resume_exact SCENARIO STEPS STORE...` resumes from each store in turn with
everything made otherwise, trains on to STEPS, and writes losses and final states to standard output.
"""

import pickle
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ckptstore
from ckptstore.shards import MayDiffer, PerRank
from ckptstore.torch import ResumableLoader

SCENARIOS = ("plain", "bf16", "scaler")


class Noisy(Dataset):
    """Samples that draw from all three global random states."""

    def __len__(self):
        return 30

    def __getitem__(self, i):
        x = torch.full((6,), float(i) / 30) + 0.1 * torch.randn(6)
        return x + random.random() * 0.1, torch.tensor(float(i % 3) + 0.1 * float(np.random.rand()))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.late = nn.Linear(16, 16)  # without a gradient, and so without optimizer state, before step 9
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 1)
        self.last_again = self.last  # tied

    def forward(self, x, use_late):
        x = self.drop(self.norm(torch.relu(self.first(x))))
        x = x + self.frozen(x)
        if use_late:
            x = x + self.late(x)
        return self.last(x).squeeze(-1)


class MasterAdam(torch.optim.AdamW):
    """Weights in bfloat16; moments and a master copy in float32."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["master"] = p.detach().float().clone()
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                grad = p.grad.float()
                state["exp_avg"].lerp_(grad, 0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
                state["master"].mul_(1 - group["lr"] * group["weight_decay"])
                state["master"].addcdiv_(
                    state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-group["lr"]
                )
                p.copy_(state["master"])


class Training:
    def __init__(self, scenario, seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.dtype = torch.bfloat16 if scenario == "bf16" else torch.float32
        self.model = Net().to(self.dtype)
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1, "note": ("matrices", None)},
            {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
            {"params": []},
        ]
        make = MasterAdam if scenario == "bf16" else torch.optim.AdamW
        self.optimizer = make(groups, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=64.0, growth_interval=4, enabled=scenario == "scaler"
        )
        self.noise = torch.Generator().manual_seed(seed)
        self.extra = {"seen": [], "ema": torch.zeros(()), "best": float("nan")}
        self.state = ckptstore.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            loader=ResumableLoader(Noisy(), 4, seed=11),
            generators={"noise": self.noise},
            extra=self.extra,
        )
        self.loader = next(iter(self.state._positions.loaders.parts.values()))

    def run(self, start, steps):
        """Trains from step `start` + 1 to `steps`; yields (step, loss) after each."""
        at = start
        while at < steps:
            for x, y in self.loader:
                at += 1
                x = (x + 0.01 * torch.randn(x.shape, generator=self.noise)).to(self.dtype)
                self.optimizer.zero_grad(set_to_none=True)
                loss = functional.mse_loss(self.model(x, use_late=at >= 9).float(), y)
                self.scaler.scale(loss).backward()
                if at == 6 and self.scaler.is_enabled():
                    self.model.last.weight.grad.fill_(float("inf"))  # a step that the scaler skips
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.extra["ema"].lerp_(loss.detach(), 0.1)
                self.extra["seen"] = [*self.extra["seen"][-3:], at]
                yield at, loss.item()
                if at == steps:
                    return

    def everything(self, step):
        """What the next step depends on, as plain objects."""
        tree, _ = self.state.capture_state(step)
        return pickle.dumps(_plain(tree))

    def draws(self):
        """The next numbers of every random state."""
        return (
            random.random(),
            float(np.random.rand()),
            torch.rand(1).item(),
            torch.rand(1, generator=self.noise).item(),
        )


def _plain(value):
    if isinstance(value, PerRank | MayDiffer):
        return _plain(value.value)
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        raw = (
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if value.numel()
            else b""
        )
        return (str(value.dtype), tuple(value.shape), raw)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    return (type(value).__name__, repr(value))


def resume(location, scenario, steps):
    training = Training(scenario, seed=999)  # nothing here is as it was
    run = ckptstore.open(location).run("r")
    start = run.restore(training.state)
    losses = list(training.run(start, steps))
    return start, losses, training.everything(steps), training.draws(), run.restored.notes


def main():
    scenario, steps, *locations = sys.argv[1:]
    results = [resume(location, scenario, int(steps)) for location in locations]
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    main()
