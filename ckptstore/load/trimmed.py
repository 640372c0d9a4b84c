"""What is said of components that a checkpoint was saved with and has no more."""

from __future__ import annotations

from collections.abc import Iterable

from ckptstore.model.record import CommitRecord


def lost(record: CommitRecord, names: Iterable[str]) -> dict[str, str]:
    """Of the components that names lie in, those that were trimmed, each with a sentence about it.

    Args:
        names: of tensors, values or components, or globs over them.
    """
    trimmed = record.trimmed
    if not trimmed:
        return {}
    found: dict[str, str] = {}
    for name in names:
        for component, why in trimmed.items():
            if name == component or name.startswith(f"{component}."):
                found[component] = (
                    f"the {component} of run {record.run!r} step {record.step} was trimmed by policy "
                    f"({why.reason})"
                )
    return found


def remedy(record: CommitRecord) -> str:
    """What can be done about a component that is gone."""
    left = [part.name for part in record.components]
    only = repr(left[0]) if len(left) == 1 else repr(left)
    return f"take what is left: only={only}; or another step, `ckptstore ls` shows which there are"
