"""Names in a file and names in the store: stripping, renaming, and that no two become one."""

from __future__ import annotations

from collections.abc import Iterable

from ckptstore.errors import NotFoundError, UsageError
from ckptstore.load.select import Rename, Selection

SHOWN = 8


def listed(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    found = list(names)
    text = ", ".join(repr(name) for name in found[:SHOWN])
    return text if len(found) <= SHOWN else f"{text} and {len(found) - SHOWN} more"


class Renamer:
    """Takes a prefix off, then renames whole names and prefixes that end at a dot."""

    def __init__(self, strip_prefix: str | None, rename: Rename) -> None:
        self._prefix = strip_prefix or ""
        self._rename = rename
        self._selection = Selection.of(rename=rename)
        self.changes = bool(strip_prefix) or rename is not None

    def without_prefix(self) -> Renamer:
        """Only the renaming."""
        return Renamer(None, self._rename)

    def new_names(self, names: Iterable[str]) -> dict[str, str]:
        """Old name -> new name.

        Raises:
            NotFoundError: no name begins with the prefix.
            UsageError: two names become one.
        """
        old = list(names)
        if self._prefix and old and not any(name.startswith(self._prefix) for name in old):
            raise NotFoundError(
                f"no name begins with {self._prefix!r}", hint=f"names are like {listed(old[:3])}"
            )
        new = {name: self._selection.target_name(name.removeprefix(self._prefix)) for name in old}
        owners: dict[str, list[str]] = {}
        for name, renamed in new.items():
            owners.setdefault(renamed, []).append(name)
        clashes = {renamed: given for renamed, given in owners.items() if len(given) > 1}
        if clashes:
            renamed, given = next(iter(clashes.items()))
            raise UsageError(
                f"{listed(given)} would all be named {renamed!r}", hint="rename or exclude one of them"
            )
        return new
