"""Random states of many ranks.

On as many ranks as saved them each gets its own back, exactly. On another number what was common to all
stays, and the rest is seeded anew.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from blake3 import blake3

from ckptstore.errors import UsageError
from ckptstore.model.targets import LOAD, PerRankValues
from ckptstore.shards import PerRank
from ckptstore.torch import rng
from ckptstore.torch.per_rank import parts_of, world_size_of

RngPolicy = Literal["reseed", "keep", "exact"]
RNG_POLICIES: Final[tuple[str, ...]] = get_args(RngPolicy)

_Path = tuple[Any, ...]


class RandomStates:
    """The random states of a training, and what becomes of them on another number of ranks.

    Raises:
        UsageError: an unknown policy, or something that is no generator.
    """

    def __init__(self, policy: RngPolicy, generators: Mapping[str, Any]) -> None:
        if policy not in RNG_POLICIES:
            raise UsageError(f"rng={policy!r}: must be one of {', '.join(RNG_POLICIES)}")
        rng.check_generators(generators)
        self._policy = policy
        self._generators = dict(generators)

    def capture(self) -> PerRank:
        """Those of this rank."""
        return PerRank(rng.capture(self._generators))

    def targets(self, saved: Any, place: tuple[int, int]) -> tuple[Any, list[str]]:
        """What is needed of what all ranks saved, and what stands against taking it.

        Args:
            saved: the saved tree under ``"rng"``.
            place: (rank, world size) of this process.
        """
        parts = parts_of(saved)
        rank, world_size = place
        saved_by = world_size_of(saved)
        if saved_by == world_size and rank in parts:
            return rng.targets(parts[rank], self._generators)
        if self._policy == "exact":
            problem = f"rng: random states of {saved_by} ranks were saved, here are {world_size}"
            return {}, [f"{problem}, and rng='exact' was asked for"]
        needed = [] if self._policy == "keep" else sorted({min(parts), max(parts)})
        wanted: dict[int, Any] = {}
        problems: list[str] = []
        for key in needed:
            wanted[key], problems = rng.targets(parts[key], self._generators)
        return PerRankValues(wanted, saved_by), problems

    def install(self, tree: Any, place: tuple[int, int]) -> list[str]:
        """Puts them back, or seeds them anew; call it when nothing afterwards draws.

        Returns:
            Notes on what is not as it was.
        """
        if tree is LOAD:
            return []
        if not isinstance(tree, PerRankValues):
            return rng.install(tree, self._generators)
        changed = f"random states of {tree.world_size} ranks were saved, here are {place[1]}"
        parts = {key: part for key, part in tree.items() if part is not LOAD}
        if self._policy == "keep":
            return [f"{changed}: those of this process stay as they are"]
        return _reseed(parts, self._generators, place, changed) if parts else []


def _reseed(
    saved: Mapping[int, Mapping[str, Any]], generators: Mapping[str, Any], place: tuple[int, int], why: str
) -> list[str]:
    """Random states for another number of ranks than they were saved by.

    A stream that the lowest and the highest saved rank have in the same state is taken to be the same on
    all by design (an order of the data, say) and is put back. All others are seeded anew from what the
    lowest saved and from `place`: so the same restart draws the same again.

    Args:
        saved: by rank; one alone has nothing in common with another.
    """
    lowest, highest = saved[min(saved)], dict(_streams(saved[max(saved)]))
    common = {
        path
        for path, state in _streams(lowest)
        if len(saved) > 1 and state is not LOAD and _digest(state) == _digest(highest.get(path))
    }
    notes = rng.install(_picked(lowest, common), generators)
    seeded = []
    for path, state in _streams(lowest):
        if path in common or state is LOAD:
            continue
        salt = f"{_name(path)} {place[0]} {place[1]}".encode()
        seed = int.from_bytes(blake3(_digest(state) + salt).digest(8), "little") >> 1
        if _seed(path, seed, generators):
            seeded.append(path)
    told = []
    if seeded:
        told.append(f"{', '.join(map(_name, seeded))} seeded anew for each rank")
    if common:
        told.append(f"{', '.join(sorted(map(_name, common)))} put back, having been the same on all")
    return [f"{why}: {'; '.join(told)}", *notes] if told else notes


def _name(path: _Path) -> str:
    return ".".join(map(str, path))


def _streams(tree: Mapping[str, Any]) -> list[tuple[_Path, Any]]:
    """Every single random state in a tree of :func:`ckptstore.torch.rng.capture`, with its place."""
    found: list[tuple[_Path, Any]] = []
    for key, value in tree.items():
        if key in (*rng.ACCELERATORS, "generators") and isinstance(value, Mapping):
            found += [((key, name), state) for name, state in value.items()]
        else:
            found.append(((key,), value))
    return found


def _picked(tree: Mapping[str, Any], paths: set[_Path]) -> dict[str, Any]:
    picked: dict[str, Any] = {}
    for path, state in _streams(tree):
        if path in paths and len(path) == 1:
            picked[path[0]] = state
        elif path in paths:
            picked.setdefault(path[0], {})[path[1]] = state
    return picked


def _digest(state: Any) -> bytes:
    """Of every bit of a random state."""
    digest = blake3()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray):
            digest.update(value.tobytes())
        elif isinstance(value, Mapping):
            for key, item in value.items():
                digest.update(f"{key}:".encode())
                add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            digest.update(f"{value!r},".encode())

    add(state)
    return digest.digest()


def _seed(path: _Path, seed: int, generators: Mapping[str, Any]) -> bool:
    """Seeds one stream; False where there is none here."""
    match path:
        case ("python",):
            random.seed(seed)
        case ("numpy",):
            np.random.seed(np.frombuffer(seed.to_bytes(8, "little"), np.uint32))
        case ("torch",):
            torch.default_generator.manual_seed(seed)
        case ("mps",):
            if not torch.backends.mps.is_available():
                return False
            torch.mps.manual_seed(seed)
        case ("generators", name):
            if name not in generators:
                return False
            _seed_generator(generators[name], seed)
        case (kind, _):
            backend = getattr(torch, kind, None)
            if backend is None or not backend.is_available():
                return False
            backend.manual_seed_all(seed)
        case _:
            return False
    return True


def _seed_generator(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        fresh: Any = type(generator.bit_generator)
        generator.bit_generator.state = fresh(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(np.frombuffer(seed.to_bytes(8, "little"), np.uint32))
    else:
        generator.seed(seed)
