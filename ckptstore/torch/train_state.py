"""Everything that the next step of a training depends on, as one tree."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.model.plain import StatePath
from ckptstore.model.targets import LOAD, PerRankValues, SavedTree
from ckptstore.shards import PerRank
from ckptstore.torch import modules, per_rank
from ckptstore.torch import rng as random_states
from ckptstore.torch.components import Named, form_problems, is_absent, named
from ckptstore.torch.extra import capture_extra, extra_target, install_extra
from ckptstore.torch.loader import is_stateful, position_source
from ckptstore.torch.optimizer import (
    capture_optimizer,
    check_optimizer,
    install_optimizer,
    optimizer_problems,
    optimizer_targets,
)
from ckptstore.torch.reseed import reseed
from ckptstore.torch.sampler import distributed_place

logger = logging.getLogger(__name__)

RngPolicy = Literal["reseed", "keep", "exact"]
RNG_POLICIES: Final[tuple[str, ...]] = get_args(RngPolicy)
_SHOWN = 6

# What a resumed training most probably goes wrong without; the rest many trainings do not have.
_NEEDED = frozenset({"model", "optimizer", "loader"})


class TrainState:
    """What `run.save` saves and `run.restore` puts back, so that the next step is the same, bit for bit.

    Python's, NumPy's and torch's random states (the CPU's, and those of every accelerator that this process
    uses) always come along: they are taken first and put back last.

    `model`, `optimizer`, `scheduler`, `scaler` and `loader` take one, a list or a dict. Everything is read
    when a save is called, so anything may be added to or changed in them before that.

    Args:
        model: modules; saved by the names that the plain module's `state_dict` has, without the prefixes of
            DDP, compile and activation checkpointing.
        optimizer: saved by parameter name, exactly as it stands.
        scheduler: anything with `state_dict`.
        scaler: a GradScaler, or anything with `state_dict`.
        loader: a :class:`~ckptstore.torch.ResumableLoader`, a sampler, or any loader whose `state_dict` says
            what has been trained on.
        generators: the training's own generators by name: torch, NumPy or Python ones.
        extra: a dict of anything else: values, tensors, arrays, objects with `state_dict`. A restore
            updates this dict.
        per_rank: globs over names (``"model.*.amax"``) of what each rank keeps of its own. Everything else
            but random states and positions of foreign loaders is one value for all ranks.
        rng: what becomes of the random states when the number of ranks has changed: "reseed" puts back what
            was the same on all ranks and seeds the rest anew for each rank, "keep" leaves this process's as
            they are, "exact" refuses the checkpoint. On as many ranks they come back exactly.

    Attributes:
        step: of the last save or restore; 0 before.

    Raises:
        UsageError: something given cannot be saved faithfully; the message says what would do.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> state = TrainState(model=model, optimizer=optimizer, extra={"best": 0.5})
    """

    def __init__(
        self,
        *,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        generators: Mapping[str, Any] | None = None,
        extra: dict[Any, Any] | None = None,
        per_rank: Sequence[str] | str = (),
        rng: RngPolicy = "reseed",
    ) -> None:
        self.step = 0
        self.extra = extra
        self._models: Named[nn.Module] = named("model", model)
        self._optimizers: Named[Any] = named("optimizer", optimizer)
        self._stateful: dict[str, Named[Any]] = {
            "scheduler": named("scheduler", scheduler),
            "scaler": named("scaler", scaler),
        }
        loaders: Named[Any] = named("loader", loader)
        sources = {name: position_source(part, loaders.label(name)) for name, part in loaders.parts.items()}
        self._loaders = Named("loader", sources, loaders.single)
        self._has_workers = any(getattr(part, "num_workers", 0) for part in loaders.parts.values())
        self._generators = dict(generators or {})
        self._per_rank = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
        self._rng_policy = rng
        self._given_place: tuple[int, int] | None = None
        self._borrowed: dict[StatePath, int] = {}
        self._said_not_captured = False
        self._check_arguments()

    def _check_arguments(self) -> None:
        for name, model in self._models.parts.items():
            if not isinstance(model, nn.Module):
                raise UsageError(
                    f"{self._models.label(name)} is a {type(model).__name__}, not a torch.nn.Module"
                )
        for parts in self._stateful.values():
            for name, part in parts.parts.items():
                if not is_stateful(part):
                    label = parts.label(name)
                    raise UsageError(f"{label} ({type(part).__name__}) has no state_dict and load_state_dict")
        if self.extra is not None and not isinstance(self.extra, dict):
            raise UsageError(f"extra= is a {type(self.extra).__name__}, not a dict")
        if self._rng_policy not in RNG_POLICIES:
            raise UsageError(f"rng={self._rng_policy!r}: must be one of {', '.join(RNG_POLICIES)}")
        random_states.check_generators(self._generators)
        names = self._names()
        for name, optimizer in self._optimizers.parts.items():
            check_optimizer(optimizer, names, self._optimizers.label(name))

    def _names(self) -> modules.ParameterNames:
        # Made anew each time: models may have been wrapped, sharded or extended since.
        return modules.ParameterNames(self._models.parts)

    def set_place(self, rank: int, world_size: int) -> None:
        """Says which of how many ranks this is, where torch.distributed does not; a run does so by itself."""
        self._given_place = (rank, world_size)

    @property
    def _rank(self) -> tuple[int, int]:
        return self._given_place or distributed_place()

    def _named(self) -> list[Named[Any]]:
        return [self._models, self._optimizers, *self._stateful.values(), self._loaders]

    # --- saving --------------------------------------------------------------------------------

    def capture_state(self, step: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The state as a tree whose tensors are the live ones; nothing in the training changes.

        Args:
            step: the global step that this is the state after.

        Returns:
            The tree, with one top-level key per component, and the sorted names of what a training usually
            has and this one did not give: components; "scaler" only when parameters are float16, since
            nothing else shows that one is in use; "worker-rng" (random states inside the loader's workers,
            which no one can read).

        Raises:
            UsageError: something cannot be saved faithfully; nothing has happened.
        """
        # First: nothing has drawn yet.
        tree: dict[str, Any] = {"rng": PerRank(random_states.capture(self._generators))}
        names = self._names()
        if self._models:
            tree["model"] = self._models.tree(lambda label, part: modules.capture_module(part, label))
        if self._optimizers:
            tree["optimizer"] = self._optimizers.tree(
                lambda label, part: capture_optimizer(part, names, label)
            )
        for component, parts in self._stateful.items():
            if parts:
                tree[component] = parts.tree(lambda _, part: part.state_dict())
        if self._loaders:
            tree["loader"] = {
                "state": self._loaders.tree(lambda _, part: _loader_state(part)),
                "place": self._place(),
            }
        if self.extra is not None:
            tree["extra"] = {key: capture_extra(value) for key, value in self.extra.items()}
        tree["train"] = {
            "step": step,
            "named": {
                parts.component: tuple(parts.parts) for parts in self._named() if parts and not parts.single
            },
        }
        self.step = step
        return per_rank.marked(tree, self._per_rank), self._not_captured()

    def _not_captured(self) -> tuple[str, ...]:
        absent = {parts.component for parts in self._named() if not parts} - {"scaler"}
        if not self._stateful["scaler"] and any(
            parameter.dtype is torch.float16
            for model in self._models.parts.values()
            for parameter in modules.parameters(model).values()
        ):
            absent.add("scaler")
        if self._has_workers:
            absent.add("worker-rng")
        listed = tuple(sorted(absent))
        if listed and not self._said_not_captured:
            level = logging.WARNING if absent & _NEEDED else logging.INFO
            logger.log(level, "not part of the saved state, because it was not given: %s", ", ".join(listed))
            self._said_not_captured = True
        return listed

    def _place(self) -> dict[str, Any]:
        """World size and device mesh that a data position was taken in; its rank is the key of its part."""
        sampler = next((p for p in self._loaders.parts.values() if hasattr(p, "world_size")), None)
        return {"world_size": getattr(sampler, "world_size", self._rank[1]), "mesh": self._mesh()}

    def _mesh(self) -> dict[str, Any] | None:
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        if dtensor is None:
            return None
        for model in self._models.parts.values():
            for parameter in modules.parameters(model).values():
                if isinstance(parameter, dtensor):
                    mesh: Any = parameter.device_mesh
                    return {"shape": tuple(mesh.shape), "names": mesh.mesh_dim_names}
        return None

    # --- restoring -----------------------------------------------------------------------------

    def restore_targets(self, saved: SavedTree, *, skip_samples: int = 0) -> dict[str, Any]:
        """A tree of what is to be filled (tensors) or loaded (LOAD), shaped like the saved one.

        Nothing is changed. What is wanted here and was not saved is a target too, for the caller to report;
        components that were saved and are not given here are left out.

        Args:
            saved: the structure of the checkpoint.
            skip_samples: see `install`.

        Raises:
            StateMismatchError: this training cannot take the checkpoint; all problems are listed.
            UsageError: a part cannot be named, or no loader here can skip samples.
        """
        self._check_skip(skip_samples)
        whole: Mapping[str, Any] = saved.tree
        view = per_rank.OwnView({key: part for key, part in whole.items() if key != "rng"}, self._rank[0])
        tree: Mapping[str, Any] = view.tree
        saved_names: Mapping[str, Any] = tree.get("train", {}).get("named", {})
        problems: list[str] = []
        targets: dict[str, Any] = {"train": LOAD, "rng": LOAD}
        for parts in self._named():
            if parts:
                targets[parts.component] = LOAD
                if parts.component in tree:
                    problems += form_problems(parts, saved_names)
        if problems:
            self._refuse(problems)
        if "rng" in whole:
            targets["rng"], found = self._rng_targets(whole["rng"])
            problems += found
        if self._models:
            targets["model"] = self._models.tree(lambda label, part: modules.module_targets(part, label))
        if self._optimizers and "optimizer" in tree:
            targets["optimizer"], found = self._optimizer_targets(tree["optimizer"])
            problems += found
        for component, parts in self._stateful.items():
            if parts and component in tree:
                targets[component] = parts.tree(lambda _label, _part: LOAD)
                problems += _stateful_problems(parts, tree[component])
        if self._loaders and "loader" in tree:
            targets["loader"] = {"state": self._loaders.tree(lambda _label, _part: LOAD), "place": LOAD}
            problems += _stateful_problems(self._loaders, tree["loader"]["state"])
        if self.extra is not None:
            saved_extra = tree.get("extra", {})
            targets["extra"] = {
                key: extra_target(self.extra.get(key), saved_extra.get(key, LOAD))
                for key in [*saved_extra, *(key for key in self.extra if key not in saved_extra)]
            }
        if problems:
            self._refuse(problems)
        self._borrowed = view.borrowed
        return view.chosen(targets)

    def _rng_targets(self, saved: Any) -> tuple[Any, list[str]]:
        """The own random states on as many ranks as saved them; else what the policy needs."""
        parts = per_rank.parts_of(saved)
        rank, world_size = self._rank
        saved_by = per_rank.world_size_of(saved)
        if saved_by == world_size and rank in parts:
            return random_states.targets(parts[rank], self._generators)
        if self._rng_policy == "exact":
            return {}, [
                f"rng: saved by {saved_by} ranks, here are {world_size}, and rng='exact' was asked for "
                "(rng='reseed' seeds anew)"
            ]
        needed = {} if self._rng_policy == "keep" else {min(parts), max(parts)}
        wanted: dict[int, Any] = {}
        problems: list[str] = []
        for key in sorted(needed):
            wanted[key], problems = random_states.targets(parts[key], self._generators)
        return PerRankValues(wanted, saved_by), problems

    def _optimizer_targets(self, saved: Any) -> tuple[Any, list[str]]:
        names = self._names()
        targets: Any = self._optimizers.tree(lambda _label, _part: LOAD)
        problems: list[str] = []
        for name, optimizer, saved_part in self._optimizers.present(saved):
            found = optimizer_problems(optimizer, saved_part, names, self._optimizers.label(name))
            problems += found
            if found:
                continue
            target = optimizer_targets(optimizer, saved_part, names)
            if self._optimizers.single:
                targets = target
            else:
                targets[name] = target
        return targets, problems

    def _refuse(self, problems: list[str]) -> None:
        count = f"{len(problems)} difference" + ("" if len(problems) == 1 else "s")
        raise StateMismatchError(
            f"this training cannot take the checkpoint ({count}): " + "; ".join(problems),
            problems=problems,
            hint="build models and optimizers as they were when it was saved, or load single components",
        )

    def _check_skip(self, skip_samples: int) -> None:
        if skip_samples < 0:
            raise UsageError(f"skip_samples={skip_samples} must not be negative")
        if skip_samples == 0:
            return
        if not self._loaders:
            raise UsageError(
                "skip_samples= needs a loader, and this TrainState has none", hint="give loader="
            )
        for name, loader in self._loaders.parts.items():
            if not callable(getattr(loader, "skip", None)):
                raise UsageError(
                    f"skip_samples= needs a loader with skip(samples); {self._loaders.label(name)} "
                    f"({type(loader).__name__}) has none",
                    hint="use ckptstore.torch.ResumableLoader or ResumableSampler",
                )

    def install(self, tree: dict[str, Any], *, skip_samples: int = 0) -> list[str]:
        """Puts in what was loaded; the random states last.

        Args:
            tree: what `restore_targets` returned, filled, with the loaded objects in place of LOAD. What is
                missing in it or still LOAD was not in the checkpoint and stays as it is.
            skip_samples: global samples to pass over, counted from the saved position.

        Returns:
            Notes on what could not be put back as it was, one sentence each.

        Raises:
            UsageError: no loader here can skip samples; nothing has been changed.
        """
        self._check_skip(skip_samples)
        names = self._names()
        tree = per_rank.unmarked(tree)
        for name, model, part in self._models.present(tree.get("model", LOAD)):
            modules.install_module(model, part, self._models.label(name))
        for _, optimizer, part in self._optimizers.present(tree.get("optimizer", LOAD)):
            install_optimizer(optimizer, part, names)
        for component, parts in self._stateful.items():
            for _, owner, part in parts.present(tree.get(component, LOAD)):
                owner.load_state_dict(part)
        notes = self._install_loaders(tree.get("loader", LOAD), skip_samples)
        if self.extra is not None:
            install_extra(self.extra, tree.get("extra", {}))
        train = tree.get("train", LOAD)
        if not is_absent(train):
            self.step = train["step"]
        notes += self._borrowed_notes()
        notes += self._install_rng(tree.get("rng", LOAD))
        for note in notes:
            logger.warning("%s", note)
        return notes

    def _install_rng(self, tree: Any) -> list[str]:
        if is_absent(tree):
            return []
        if not isinstance(tree, PerRankValues):
            return random_states.install(tree, self._generators)
        rank, world_size = self._rank
        changed = f"random states were saved by {tree.world_size} ranks, here are {world_size}: "
        parts = {key: part for key, part in tree.items() if not is_absent(part)}
        if not parts:
            return [f"{changed}those of this process are kept"] if self._rng_policy == "keep" else []
        return [changed + note for note in reseed(parts, self._generators, rank, world_size)]

    def _borrowed_notes(self) -> list[str]:
        places = [".".join(str(key) for key in path) for path in self._borrowed if path[0] != "loader"]
        if not places:
            return []
        shown = ", ".join(places[:_SHOWN]) + (
            f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        )
        whose = next(iter(self._borrowed.values()))
        return [f"{shown}: kept by each rank of its own, and this rank saved none: rank {whose}'s is taken"]

    def _install_loaders(self, tree: Any, skip_samples: int) -> list[str]:
        notes: list[str] = []
        if not is_absent(tree):
            for name, loader, part in self._loaders.present(tree.get("state", LOAD)):
                loader.load_state_dict(part)
                notes += self._position_notes(name, loader, part, tree.get("place", LOAD))
            notes += self._place_notes(tree.get("place", LOAD))
        if skip_samples:
            for loader in self._loaders.parts.values():
                loader.skip(skip_samples)
            notes.append(f"{skip_samples} samples are skipped")
        return notes

    def _position_notes(self, name: str, loader: Any, state: Any, place: Any) -> list[str]:
        """What has become of a position in global samples on another number of ranks."""
        if is_absent(place) or not _counts_globally(loader):
            return []
        then, now = place["world_size"], loader.world_size
        if then == now:
            return []
        batch = f"{state['global_batch']} samples then, {loader.global_batch} now"
        return [
            f"{self._loaders.label(name)} goes on at global sample {loader.global_position} "
            f"({then} ranks then, {now} now; global batch {batch})"
        ]

    def _place_notes(self, saved: Any) -> list[str]:
        here = self._place()
        if is_absent(saved):
            return []
        # A position in global samples means the same on any number of ranks.
        own = [key for key in ("world_size", "mesh") if saved[key] != here[key]]
        foreign = [name for name, part in self._loaders.parts.items() if not _counts_globally(part)]
        if not own or not foreign:
            return []
        changes = ", ".join(f"{key} {saved[key]} then, {here[key]} now" for key in own)
        labels = ", ".join(self._loaders.label(name) for name in foreign)
        note = f"the data position of {labels} was saved in another topology ({changes})"
        borrowed = [key for path, key in self._borrowed.items() if path[0] == "loader"]
        taken = f", this rank goes on from rank {borrowed[0]}'s" if borrowed else ""
        return [f"{note}{taken}: samples may come twice or never"]


def _counts_globally(loader: Any) -> bool:
    """Whether its position is in samples of the whole training, so that any rank's is all ranks'."""
    return hasattr(loader, "global_position")


def _loader_state(loader: Any) -> Any:
    state = loader.state_dict()
    return state if _counts_globally(loader) else PerRank(state)


def _stateful_problems(parts: Named[Any], saved: Any) -> list[str]:
    """What objects with `state_dict` would refuse, found out beforehand where they can be asked."""
    problems: list[str] = []
    for name, part, state in parts.present(saved):
        label = parts.label(name)
        ask = getattr(part, "state_problems", None)
        if callable(ask):
            problems += [f"{label}: {problem}" for problem in ask(state)]
        # A GradScaler says only while loading that it was saved while disabled.
        elif parts.component == "scaler" and state == {} and part.state_dict() != {}:
            problems.append(f"{label}: it was saved while disabled, here it is enabled")
    return problems
