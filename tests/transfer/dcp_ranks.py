"""Two gloo processes save DTensors through torch's DCP: ``python dcp_ranks.py RANK RENDEZVOUS DIRECTORY``."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ROWS = 7
"""Odd, so that the halves differ."""


def whole():
    """The logical state."""
    grid = torch.arange(ROWS * 6, dtype=torch.float32).reshape(ROWS, 6)
    return {
        "model": {
            "rows": grid,
            "columns": grid.bfloat16() + 0.5,
            "one_row": torch.arange(5.0).reshape(1, 5),
            "deep": torch.arange(4 * 5 * 6, dtype=torch.int64).reshape(4, 5, 6),
            "replicated": torch.arange(3.0),
            "plain": torch.tensor([2**40]),
        },
        "steps": [1, 2],
        "name": "of all ranks",
    }


def main(rank, rendezvous, directory):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = whole()
    model = state["model"]
    placements = {
        "rows": Shard(0),
        "columns": Shard(1),
        "one_row": Shard(0),
        "deep": Shard(1),
        "replicated": Replicate(),
    }
    for name, placement in placements.items():
        model[name] = distribute_tensor(model[name], mesh, [placement])
    dcp.save(state, checkpoint_id=directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
