"""Tools for testing what is built on, or for, this library. Public.

:class:`ckptstore.testing.contract.BackendContract` proves a backend; it needs pytest, so it is imported only
when asked for. :class:`FaultBackend` fails on purpose, as a script says. :mod:`ckptstore.testing.protocol` is
the protocol of saving and collecting as a model, with a search through all interleavings.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptstore.testing.faults import Call, Fault, FaultBackend, SimulatedCrash, count_calls, crash_at

if TYPE_CHECKING:
    from ckptstore.testing.contract import BackendContract as BackendContract

__all__ = ["BackendContract", "Call", "Fault", "FaultBackend", "SimulatedCrash", "count_calls", "crash_at"]


def __getattr__(name: str) -> object:
    if name == "BackendContract":
        pytest = sys.modules.get("pytest")
        if pytest is not None and "ckptstore.testing.contract" not in sys.modules:
            # Without this a failing assertion of the suite would not show the values.
            pytest.register_assert_rewrite("ckptstore.testing.contract")
        from ckptstore.testing.contract import BackendContract

        return BackendContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
