"""A light round: what a run's policy no longer keeps. Strays are left to a full one."""

from __future__ import annotations

from ckptstore.errors import DamageError
from ckptstore.gc import listing, trim
from ckptstore.gc.collect import Report, collect
from ckptstore.gc.deleting import Pace
from ckptstore.gc.fates import Owed, fates, going
from ckptstore.gc.holders import holders
from ckptstore.gc.rounds import rules_in
from ckptstore.gc.survey import survey
from ckptstore.model.record import CommitRecord
from ckptstore.tier.intents import Pin
from ckptstore.tier.policies import read_policy
from ckptstore.tier.tier import Tier

AT_EASE = 1.0
"""Half of the time is rest: it goes on beside a training."""

REASON = "retention, while training"


def light_round(
    tier: Tier, run_key: str, *, owed: Owed, known: dict[Pin, CommitRecord] | None = None
) -> Report | None:
    """Collects what the policy stored in a tier does not keep of one run; without a grace period.

    Args:
        owed: what other tiers still need of this one.
        known: records that were read before, by this process; see
            :func:`ckptstore.gc.listing.read_records`.

    Returns:
        None where nothing was to go.

    Raises:
        As :func:`ckptstore.gc.collect.collect`.
    """
    try:
        policy = read_policy(tier, run_key)
        if policy is None or (policy.for_tier(tier.name) is None and not policy.components):
            return None
        found = survey(tier, run_keys={run_key}, known=known)
        now = tier.environment.now()
        held = holders(tier, found.intents, found.keys, now, count_silent=False)
        decided = fates(found, rules_in(tier), held, owed, now=now, tier_now=now, grace_seconds=0.0)
        trims = trim.plan(found, decided, held, owed, now)
    except DamageError as error:
        raise listing.stopped(error) from error
    targets = going(found, decided)
    targets += [(each.run_key, each.attempt) for each in trim.apply(tier, trims).done]
    if not targets:
        return None
    return collect(tier, targets, reason=REASON, known=known, pace=Pace(rest=AT_EASE))
