"""A content-addressed checkpoint store for training large models.

Example:
    store = ckptstore.open("ckpts")
    run = store.run("llama-8b")
    state = ckptstore.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    start = run.restore(state) or 0
    ...
    run.save(step, state, metrics={"loss": loss})
"""

from typing import TYPE_CHECKING, Any

from ckptstore._version import __version__
from ckptstore.checkpoint import Checkpoint, RestoreReport
from ckptstore.errors import CkptstoreError
from ckptstore.model.targets import LOAD, Opaque, TensorSpec
from ckptstore.pending import PendingSave
from ckptstore.run import Run
from ckptstore.store import Store, init, open

if TYPE_CHECKING:
    from ckptstore.torch import TrainState

__all__ = [
    "LOAD",
    "Checkpoint",
    "CkptstoreError",
    "Opaque",
    "PendingSave",
    "RestoreReport",
    "Run",
    "Store",
    "TensorSpec",
    "TrainState",
    "__version__",
    "init",
    "open",
]


def __getattr__(name: str) -> Any:
    """TrainState needs torch, which is imported when it is first asked for."""
    if name == "TrainState":
        from ckptstore.torch import TrainState

        return TrainState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
