"""Filling an existing state from a checkpoint: everything is compared before any byte is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ckptstore import cycles
from ckptstore.errors import CkptstoreError, PartlyRestoredError
from ckptstore.load.fetch import Fetched, Fetcher
from ckptstore.load.host import HostShare
from ckptstore.load.match import Matcher
from ckptstore.load.select import Selection
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Filled:
    """What a restore did.

    Attributes:
        tree: the target tree, filled.
        missing: names in the state that the checkpoint does not have (``strict=False``).
        unexpected: names in the checkpoint that the state did not take.
        fetched: what was read.
    """

    tree: dict[Any, Any]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    fetched: Fetched


def restore(
    tier: Tier,
    contents: Contents,
    target: dict[Any, Any],
    selection: Selection,
    *,
    strict: bool = True,
    extend: bool = True,
    allow_pickle: bool = False,
    rank: int = 0,
    world_size: int = 1,
    host: HostShare | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Filled:
    """Fills `target` in place: tensors and arrays keep their identity, other leaves are replaced.

    Of DTensors and LocalShards only what this process holds is read and filled, whatever boxes the tensor
    was saved in. Objects with ``load_state_dict`` get their part of the tree; ``LOAD`` and empty containers
    get the saved subtree whole, ``LoadLike`` a new tensor. Of what every rank kept of its own, this rank
    gets its part, or the one that ``PerRank(value, key=)`` in `target` names. Nothing of `target` changes
    before all bytes that it needs have been verified, except tensors that are read into directly.

    Args:
        strict: names only on one side are an error.
        extend: values (no tensors) that `target` has no entry for are added to its dicts.
        rank, world_size: of this process.
        host: shares what is read with the other ranks of this host.
        ready: called when everything fits, before any byte is read; it may raise.

    Raises:
        StateMismatchError: lists every difference; nothing was read.
        PartlyRestoredError: reading failed after tensors had been written to.
    """
    with cycles.held_off():
        matcher = Matcher(
            contents,
            selection,
            strict=strict,
            extend=extend,
            allow_pickle=allow_pickle,
            rank=rank,
            world_size=world_size,
        )
        result = matcher.match(target)
    matcher.raise_problems()
    ready()
    fetcher = Fetcher(tier, contents, host)
    try:
        fetcher.fetch([*matcher.wants, *matcher.builder.wants])
        for finish in matcher.after:
            finish()
        tree = matcher.builder.finish(result)
        for container, key, value in matcher.replacements:
            container[key] = matcher.builder.finish(value)
        for target_object, state in matcher.objects:
            target_object.load_state_dict(matcher.builder.finish(state))
    except CkptstoreError as error:
        if fetcher.done.placed and matcher.wants:
            raise PartlyRestoredError(
                f"restoring {contents} failed after it had begun: {error.message}; "
                "the state is a mixture of old and new and must not be trained on",
                hint=error.hint or "restore another checkpoint into it, or start the process anew",
            ) from error
        raise
    return Filled(tree, tuple(matcher.missing), tuple(matcher.unexpected), fetcher.done)
