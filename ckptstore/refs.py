"""REFs: how people name a checkpoint. ``RUN@latest``, ``RUN@min:loss``, ``RUN@12000``, ``RUN@tag``, an id."""

from __future__ import annotations

import re

from ckptstore.errors import UsageError

RESERVED = ("latest",)
_STEP = re.compile(r"[+-]?[0-9]{1,20}")


def check_tag(tag: object) -> str:
    """A tag that no REF can mistake for something else.

    Raises:
        UsageError: it is a number, a reserved word or empty, begins like ``min:loss``, or holds ``@``.
    """
    if not isinstance(tag, str) or not tag or len(tag) > 200:
        raise UsageError(f"a tag must be a str of 1 to 200 characters, not {tag!r}")
    if _STEP.fullmatch(tag) or tag in RESERVED or tag.startswith(("min:", "max:")):
        raise UsageError(f"{tag!r} cannot be a tag: it would read as a step or a reserved word")
    if "@" in tag:
        raise UsageError(f"tag {tag!r} holds '@', which divides run and tag in a REF")
    if any(not char.isprintable() for char in tag) or tag != tag.strip():
        raise UsageError(f"tag {tag!r} has unprintable characters or blanks at its ends")
    return tag


def split(ref: str) -> tuple[str | None, str]:
    """(run, selector) of a REF; run is None for a checkpoint id prefix.

    Run names may hold ``@``: the last one divides.
    """
    run, separator, selector = ref.rpartition("@")
    if not separator:
        return None, ref
    if not run or not selector:
        raise UsageError(
            f"{ref!r} is no REF", hint="write RUN@latest, RUN@min:loss, RUN@12000, RUN@tag or an id prefix"
        )
    return run, selector


def as_step(selector: str) -> int | None:
    """The step, if the selector is a number."""
    return int(selector) if _STEP.fullmatch(selector) else None


def as_best(selector: str) -> tuple[str, str] | None:
    """(mode, metric) of ``min:loss`` and ``max:acc``."""
    mode, separator, metric = selector.partition(":")
    return (mode, metric) if separator and metric and mode in ("min", "max") else None
