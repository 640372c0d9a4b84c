"""The checkpoint that all ranks' parts of a save through DCP make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from ckptstore.errors import SaveFailedError
from ckptstore.load.saved import Saved
from ckptstore.model import unpack
from ckptstore.model.ids import Attempt
from ckptstore.ranks import show_ranks
from ckptstore.save.commit import Assembly
from ckptstore.save.merge import Merger
from ckptstore.save.parts import Part, decode_part
from ckptstore.torch.dcp import trees


def carried(results: Sequence[WriteResult]) -> Part:
    """The part that a rank's write results carry to the coordinator.

    Raises:
        SaveFailedError: they carry none.
    """
    for result in results:
        if isinstance(result.storage_data, bytes):
            return decode_part(result.storage_data, "a rank's part")
    raise SaveFailedError("a rank has sent no part", hint="every rank must save with a StoreWriter")


def assembled(
    parts: list[Part], attempt: Attempt, metadata: Metadata, what: str, replicas: str
) -> tuple[Assembly, list[str]]:
    """One checkpoint out of the parts of all ranks.

    Args:
        metadata: what DCP has planned: all of it must be there.
        what: names the save in errors.
        replicas: see :meth:`ckptstore.save.merge.Merger.merge`.

    Returns:
        The assembly, its tree nested as the state was, and notes on what differed between ranks.

    Raises:
        SaveFailedError: something is missing, not covered, or of another save.
    """
    others = [part.rank for part in parts if (part.step, part.counter) != (attempt.step, attempt.number)]
    if others:
        raise SaveFailedError(f"{what}: {show_ranks(others)} have written another save")
    assembly, notes = Merger().merge(parts, what, replicas=replicas)
    flat = unpack.decode(assembly.tree, Saved, f"the tree of {what}")
    missing = sorted(name for name in metadata.state_dict_metadata if name not in flat)
    if missing:
        raise SaveFailedError(f"{what}: no rank has written {', '.join(missing[:8])}")
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    nested = trees.nest(flat, [*planned, *metadata.state_dict_metadata])
    return dataclasses.replace(assembly, tree=trees.pack(nested)), notes
