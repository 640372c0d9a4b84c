"""A store as a team would have it after some weeks, made by real saves: for questions, pages and pictures.

A run that was resumed once and forked; a tied head; a vocabulary that grew; a save without its loader; a
damaged checkpoint and one marked invalid. Times, ids and data come out the same each time; durations do not.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore.environment import Environment
from ckptstore.store import Store

START = 1_795_953_600.0  # 2026-11-29T12:00:00Z
RUN, TUNED = "gpt-small", "gpt-small-chat"
TENSOR = "model.embed.weight"
WIDTH, VOCABULARY, BLOCKS = 64, 512, 4
CHUNK_BYTES = 1 << 16


class ExampleEnvironment(Environment):
    """The same clock, host and ids each time."""

    host = "trainer-07"
    boot_id = "boot"
    user = "ann"
    pid = 4242


class Clock:
    """Moved on by hand."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def environment() -> tuple[ExampleEnvironment, Clock]:
    clock = Clock()
    source = random.Random(7)
    return ExampleEnvironment(now=clock, random_bytes=source.randbytes), clock


class Training:
    """Weights that change a little from step to step."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self._source = np.random.default_rng(1)
        normal = self._source.standard_normal
        self.model: dict[str, Any] = {"embed": {"weight": normal((vocabulary, WIDTH)).astype(np.float32)}}
        self.model["blocks"] = {
            str(i): {
                "attention": {"weight": normal((3 * WIDTH, WIDTH)).astype(np.float32)},
                "mlp": {"weight": normal((4 * WIDTH, WIDTH)).astype(np.float32)},
                "norm": {"weight": np.ones(WIDTH, np.float32)},
            }
            for i in range(BLOCKS)
        }
        self.model["head"] = {"weight": self.model["embed"]["weight"]}
        self.lr = 3e-4

    def train(self, *, only_block: int | None = None) -> None:
        for name, block in self.model["blocks"].items():
            if only_block in (None, int(name)):
                for part in block.values():
                    part["weight"] += (
                        self._source.standard_normal(part["weight"].shape).astype(np.float32) / 100
                    )
        if only_block is None:
            weight = self.model["embed"]["weight"]
            weight[:256] += self._source.standard_normal((256, WIDTH)).astype(np.float32) / 100

    def grow(self, rows: int) -> None:
        more = self._source.standard_normal((rows, WIDTH)).astype(np.float32)
        grown = np.concatenate([self.model["embed"]["weight"], more])
        self.model["embed"]["weight"] = self.model["head"]["weight"] = grown

    def state(self, step: int, *, loader: bool = True) -> dict[str, Any]:
        self.lr *= 0.97
        state: dict[str, Any] = {
            "model": self.model,
            "optimizer": {
                "exp_avg": {
                    name: block["mlp"]["weight"] / np.float32(step)
                    for name, block in self.model["blocks"].items()
                },
                "param_groups": [{"lr": self.lr, "betas": (0.9, 0.95)}],
            },
        }
        return (
            {**state, "loader": {"epoch": step // 300, "position": np.array([step * 8])}} if loader else state
        )


def make(folder: Path) -> Store:
    """The store, in an empty or absent folder."""
    env, clock = environment()
    store = ckptstore.init(folder, chunk_bytes=CHUNK_BYTES, environment=env)
    training = Training()
    run = store.run(RUN)
    for step in range(100, 700, 100):
        _save(run, training, step, clock)
    with ckptstore.open(folder, environment=env) as again:
        resumed = again.run(RUN)
        resumed.restore({"model": training.model}, strict=False)
        for step in range(700, 1100, 100):
            _save(resumed, training, step, clock, loader=step != 900)
        resumed.tag(500, "release-candidate")
        resumed.invalidate(800, "loss spike: a batch of broken tokens")
        tuned = again.run(TUNED)
        tuned.fork_from(resumed[1000])
        for step in range(1010, 1060, 10):
            clock.now += 300
            if step == 1030:
                training.grow(64)
            training.train(only_block=3)
            tuned.save(step, training.state(step), metrics={"loss": 2 - (step - 1000) / 50}).result()
        again.verify(runs=[RUN])
        damage(folder, again, RUN, 200)
        clock.now += 3600
        again.verify(refs=[f"{RUN}@200"])
    return store


def _save(run: ckptstore.Run, training: Training, step: int, clock: Clock, *, loader: bool = True) -> None:
    clock.now += 900
    training.train()
    loss = 2.2 + 4.5 * math.exp(-step / 250) + (3.0 if step == 800 else 0.0)
    val_loss = loss + 0.05 + max(0, step - 800) / 2000
    metrics = {"loss": round(loss, 4), "val_loss": round(val_loss, 4)}
    run.save(
        step, training.state(step, loader=loader), metrics=metrics, metadata={"tokens": step * 65_536}
    ).result()


def damage(folder: Path, store: Store, run: str, step: int) -> None:
    """Flips a byte of an object that only this checkpoint needs."""
    mine = store.run(run)[step]
    others = {key for c in store.run(run).checkpoints() if c.step != step for key in c.contents.object_sizes}
    path = folder / min(set(mine.contents.object_sizes) - others)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
