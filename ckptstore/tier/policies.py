"""Retention policies as documents in a tier: the store's default, and those of single runs.

A change is a new document with the next number, written to every tier; none is ever changed. Where two
tiers say different things (one was away), :func:`level` makes them agree.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from ckptstore.errors import BackendError, BusyError, ObjectExistsError, WrongStoreError
from ckptstore.model.policies import Origin, Policy, PolicyDoc, decode_policy, encode_policy
from ckptstore.tier import layout
from ckptstore.tier.asking import ask
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

_TRIES = 20


def newest_policy(tier: Tier, run_key: str | None) -> PolicyDoc | None:
    """The policy document that counts in a tier, of a run or (None) the store's default; None without one.

    Raises:
        DocumentError, FormatTooNewError: it cannot be read; an older one would say something else.
    """
    for number in reversed(numbers(tier, run_key)):
        key = layout.policy_key(run_key, number)
        data = tier.read(key)
        if data is not None:
            return decode_policy(data, f"{key} at {tier.url}")
    return None


def read_policy(tier: Tier, run_key: str) -> Policy | None:
    """What holds for a run, as stored in a tier; None keeps everything.

    A run's own policy counts instead of the store's default. What the default says of single tiers stays,
    unless the run's own names that tier: a tier's rules say what its disk can hold.

    Raises:
        DocumentError, FormatTooNewError: a policy cannot be read.
    """
    own, default = newest_policy(tier, run_key), newest_policy(tier, None)
    return overlaid(None if own is None else own.policy, None if default is None else default.policy)


def overlaid(own: Policy | None, default: Policy | None) -> Policy | None:
    """A run's own policy over the store's default; see :func:`read_policy`."""
    if own is None or default is None:
        return own or default
    return Policy(own.keep, own.components, {**default.tiers, **own.tiers})


def write_policy(
    tiers: Sequence[Tier], run_key: str | None, policy: Policy | None, *, origin: Origin = "command"
) -> PolicyDoc:
    """Makes a policy the one that counts, in every tier; durable in the first on return.

    A colder tier that does not answer is logged; replication brings it there.

    Args:
        tiers: those that answer, hottest first.
        run_key: None for the store's default.
        policy: None takes the policy back.

    Raises:
        BackendError, WrongStoreError: the first tier cannot be written.
    """
    environment = tiers[0].environment
    taken = [0, *numbers(tiers[0], run_key)]
    for tier in tiers[1:]:
        try:
            taken += ask(tier.backend, tier.name, functools.partial(numbers, tier, run_key))
        except BackendError as error:
            log.info("tier %s is not asked for its policies: %s", tier.name, error.message)
    number = 1 + max(taken)
    for _ in range(_TRIES):
        document = PolicyDoc(number, environment.now(), environment.author, origin, policy)
        try:
            _put(tiers[0], run_key, document)
            break
        except ObjectExistsError:  # somebody else's, a moment ago: ours is the later one
            number += 1
    else:
        raise BusyError(f"other processes keep changing retention policies at {tiers[0].url}")
    for tier in tiers[1:]:
        try:
            ask(tier.backend, tier.name, functools.partial(_put, tier, run_key, document))
        except (BackendError, WrongStoreError) as error:
            log.warning(
                "tier %s does not know of a changed retention policy: replication brings it: %s",
                tier.name,
                error.message,
            )
    return document


def runs_with_policies(tier: Tier) -> list[str]:
    """Keys of the runs that have, or had, a policy of their own."""
    found = {info.key.split("/")[1] for info in tier.listing("runs/") if "/policies/" in info.key}
    return sorted(found)


def level(tiers: Sequence[Tier], run_key: str | None) -> bool:
    """Makes tiers agree on the policy that counts; whether anything had to be written.

    The one with the highest number wins, then the later one.

    Raises:
        DocumentError, FormatTooNewError: a tier's policy cannot be read.
        BackendError, WrongStoreError: a tier does not answer.
    """
    found = [(tier, newest_policy(tier, run_key)) for tier in tiers]
    documents = [document for _, document in found if document is not None]
    if not documents or all(document == documents[0] for _, document in found):
        return False
    winner = max(documents, key=lambda each: (each.number, each.at, encode_policy(each)))
    if sum(document.number == winner.number and document != winner for document in documents):
        # Two tiers hold different ones under this number, and no document is ever changed.
        write_policy(tiers, run_key, winner.policy, origin=winner.origin)
        return True
    for tier, document in found:
        if document != winner:
            _put(tier, run_key, winner)
    return True


def _put(tier: Tier, run_key: str | None, document: PolicyDoc) -> None:
    tier.check_marker()
    tier.put_new(layout.policy_key(run_key, document.number), encode_policy(document))


def numbers(tier: Tier, run_key: str | None) -> list[int]:
    """Numbers of all policies that a run had in a tier or (None) the default, ascending."""
    stems = (layout.stem(info.key) for info in tier.listing(layout.policy_prefix(run_key)))
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())
