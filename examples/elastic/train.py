"""Train a sharded model on as many ranks as there are: lose a host in the middle, and go on with the rest.

Usage, on each host (or twice on one):
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        examples/elastic/train.py --store /shared/ckpts
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import Dataset

import ckptstore
from ckptstore.torch import ResumableLoader

WIDTH = 96


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a small sharded model under torchrun.")
    parser.add_argument("--store", required=True, help="a store that all hosts see; made by `ckptstore init`")
    parser.add_argument("--run", default="elastic", help="the name of the run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps in all (default: %(default)s)")
    parser.add_argument(
        "--save-every", type=int, default=5, help="steps between saves (default: %(default)s)"
    )
    parser.add_argument(
        "--global-batch", type=int, default=16, help="samples a step, of all ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--deadline", type=float, default=120.0, help="seconds that ranks wait for one (default: %(default)s)"
    )
    parser.add_argument("--losses", type=Path, metavar="FILE", help="add a line of JSON for each step")
    return parser.parse_args()


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that follow from their number alone."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(8) * (index + 1) * 0.1)
        return x, x.roll(1).square()


def sharded_model() -> nn.Module:
    """The same weights on any number of ranks, each of which holds its rows."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step."""
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # The position is kept in samples of the whole training, so the global batch stays what it was.
    loader = ResumableLoader(Waves(), args.global_batch // world, seed=1, infinite=True, drop_last=True)

    run = ckptstore.open(args.store).run(args.run, deadline_seconds=args.deadline)
    state = ckptstore.TrainState(model=model, optimizer=optimizer, loader=loader)
    start = run.restore(state, resume="auto") or 0
    if rank == 0:
        print(f"{world} ranks begin at step {start}", flush=True)

    batches = iter(loader)
    for step in range(start + 1, args.steps + 1):
        x, target = next(batches)
        loss = functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if step % args.save_every == 0 or step == args.steps:
            # A rank that died fails the save on all others: they end, and torchrun begins anew without it.
            run.save(step, state, metrics={"loss": mean.item()}).result()
        if rank == 0 and args.losses is not None:
            with args.losses.open("a", encoding="utf-8") as file:
                line = {"step": step, "loss": mean.item(), "ranks": world, "samples": loader.global_position}
                file.write(json.dumps(line) + "\n")
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
