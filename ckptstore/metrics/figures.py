"""Metrics that are counted up from events, or set; both exporters give out what stands here."""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import threading

from ckptstore.events import RestoreEvent, SaveEvent
from ckptstore.metrics import definitions as metric
from ckptstore.metrics.exposition import NAMESPACE, Definition, Family, Labels, Sample, number


@dataclasses.dataclass(slots=True)
class _Distribution:
    """Of durations: how many, their sum, and how many up to each bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    count: int = 0
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum += seconds
        if self.bounds:
            self.counts[bisect.bisect_left(self.bounds, seconds)] += 1

    def samples(self, labels: Labels) -> list[Sample]:
        found, below = [], 0
        if self.bounds:
            for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
                below += count
                found.append(Sample("_bucket", (*labels, ("le", number(bound))), below))
        return [*found, Sample("_sum", labels, self.sum), Sample("_count", labels, self.count)]


class Series:
    """Numbers by metric and labels."""

    def __init__(self) -> None:
        self._values: dict[Definition, dict[Labels, int | float]] = {}
        self._distributions: dict[Definition, dict[Labels, _Distribution]] = {}

    def set(self, definition: Definition, value: int | float, **labels: str) -> None:
        """The value that it has now.

        Args:
            labels: of those that the definition names; what is left out is empty.
        """
        self._values.setdefault(definition, {})[_key(definition, labels)] = value

    def add(self, definition: Definition, amount: int | float, **labels: str) -> None:
        """Adds to a counter; 0 makes it appear."""
        values = self._values.setdefault(definition, {})
        key = _key(definition, labels)
        values[key] = values.get(key, 0) + amount

    def observe(self, definition: Definition, seconds: float, **labels: str) -> None:
        """One more duration."""
        known = self._distributions.setdefault(definition, {})
        key = _key(definition, labels)
        if key not in known:
            bounds = metric.BLOCKED_BUCKETS if definition.kind == "histogram" else ()
            known[key] = _Distribution(bounds, [0] * (len(bounds) + 1))
        known[key].add(seconds)

    def forget(self, definition: Definition, **labels: str) -> None:
        """Takes out all values that have these labels, whatever the others are."""
        values = self._values.get(definition, {})
        given = labels.items()
        for key in [key for key in values if given <= dict(key).items()]:
            del values[key]

    def families(self, definitions: tuple[Definition, ...], namespace: str = NAMESPACE) -> list[Family]:
        """All of `definitions`, those without any number too."""
        return [
            Family(f"{namespace}_{given.name}", given.kind, given.help, tuple(self._samples(given)))
            for given in definitions
        ]

    def _samples(self, definition: Definition) -> list[Sample]:
        suffix = "_total" if definition.kind == "counter" else ""
        found = [Sample(suffix, key, value) for key, value in self._values.get(definition, {}).items()]
        for key, distribution in self._distributions.get(definition, {}).items():
            found += distribution.samples(key)
        return found


def _key(definition: Definition, labels: dict[str, str]) -> Labels:
    return tuple((name, labels[name]) for name in definition.labels if name in labels)


class Figures:
    """What a process's saves and restores amount to; may be used from several threads.

    Bytes of saves are counted from rank 0's events alone: each rank's event tells those of all ranks.
    """

    def __init__(self, namespace: str = NAMESPACE) -> None:
        self._lock = threading.Lock()
        self._namespace = namespace
        self._series = Series()

    def families(self) -> list[Family]:
        """All metrics as they stand now, those without any number too."""
        with self._lock:
            return self._series.families(metric.OF_A_PROCESS, self._namespace)

    def saved(self, event: SaveEvent) -> None:
        """Counts a save."""
        place = {"run": event.run, "rank": str(event.rank)}
        with self._lock:
            series = self._series
            for outcome in ("committed", "failed", "skipped"):  # a counter must be seen at 0 before it rises
                series.add(metric.SAVES, int(event.outcome == outcome), **place, outcome=outcome)
            if event.error_kind is not None:
                series.add(metric.FAILURES, 1, **place, kind=event.error_kind)
            if event.outcome == "skipped":
                return
            series.observe(metric.BLOCKED, event.blocked_seconds, **place)
            for phase, seconds in event.seconds.items():
                series.observe(metric.PHASES, seconds, **place, phase=phase)
            if event.outcome == "committed":
                self._committed(event, place)

    def _committed(self, event: SaveEvent, place: dict[str, str]) -> None:
        series = self._series
        if event.committed_at is not None:
            series.set(metric.LAST_SUCCESS, unix_seconds(event.committed_at), **place)
        series.set(metric.LAST_STEP, event.step, **place)
        series.set(metric.LAST_BLOCKED, event.blocked_seconds, **place)
        series.forget(metric.LAST_PHASE, **place)
        for phase, seconds in event.seconds.items():
            series.set(metric.LAST_PHASE, seconds, **place, phase=phase)
        series.forget(metric.LAST_BYTES, **place)
        for kind, nbytes in (("new", event.new_bytes), ("reused", event.reused_bytes)):
            series.set(metric.LAST_BYTES, nbytes, **place, tier=event.tier, kind=kind)
            if event.rank == 0:
                series.add(metric.SAVED_BYTES, nbytes, run=event.run, tier=event.tier, kind=kind)

    def restored(self, event: RestoreEvent) -> None:
        """Counts a restore."""
        place = {"run": event.run, "rank": str(event.rank)}
        with self._lock:
            series = self._series
            for outcome in ("restored", "failed"):
                series.add(metric.RESTORES, int(event.outcome == outcome), **place, outcome=outcome)
            if event.error_kind is not None:
                series.add(metric.RESTORE_FAILURES, 1, **place, kind=event.error_kind)
            series.observe(metric.RESTORE_SECONDS, event.seconds, **place)
            series.add(metric.RESTORED_BYTES, event.bytes_read, **place, tier=event.tier)


def unix_seconds(moment: str) -> float:
    """Seconds since the epoch of a time as ``manifest.text.iso`` writes it."""
    try:
        return datetime.datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return float(moment)  # of a broken clock: the number itself
