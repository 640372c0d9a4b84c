"""`capture="overlap"`: what only an optimizer's update changes is copied while the next step computes.

Between two updates, forward and backward read parameters and optimizer state and do not write them. So
their copy may go on after `save` has returned, if the update waits for it. What may change at any other
time (buffers, counters, everything that this module does not know) is copied before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptstore.torch.optimizer import tensors_in
from ckptstore.torch.visible import local_parts, renormalised, storage_of, trained

logger = logging.getLogger(__name__)

_gates: set[weakref.ref[UpdateGate]] = set()


class Waitable(Protocol):
    """A capture under way."""

    @property
    def done(self) -> bool:
        """Whether tensors may change."""

    def wait(self) -> object:
        """Returns when they may."""


def wait_for_captures() -> None:
    """Returns when no run of this process copies tensors any more; call it before a state is filled."""
    for found in _gates.copy():  # in one step, whatever threads make or drop gates meanwhile
        gate = found()
        if gate is not None:
            gate.wait()


class _Captures:
    """What is under way in one process, and its locks."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.held: list[Waitable] = []
        self.lock = threading.Lock()
        self.changing = threading.RLock()
        self.depth = 0


class UpdateGate:
    """Makes every update wait for the captures under way.

    The hook is torch's global one: it also stops optimizers that are not in the state and train the same
    parameters. While no capture is under way it costs nothing. A forked child waits for none of its
    parent's: no thread of it copies, and its tensors are its own.
    """

    def __init__(self) -> None:
        self._of_process = _Captures()
        self._hook: Any = None
        self._said: set[str] = set()
        _gates.add(weakref.ref(self, _gates.discard))

    @property
    def _captures(self) -> _Captures:
        if self._of_process.process != os.getpid():
            # Threads that are not here may hold the parent's locks, and would have ended its captures.
            self._of_process = _Captures()
        return self._of_process

    def deferrable(self, state: Any) -> tuple[frozenset[int], str | None]:
        """What of a state may be copied after `save` has returned.

        Args:
            state: what the caller gave to `save`: a TrainState, or nested dicts and lists with modules and
                optimizers in them.

        Returns:
            Data pointers of the storages of parameters that an optimizer in the state trains, and of that
            optimizer's state; and, if there are none, why, in a clause. The reason is None inside
            `lock()`: there all is copied at once, since the caller changes tensors itself.
        """
        captures = self._captures
        with captures.changing:
            if captures.depth:
                return frozenset(), None
        modules, optimizers, reason = trained(state)
        reason = reason or _reason_against(optimizers)
        storages = frozenset[int]() if reason else _storages(modules, optimizers)
        if reason and reason not in self._said:
            self._said.add(reason)
            logger.warning('capture="overlap": all is copied before save returns, because %s', reason)
        return storages, reason

    def hold(self, capturing: Waitable) -> None:
        """Updates wait for this capture from now on; call it in the thread that trains, in `save`."""
        captures = self._captures
        with captures.lock:
            captures.held = [held for held in captures.held if not held.done]
            if capturing.done:
                return
            captures.held.append(capturing)
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(_hook_of(weakref.ref(self)))
                weakref.finalize(self, self._hook.remove)

    def wait(self) -> None:
        """Returns when no capture is under way; call it before tensors are loaded or changed."""
        captures = self._captures
        with captures.lock:
            held = list(captures.held)
        for capturing in held:
            capturing.wait()
        if held:
            with captures.lock:
                captures.held = [capturing for capturing in captures.held if not capturing.done]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """For code that changes tensors without an optimizer's `step`; a save inside copies all at once."""
        captures = self._captures
        with captures.changing:
            self.wait()
            captures.depth += 1
            try:
                yield
            finally:
                captures.depth -= 1

    def close(self) -> None:
        """Waits, and takes the hook away."""
        self.wait()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _hook_of(found: weakref.ref[UpdateGate]) -> Any:
    def wait_for_captures(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        gate = found()
        if gate is not None:
            gate.wait()

    # A compiled step would trace the hook once and never wait again.
    return torch.compiler.disable(wait_for_captures)


def _reason_against(optimizers: Mapping[str, Any]) -> str | None:
    if not optimizers:
        return "no optimizer is in the state"
    for label, optimizer in optimizers.items():
        kind = type(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer) or not getattr(kind.step, "hooked", False):
            return f"{label} ({kind.__name__}) is no torch.optim.Optimizer whose step can be made to wait"
        if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
            return f"{label} ({kind.__name__}) changes parameters in its train() and eval() too"
        for group in optimizer.param_groups:
            if group.get("capturable"):
                return f"{label} is capturable: inside a CUDA graph no hook is called"
            if any(_updated_in_backward(parameter) for parameter in group["params"]):
                return f"parameters of {label} have hooks that may update them inside backward"
    return None


def _updated_in_backward(parameter: torch.Tensor) -> bool:
    return bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
        # torch.distributed.optim's _apply_optimizer_in_backward
        or getattr(parameter, "_in_backward_optimizers", None)
    )


def _storages(modules: Sequence[nn.Module], optimizers: Mapping[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.update(map(storage_of, local_parts(parameter)))
        for entry in optimizer.state.values():
            # Scalars, as Adam's `step`, are copied at once.
            moments = (tensor for tensor in tensors_in(entry) if tensor.dim())
            found.update(storage_of(part) for tensor in moments for part in local_parts(tensor))
        # A tensor lr is written by schedulers.
        found.difference_update(
            storage_of(part)
            for group in optimizer.param_groups
            for key, value in group.items()
            if key != "params"
            for tensor in tensors_in(value)
            for part in local_parts(tensor)
        )
    # The next forward writes buffers, also those that are views of a parameter's memory; and the weights of
    # embeddings with max_norm, which it renormalises in place.
    found.difference_update(
        storage_of(part)
        for module in modules
        for tensor in (*module.buffers(), *renormalised(module))
        for part in local_parts(tensor)
    )
    return frozenset(found - {0})
