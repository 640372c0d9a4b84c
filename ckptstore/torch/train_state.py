"""Everything that the next step of a training depends on, as one tree."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.model.targets import LOAD, SavedTree
from ckptstore.torch import modules
from ckptstore.torch.components import Named, form_problems, is_absent, named
from ckptstore.torch.extra import capture_extra, extra_target, install_extra
from ckptstore.torch.loader import is_stateful
from ckptstore.torch.optimizer import (
    capture_optimizer,
    check_optimizer,
    install_optimizer,
    optimizer_problems,
    optimizer_targets,
)
from ckptstore.torch.per_rank import OwnView, marked, unmarked
from ckptstore.torch.positions import Positions
from ckptstore.torch.random_states import RandomStates, RngPolicy
from ckptstore.torch.sampler import distributed_place

logger = logging.getLogger(__name__)


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
        self._positions = Positions(loader)
        self._random_states = RandomStates(rng, generators or {})
        self._per_rank = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
        self._given_rank: tuple[int, int] | None = None
        self._view: OwnView | None = None
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
        names = self._names()
        for name, optimizer in self._optimizers.parts.items():
            check_optimizer(optimizer, names, self._optimizers.label(name))

    def _names(self) -> modules.ParameterNames:
        # Made anew each time: models may have been wrapped, sharded or extended since.
        return modules.ParameterNames(self._models.parts)

    def set_place(self, rank: int, world_size: int) -> None:
        """Says which of how many ranks this is, where torch.distributed does not; a run does so by itself."""
        self._given_rank = (rank, world_size)

    @property
    def _rank(self) -> tuple[int, int]:
        return self._given_rank or distributed_place()

    def _named(self) -> list[Named[Any]]:
        return [self._models, self._optimizers, *self._stateful.values(), self._positions.loaders]

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
        tree: dict[str, Any] = {"rng": self._random_states.capture()}
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
        if self._positions.loaders:
            tree["loader"] = self._positions.capture(self._place())
        if self.extra is not None:
            tree["extra"] = {key: capture_extra(value) for key, value in self.extra.items()}
        tree["train"] = {
            "step": step,
            "named": {
                parts.component: tuple(parts.parts) for parts in self._named() if parts and not parts.single
            },
        }
        self.step = step
        return marked(tree, self._per_rank), self._not_captured(names)

    def _not_captured(self, names: modules.ParameterNames) -> tuple[str, ...]:
        absent = {parts.component for parts in self._named() if not parts} - {"scaler"}
        if not self._stateful["scaler"] and any(
            parameter.dtype is torch.float16 for parameter in names.tensors
        ):
            absent.add("scaler")
        if self._positions.has_workers:
            absent.add("worker-rng")
        listed = tuple(sorted(absent))
        if listed and not self._said_not_captured:
            level = logging.WARNING if absent & _NEEDED else logging.INFO
            logger.log(level, "not part of the saved state, because it was not given: %s", ", ".join(listed))
            self._said_not_captured = True
        return listed

    def _place(self) -> dict[str, Any]:
        """Rank, world size and device mesh that a data position is taken in."""
        return self._positions.place(*self._rank, self._mesh())

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
        self._positions.check_skip(skip_samples)
        whole: Mapping[str, Any] = saved.tree
        view = OwnView({key: part for key, part in whole.items() if key != "rng"}, self._rank)
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
            targets["rng"], found = self._random_states.targets(whole["rng"], self._rank)
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
        if self._positions.loaders and "loader" in tree:
            targets["loader"] = self._positions.targets()
            problems += _stateful_problems(self._positions.loaders, tree["loader"]["state"])
        if self.extra is not None:
            saved_extra = tree.get("extra", {})
            targets["extra"] = {
                key: extra_target(self.extra.get(key), saved_extra.get(key, LOAD))
                for key in [*saved_extra, *(key for key in self.extra if key not in saved_extra)]
            }
        if problems:
            self._refuse(problems)
        self._view = view
        return view.chosen(targets)

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
        self._positions.check_skip(skip_samples)
        names = self._names()
        view = self._view or OwnView({}, self._rank)
        tree = unmarked(tree)
        for name, model, part in self._models.present(tree.get("model", LOAD)):
            modules.install_module(model, part, self._models.label(name))
        for _, optimizer, part in self._optimizers.present(tree.get("optimizer", LOAD)):
            install_optimizer(optimizer, part, names)
        for component, parts in self._stateful.items():
            for _, owner, part in parts.present(tree.get(component, LOAD)):
                owner.load_state_dict(part)
        borrowed = view.borrowed_under("loader")
        notes = self._positions.install(tree.get("loader", LOAD), skip_samples, self._place(), borrowed)
        if self.extra is not None:
            install_extra(self.extra, tree.get("extra", {}))
        train = tree.get("train", LOAD)
        if not is_absent(train):
            self.step = train["step"]
        notes += view.notes()
        notes += self._random_states.install(tree.get("rng", LOAD), self._rank)
        for note in notes:
            logger.warning("%s", note)
        return notes


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
