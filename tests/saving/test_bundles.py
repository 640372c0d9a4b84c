"""Tiny tensors are handled together: the same bytes, digests and places come out as one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.save import cut as cutting
from ckptstore.save.arena import Arena
from ckptstore.save.capture import Waves, capture
from ckptstore.save.cut import Bundle, Share, cut
from ckptstore.save.flatten import flatten_state
from tests.capture.made import bytes_of

CHUNK_BYTES = 64 << 10


def _state(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of all sizes in three components, empty ones and some that are no plain memory between them."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, dict[str, torch.Tensor]] = {"a": {}, "b": {}, "c": {}}
    for number in range(200):
        size = chance.choice([0, 1, 3, 7, 7, 7, 256, 256, 3000, 5000, 40_000])
        made = torch.randn(size, generator=generator)
        if chance.random() < 0.1:
            made = torch.randn(size, 2, generator=generator).t()
        if chance.random() < 0.1:
            made = made.to(torch.float16)
        state[chance.choice("abc")][f"{number:03}"] = made
    return state


@pytest.mark.parametrize("seed", range(6))
def test_bundles_hold_what_the_pieces_hold_that_they_stand_for(seed, monkeypatch):
    monkeypatch.setattr(cutting, "_BUNDLE_BYTES", 9000)
    flat = flatten_state(_state(seed), CHUNK_BYTES)
    share = Share.everything(flat.layout)
    if seed % 2:  # others write every seventh chunk
        share.duty[::7] = False
        share.compare[::14] = True
    one_by_one = list(cut(flat.layout, flat.sources, share))
    together = list(cut(flat.layout, flat.sources, share, flat.views))
    bundles = [piece for piece in together if isinstance(piece, Bundle)]
    assert len(bundles) > 3
    assert not any(isinstance(piece, Bundle) for piece in one_by_one)
    assert bytes_of(together) == bytes_of(one_by_one)
    assert [piece.row for piece in together] == sorted(piece.row for piece in together)
    component = {piece.row: piece.component for piece in one_by_one}
    for bundle in bundles:
        rows = range(bundle.row, bundle.row + len(bundle.sizes))
        assert {component[row] for row in rows} == {bundle.component}
        assert share.duty[list(rows)].all()
        assert not share.compare[list(rows)].any()
        assert sum(bundle.sizes) == bundle.nbytes <= 9000 + CHUNK_BYTES // 4


def test_a_captured_bundle_keeps_its_bytes_when_training_goes_on():
    state = _state(1)
    flat = flatten_state(state, CHUNK_BYTES)
    pieces = list(cut(flat.layout, flat.sources, Share.everything(flat.layout), flat.views))
    before = bytes_of(pieces)
    arena = Arena(64 << 20)
    waves = Waves(arena)
    capture(pieces, arena, waves)
    for tensors in state.values():
        for tensor in tensors.values():
            tensor.fill_(-1)
    waves.end()
    assert bytes_of(piece for wave in waves for piece in wave) == before


def test_of_many_tiny_tensors_only_the_changed_ones_are_written(tmp_path):
    """Reuse is decided for each tensor, not for what happens to be handled with it."""
    state = {"model": {f"{n:04}": torch.full((64,), float(n)) for n in range(2000)}}
    with ckptstore.init(tmp_path / "store") as store:
        run = store.run("train")
        run.save(1, state).result()
        changed = range(5, 2000, 400)
        for number in changed:
            state["model"][f"{number:04}"].neg_()
        state["model"]["0100"].copy_(state["model"]["0101"])  # equal to another one: not written either
        pending = run.save(2, state)
        checkpoint = pending.result()
        assert pending.new_bytes == len(changed) * 64 * 4
        loaded = checkpoint.load()["model"]
        assert all(torch.equal(loaded[name], value) for name, value in state["model"].items())
        assert np.array_equal(store.run("train")[1].load()["model"]["0005"], np.full(64, 5.0, np.float32))


def test_a_component_of_many_packs_is_gone_through_once_and_not_for_each(tmp_path, monkeypatch):
    """Only what a pack border cuts in two is looked at a second time."""
    monkeypatch.setattr(cutting, "_BUNDLE_BYTES", 2000)
    looked: list[int] = []
    parts = Bundle.parts
    monkeypatch.setattr(Bundle, "parts", lambda bundle: looked.append(bundle.row) or parts(bundle))
    state = {"model": {f"{n:04}": torch.full((60,), float(n)) for n in range(2000)}}
    with ckptstore.init(tmp_path / "store", chunk_bytes=4096) as store:
        checkpoint = store.run("train").save(1, state).result()
        packs = {key for key in checkpoint.contents.keys.keys if key.startswith("packs/")}
        assert len(packs) > 25
        loaded = checkpoint.load()["model"]
        assert all(torch.equal(loaded[name], value) for name, value in state["model"].items())
    hashed = len(set(looked))
    assert hashed > 100
    assert len(looked) <= hashed + 2 * len(packs)
