"""How a state and a checkpoint differ, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ckptstore.errors import StateMismatchError
from ckptstore.load.live import unwritable
from ckptstore.load.select import Selection
from ckptstore.load.trimmed import lost, remedy
from ckptstore.shards import Held
from ckptstore.tier.contents import Contents

SHOWN = 12
"""Entries that a message names one by one."""


def raise_mismatch(
    contents: Contents, problems: Sequence[str], missing: Sequence[str], unexpected: Sequence[str]
) -> None:
    """Raises if there are problems, all at once.

    Args:
        missing, unexpected: names on one side only, for the remedy.

    Raises:
        StateMismatchError: with all of `problems`; its message shows the first of them.
    """
    if not problems:
        return
    shown = "\n  ".join(problems[:SHOWN])
    more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    raise StateMismatchError(
        f"{contents} does not fit this state; nothing was loaded:\n  {shown}{more}",
        problems=problems,
        hint=(remedy(contents.record) if lost(contents.record, missing) else None)
        or _prefix_hint(missing, unexpected)
        or "strict=False takes the names that both have; rename=, only=, exclude= and cast= relax by name",
    )


def _prefix_hint(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """The remedy where names differ by a wrapper's prefix only (``_orig_mod.``, ``module.``)."""
    here, there = set(missing), set(unexpected)
    if not here or not there:
        return None
    for prefix in ("_orig_mod.", "module.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        if any(prefix in name for name in there) and {n.replace(prefix, "") for n in there} == here:
            return (
                f"the checkpoint's names carry {prefix!r}: rename=lambda name: name.replace({prefix!r}, '')"
            )
        if any(prefix in name for name in here) and {n.replace(prefix, "") for n in here} == there:
            return f"this state's names carry {prefix!r}: pass the unwrapped module, or a TrainState"
    return None


def unlike_array(
    held: Held, dtype: str, contents: Contents, index: int, name: str, selection: Selection
) -> str | None:
    """Why an array cannot be filled with a stored tensor; None where it can.

    Args:
        dtype: name of the array's.
        index: the tensor's row in the layout.
        name: as the state has it.
    """
    heads = contents.layout.heads
    if held.shape != heads.shapes[index]:
        return unlike_shape(held.shape, heads.shapes[index])
    stored = heads.dtypes[index].name
    if dtype != stored and not selection.may_cast(name):
        return f"dtype {dtype} here, {stored} in the checkpoint (cast={name!r} converts it)"
    return unwritable(held) or _unlike_dates(held.array, contents, index)


def unlike_shape(here: Sequence[int], there: Sequence[int]) -> str:
    """The state's and the checkpoint's."""
    return f"shape {list(here)} here, {list(there)} in the checkpoint"


def _unlike_dates(value: Any, contents: Contents, index: int) -> str | None:
    """Dates and times are stored as numbers of a unit: another unit would be another time."""
    # Only numpy arrays have such units; for all else the tree need not be decoded for them once more.
    is_numpy = contents.layout.heads.kinds[index] == "numpy"
    detail = contents.details.get(index) if is_numpy else None
    here = value.dtype.newbyteorder("=") if isinstance(value, np.ndarray) else None
    there = np.dtype(detail).newbyteorder("=") if detail is not None and detail[1:2] in "mM" else None
    is_date = here is not None and here.kind in "mM"
    if (is_date or there is not None) and here != there:
        return f"{here or 'a tensor'} here, {there or 'plain numbers'} in the checkpoint"
    return None
