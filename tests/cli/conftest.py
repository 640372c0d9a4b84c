"""A small store to look at, and two ways to call the command: in this process, and as a person does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.app import app

CHUNK = 4096


@dataclasses.dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Answer]


@pytest.fixture
def cli(monkeypatch, tmp_path) -> Cli:
    """Calls the command in this process."""
    monkeypatch.delenv("CKPTSTORE", raising=False)
    monkeypatch.delenv("CKPTSTORE_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*args: object, env: Mapping[str, str] | None = None) -> Answer:
        result = CliRunner().invoke(app, [str(arg) for arg in args], env=env, prog_name="ckptstore")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def process(tmp_path) -> Cli:
    """Calls the command in a process of its own."""

    def call(*args: object, env: Mapping[str, str] | None = None, **more: Any) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "ckptstore", *map(str, args)],
            env={**clean_environment(), **(env or {})},
            cwd=more.pop("cwd", tmp_path),
            capture_output=True,
            text=True,
            timeout=more.pop("timeout", 100),
            check=False,
            **more,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return call


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CKPTSTORE")}


def state_at(step: int, *, frozen: int = 0) -> dict[str, Any]:
    """Two components; `frozen` is what stays the same from step to step."""
    rng = np.random.default_rng(step)
    return {
        "model": {
            "frozen": np.full((64, 100), frozen, np.float32),
            "weight": rng.standard_normal((8, 100)).astype(np.float32),
        },
        "progress": {"step": step, "ratio": float("nan"), "names": ("a", "b")},
    }


@pytest.fixture
def place(tmp_path) -> Path:
    """A store with run "gpt" (steps 10, 20, 30, of two sessions) and run "other" (no checkpoint but one)."""
    where = tmp_path / "ckpts"
    with ckptstore.init(where, chunk_bytes=CHUNK) as store:
        run = store.run("gpt")
        run.save(10, state_at(10), metrics={"loss": 3.5}, metadata={"note": "first"}).result()
        run.save(20, state_at(20), metrics={"loss": 2.5, "acc": 0.5}, tags=["paper"]).result()
        again = store.run("gpt")
        again.restore(state_at(0))
        again.save(30, state_at(30), metrics={"loss": float("nan")}).result()
        store.run("other").save(1, state_at(1)).result()
    return where


@pytest.fixture
def store(place) -> Iterator[ckptstore.Store]:
    with ckptstore.open(place) as opened:
        yield opened


def damage(place: Path, store: ckptstore.Store, run: str, step: int) -> str:
    """Flips a byte of an object that only this checkpoint has; returns its key."""
    checkpoint = store.run(run)[step]
    others = {key for c in store.run(run).checkpoints() if c != checkpoint for key in c.contents.object_sizes}
    key = next(key for key in checkpoint.contents.object_sizes if key not in others)
    path = place / key
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return key


def damage_record(place: Path, step: int) -> Path:
    """Cuts the commit record of a step short."""
    path = next(path for path in (place / "commits").rglob("*.mp") if f"-{step}-" in path.name)
    path.write_bytes(path.read_bytes()[:-20])
    return path
