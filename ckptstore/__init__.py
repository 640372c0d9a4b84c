"""A content-addressed checkpoint store for training large models.

Example:
    store = ckptstore.open("ckpts")
    run = store.run("llama-8b")
    state = ckptstore.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    start = run.restore(state) or 0
    ...
    run.save(step, state, metrics={"loss": loss})
"""

import importlib
from typing import TYPE_CHECKING, Any

from ckptstore._version import __version__

if TYPE_CHECKING:
    from ckptstore.checkpoint import Checkpoint, RestoreReport
    from ckptstore.errors import CkptstoreError
    from ckptstore.model.policies import Policy
    from ckptstore.model.retention import Keep
    from ckptstore.model.targets import LOAD, Opaque, PerRankValues, TensorSpec
    from ckptstore.pending import PendingSave
    from ckptstore.run import Run
    from ckptstore.shards import LocalShard, PerRank
    from ckptstore.store import Store, init, open
    from ckptstore.torch import TrainState

__all__ = [
    "LOAD",
    "Checkpoint",
    "CkptstoreError",
    "Keep",
    "LocalShard",
    "Opaque",
    "PendingSave",
    "PerRank",
    "PerRankValues",
    "Policy",
    "RestoreReport",
    "Run",
    "Store",
    "TensorSpec",
    "TrainState",
    "__version__",
    "init",
    "open",
]

_HOMES = {
    "Checkpoint": "checkpoint",
    "CkptstoreError": "errors",
    "Keep": "model.retention",
    "LOAD": "model.targets",
    "LocalShard": "shards",
    "Opaque": "model.targets",
    "PendingSave": "pending",
    "PerRank": "shards",
    "PerRankValues": "model.targets",
    "Policy": "model.policies",
    "RestoreReport": "checkpoint",
    "Run": "run",
    "Store": "store",
    "TensorSpec": "model.targets",
    "TrainState": "torch",
    "init": "store",
    "open": "store",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for: a command starts fast, and torch comes late."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
