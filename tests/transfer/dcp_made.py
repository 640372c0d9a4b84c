"""Directories that torch.distributed.checkpoint itself writes, and what it reads."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def dcp_save(state, path, *, flatten=True, **writer):
    """As one process saves it; older torch versions flattened less."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(path, **writer),
            planner=DefaultSavePlanner(flatten_state_dict=flatten),
            no_dist=True,
        )
    return path


def dcp_load(path, into=None):
    """All of it, or what `into` has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if into is not None:
            dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)
            return into
        file = Path(path).with_suffix(".pt")
        dcp_to_torch_save(path, file)
        return torch.load(file, weights_only=False)


def read_metadata(path):
    return pickle.loads((Path(path) / ".metadata").read_bytes())


def write_metadata(path, metadata):
    (Path(path) / ".metadata").write_bytes(pickle.dumps(metadata))


def keys_of(path):
    """Names, what each is, and where it lies in the nested state."""
    found = read_metadata(path)
    described = {
        name: (tuple(item.size), item.properties.dtype) if hasattr(item, "size") else None
        for name, item in found.state_dict_metadata.items()
    }
    return described, found.planner_data


def optimizer_state(flat):
    """Of a small model that took two steps, by get_state_dict; nested or flattened."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 1e-3}, {"params": [*model[1:].parameters()], "lr": 1e-4}]
    )
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, states = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": states, "step": 2}
