"""A small training for several ranks, in several parallel layouts: what the ranks of a test run.

Everything here is imported by the rank processes.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import Dataset

import ckptstore
from ckptstore.torch import ResumableLoader, TrainState

GLOBAL_BATCH = 12
FEATURES = 5


class Samples(Dataset):
    """60 samples that carry their number."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        x = torch.sin(torch.arange(FEATURES) * (index + 1.0))
        return index, x, x.sum().reshape(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(7, 14)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(14, 7)

    def forward(self, x):
        return x + self.down(self.drop(functional.gelu(self.up(x))))


class Net(nn.Module):
    """7 rows do not divide among 2, 3, 4 or 6 ranks, and 2 rows leave some with nothing."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(requires_grad=False)
        self.unused = nn.Linear(7, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.frozen(self.norm(x))


class Training:
    """Two models and two optimizers on all ranks of this process group.

    Args:
        layout: "fsdp", "tp" (times 2 ranks, FSDP over the rest), "ddp", "compile" (in DDP) or "bare".
        kind: of AdamW: "foreach", "fused" or "plain".
        seed: of the initial weights.
    """

    def __init__(self, layout: str, kind: str, seed: int = 0, **options) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        net, head = Net(), nn.Linear(7, 1)
        self.net: nn.Module = net
        self.head: nn.Module = head
        self.data_rank, self.data_world = rank, world
        if layout == "fsdp":
            self._shard(init_device_mesh("cpu", (world,)))
        elif layout == "tp":
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            for block in net.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            self._shard(mesh["dp"])
            self.data_rank, self.data_world = mesh.get_local_rank("dp"), world // 2
        elif layout in ("ddp", "compile"):
            inner = torch.compile(self.net, backend="eager") if layout == "compile" else self.net
            self.net = nn.parallel.DistributedDataParallel(inner, find_unused_parameters=True)
            self.head = nn.parallel.DistributedDataParallel(self.head)
        flags: dict[str, Any] = {} if kind == "plain" else {kind: True}
        decayed = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() <= 1]
        self.adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.1},
                {"params": others, "weight_decay": 0.0},
                {"params": [], "lr": 7.0},
            ],
            lr=0.01,
            **flags,
        )
        self.sgd = torch.optim.SGD(self.head.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.adam, lambda step: 0.9**step)
        self.loader = ResumableLoader(
            Samples(),
            GLOBAL_BATCH // self.data_world,
            seed=3,
            infinite=True,
            rank=self.data_rank,
            world_size=self.data_world,
        )
        self.order = torch.Generator().manual_seed(11)
        torch.manual_seed(1000 * seed + self.data_rank)  # tensor parallel ranks drop the same
        random.seed(seed)
        np.random.seed(seed)
        self.state = TrainState(
            model={"net": self.net, "head": self.head},
            optimizer={"adam": self.adam, "sgd": self.sgd},
            scheduler=self.scheduler,
            loader=self.loader,
            generators={"order": self.order},
            **options,
        )

    def _shard(self, mesh) -> None:
        assert isinstance(self.net, Net)
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        fully_shard(self.head, mesh=mesh)

    def train(self, steps: int) -> list[tuple[list[int], float]]:
        """(numbers of this rank's samples, loss) of each step."""
        self.net.train()
        done = []
        for numbers, x, y in self.loader:
            torch.rand(1, generator=self.order)
            loss = functional.mse_loss(self.head(self.net(x)), y)
            self.adam.zero_grad()
            self.sgd.zero_grad()
            loss.backward()
            self.adam.step()
            self.sgd.step()
            self.scheduler.step()
            done.append((numbers.tolist(), loss.item()))
            if len(done) == steps:
                return done
        raise AssertionError("the loader is infinite")

    def fixed_loss(self) -> float:
        """Of one batch that is the same on all ranks."""
        self.net.eval()
        _, x, y = torch.utils.data.default_collate([Samples()[index] for index in range(GLOBAL_BATCH)])
        with torch.no_grad():
            return functional.mse_loss(self.head(self.net(x)), y).item()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and optimizer state by name, whole."""
        self.fixed_loss()  # leaves fully_shard's root gathered: a TrainState must see shards all the same
        tree, _ = self.state.capture_state(self.state.step)
        found: dict[str, torch.Tensor] = {}
        _collect({"model": tree["model"], "optimizer": tree["optimizer"]}, "", found)
        return found


def _collect(node, name, found) -> None:
    node = getattr(node, "value", node)
    if isinstance(node, DTensor):
        found[name] = node.full_tensor().detach().clone()
    elif isinstance(node, torch.Tensor):
        found[name] = node.detach().clone()
    elif isinstance(node, dict):
        for key, item in node.items():
            _collect(item, f"{name}.{key}", found)


def save(rank, world, directory, layout, kinds, steps=3, further=2):
    """Trains, saves and trains on.

    Returns:
        By kind: (whole tensors when it was saved, the fixed loss then, what came after).
    """
    results = {}
    for kind in kinds:
        with ckptstore.open(directory) as store:
            run = store.run(f"{layout}-{kind}")
            training = Training(layout, kind)
            assert run.restore(training.state) is None
            training.train(steps)
            # Taken before: looking at tensors and losses draws nothing.
            tensors, loss = training.tensors(), training.fixed_loss()
            run.save(steps, training.state).result()
            results[kind] = tensors, loss, training.train(further)
            run.close()
    return results


def load(rank, world, directory, saved_layout, layout, kinds, further=2, **options):
    """Restores into a training with other weights.

    Returns:
        By kind: (whole tensors, the fixed loss, what came after, notes of the report, random states of
        torch and of the generator "order").
    """
    results = {}
    for kind in kinds:
        with ckptstore.open(directory) as store:
            run = store.run(f"{saved_layout}-{kind}")
            training = Training(layout, kind, seed=5, **options)
            step = run.restore(training.state)
            assert step == training.state.step == 3
            restored = run.restored
            check_moments(training)
            tensors, loss = training.tensors(), training.fixed_loss()
            random_state = torch.get_rng_state()
            order = training.order.get_state()
            after = training.train(further)
            results[kind] = (tensors, loss, after, restored.notes, random_state, order)
    return results


def check_moments(training) -> None:
    """Moments are sharded as their parameters, and only what has had a gradient has any."""
    for parameter, entry in training.adam.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert type(entry[key]) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
            if isinstance(parameter, DTensor):
                assert entry[key].placements == parameter.placements
                assert entry[key].device_mesh == parameter.device_mesh
    names = [name for name, p in training.net.named_parameters() if p in training.adam.state]
    assert not [name for name in names if "frozen" in name or "unused" in name]
    assert len(names) == 4 * len(training_blocks(training)) + 4


def training_blocks(training):
    net = getattr(training.net, "module", training.net)
    return getattr(net, "_orig_mod", net).blocks
