"""What a round of collecting came to, as metrics."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from ckptstore.gc.rounds import RoundReport
from ckptstore.metrics import definitions as metric
from ckptstore.metrics.exposition import Family
from ckptstore.metrics.figures import Series


def families(reports: Mapping[str, RoundReport], exit_codes: Mapping[str, int], now: float) -> list[Family]:
    """The metrics of rounds on several tiers.

    Args:
        reports: by name of the tier; a round that failed has none.
        exit_codes: by name of the tier.
        now: seconds since the epoch.
    """
    series = Series()
    for tier, code in exit_codes.items():
        series.set(metric.GC_LAST, now, tier=tier)
        series.set(metric.GC_EXIT, code, tier=tier)
    for tier, report in reports.items():
        series.set(metric.GC_SECONDS, report.seconds, tier=tier)
        counts = collections.Counter(fate.outcome for fate in report.fates)
        outcomes = {
            "kept": counts["keep"],
            "expiring": counts["expire"],
            "deleted": len(report.collected),
            "held": len(report.stays),
        }
        for outcome, count in outcomes.items():
            series.set(metric.GC_CHECKPOINTS, count, tier=tier, outcome=outcome)
        series.set(metric.GC_FREED, report.freed_bytes, tier=tier, of="checkpoints")
        series.set(metric.GC_FREED, report.cleared.object_bytes, tier=tier, of="attempts")
        unfreed = report.unfreed_bytes + report.cleared.unfreed_bytes
        series.set(metric.GC_UNFREED, unfreed, tier=tier)
        failures = len(report.failures) + len(report.cleared.failures)
        series.set(metric.GC_NOT_DELETED, failures, tier=tier)
        series.set(metric.GC_LEFT, len(report.cleared.left), tier=tier)
    return series.families(metric.OF_A_ROUND)
