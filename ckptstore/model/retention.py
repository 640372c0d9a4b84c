"""Which checkpoints a policy keeps, and why. Pure functions: no I/O, no clock (DESIGN part 9).

A policy is a union: a checkpoint stays if any part of it keeps it. What a policy never decides about is kept
with its reason, too: the newest restorable checkpoint, what is pinned, being read or owed to another tier,
and what is damaged or marked invalid (never counted, never deleted in silence).

How buckets of time count follows restic's ``forget`` (https://restic.readthedocs.io): the newest checkpoint
of each of the last N hours, days or weeks *that have one*; so a pause of training costs nothing.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from ckptstore.errors import UsageError
from ckptstore.model.durations import duration_text, seconds_of
from ckptstore.model.history import Entry

Mode = Literal["min", "max"]

WAIT_SECONDS = 6 * 3600.0
"""How long a checkpoint may wait for the metric of a `best` rule unless the policy says."""

AHEAD_SECONDS = 86400.0
"""From so far ahead of the collector's clock on, a commit time is not believed."""

OPTIONS = ("last", "every", "within", "hourly", "daily", "weekly", "tags", "best")
BEST_OPTIONS = ("n", "metric", "mode", "wait")

ANY_TAG = ("*",)
_HOUR, _DAY = 3600, 86400
_THURSDAY = 3  # the epoch began on one: weeks begin on Mondays


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Best:
    """The best `n` by a metric.

    Attributes:
        wait: seconds that one still without the metric is kept as "awaiting" it, counted back from the
            newest checkpoint's commit time.
    """

    metric: str
    mode: Mode
    n: int
    wait: float = WAIT_SECONDS


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Keep:
    """A retention policy, in its canonical form; ``|`` is the union.

    Attributes:
        last: the newest so many.
        every: step distances, ascending: of each bucket ``step // K`` an exact multiple of K if there is one,
            else the lowest step.
        within: seconds before the newest checkpoint's commit time.
        hourly, daily, weekly: the newest of each of so many hours, days, weeks (UTC; weeks begin on Mondays)
            that have one.
        tags: patterns (``*`` any); what has a tag that fits stays.
        bests: the best ones by a metric.

    Example:
        >>> Keep(last=3, every=1000) | Keep.best(2, "val_loss", "min")
    """

    last: int
    every: tuple[int, ...]
    within: float
    hourly: int
    daily: int
    weekly: int
    tags: tuple[str, ...]
    bests: tuple[Best, ...]

    def __init__(
        self,
        *,
        last: int | None = None,
        every: int | Sequence[int] | None = None,
        within: str | float | None = None,
        hourly: int | None = None,
        daily: int | None = None,
        weekly: int | None = None,
        tags: Iterable[str] | None = None,
    ) -> None:
        """Makes a policy.

        Args:
            every: steps; several distances keep what any of them keeps.
            within: a length of time like ``"7d"``, or seconds.
            tags: names or patterns. Unless given, every tag keeps its checkpoint; then only these do.

        Raises:
            UsageError: an option cannot be used, or there is none: an empty policy would keep nothing.
        """
        given = (last, within, hourly, daily, weekly)
        if all(option is None for option in given) and not every and not tags:
            raise UsageError(
                "a retention policy needs a rule: an empty one would delete all but the newest checkpoint",
                hint="for instance Keep(last=3); to keep everything, set no policy",
            )
        distances = tuple(every) if isinstance(every, Sequence) and not isinstance(every, str) else (every,)
        distances = () if every is None else distances
        self._set(
            last=0 if last is None else _count("last", last),
            every=tuple(sorted({_count("every", distance) for distance in distances})),
            within=0.0 if within is None else _seconds("within", within),
            hourly=0 if hourly is None else _count("hourly", hourly),
            daily=0 if daily is None else _count("daily", daily),
            weekly=0 if weekly is None else _count("weekly", weekly),
            tags=ANY_TAG if tags is None else _patterns(tags),
            bests=(),
        )

    @classmethod
    def best(
        cls,
        n: int,
        metric: str,
        mode: Mode,
        *,
        wait: str | float = WAIT_SECONDS,
        tags: Iterable[str] | None = None,
    ) -> Keep:
        """The best `n` checkpoints by a metric; NaN never wins, ties go to the newer.

        Args:
            mode: "min" or "max"; there is no default, for a wrong one keeps the worst.
            wait: how long a checkpoint without the metric is kept, for an evaluation to add it.
            tags: as in :class:`Keep`.

        Raises:
            UsageError: names the option that cannot be used.
        """
        if mode not in ("min", "max"):
            raise UsageError(f"best: mode must be 'min' or 'max', not {mode!r}")
        if not isinstance(metric, str) or not metric:
            raise UsageError(f"best: metric must be the name of one, not {metric!r}")
        rule = Best(metric, mode, _count("best: n", n), _seconds("best: wait", wait))
        return cls._made(tags=ANY_TAG if tags is None else _patterns(tags), bests=(rule,))

    def __or__(self, other: Keep) -> Keep:
        """What either keeps."""
        if not isinstance(other, Keep):
            return NotImplemented
        return self._made(
            last=max(self.last, other.last),
            every=tuple(sorted({*self.every, *other.every})),
            within=max(self.within, other.within),
            hourly=max(self.hourly, other.hourly),
            daily=max(self.daily, other.daily),
            weekly=max(self.weekly, other.weekly),
            tags=tuple(sorted({*self.tags, *other.tags})),
            bests=tuple(sorted({*self.bests, *other.bests})),
        )

    @classmethod
    def _made(cls, **fields: Any) -> Keep:
        empty: dict[str, Any] = {"last": 0, "every": (), "within": 0.0, "hourly": 0, "daily": 0, "weekly": 0}
        made = cls.__new__(cls)
        made._set(**{**empty, "tags": (), "bests": (), **fields})
        return made

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    # --- as plain data ------------------------------------------------------------------------

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Keep:
        """A policy out of a toml table or a stored document.

        Args:
            fields: the options of :class:`Keep`, and ``best``: a table or a list of tables with ``n``,
                ``metric``, ``mode`` and perhaps ``wait``.

        Raises:
            UsageError: names the option that is unknown or cannot be used.
        """
        _refuse_unknown(fields, OPTIONS, "retention")
        tags = fields.get("tags")
        tables = fields.get("best", [])
        tables = [tables] if isinstance(tables, Mapping) else tables
        if not isinstance(tables, Sequence) or not all(isinstance(table, Mapping) for table in tables):
            raise UsageError(
                "retention: best must be a list of tables",
                hint='write best = [{n = 2, metric = "val_loss", mode = "min"}]',
            )
        options = {name: fields[name] for name in OPTIONS[:-1] if name in fields}
        policies = [cls(**options)] if options.keys() - {"tags"} or not tables else []
        for table in tables:
            _refuse_unknown(table, BEST_OPTIONS, "retention: best")
            for needed in BEST_OPTIONS[:-1]:
                if needed not in table:
                    raise UsageError(f"retention: best: {needed} is missing")
            wait = table.get("wait", WAIT_SECONDS)
            policies.append(cls.best(table["n"], table["metric"], table["mode"], wait=wait, tags=tags))
        policy = policies[0]
        for other in policies[1:]:
            policy |= other
        return policy

    def as_map(self) -> dict[str, Any]:
        """Plain data for :meth:`from_map`: msgpack, JSON and toml hold it."""
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("last", "within", "hourly", "daily", "weekly")
            if getattr(self, name)
        }
        if self.every:
            fields["every"] = list(self.every)
        if self.bests:
            fields["best"] = [dataclasses.asdict(rule) for rule in self.bests]
        return {**fields, "tags": list(self.tags)}

    def __str__(self) -> str:
        """All rules, for people: ``last 3, every 1000, best 2 by val_loss (min)``."""
        return ", ".join(_rules_text(self))


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that a policy decides about.

    Attributes:
        entry: its counting record in the tier that the policy is for.
        holders: what else keeps it, one printable reason each: ``"pinned: paper"``,
            ``"being read by eva@gpu7"``, ``"owed to tier s3"``.
    """

    entry: Entry
    holders: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What is to become of a checkpoint, and why; there is always a reason."""

    checkpoint: str
    keep: bool
    reasons: tuple[str, ...]


def decide(policy: Keep | None, candidates: Sequence[Candidate], now: float) -> list[Decision]:
    """Applies a policy to the checkpoints of one run in one tier.

    Idempotent. Adding a rule never removes more. Appending restorable checkpoints at the end, whose commit
    times are not before the former newest one's, keeps none that would have gone without them, except the
    newest verified one while those appended are unverified.

    Args:
        policy: None keeps everything.
        candidates: oldest first, in the run's effective order; each checkpoint once.
        now: seconds since the epoch, by the collector's clock: only to notice that times cannot be trusted.

    Returns:
        One decision per candidate, in their order.
    """
    reasons: list[list[str]] = [list(candidate.holders) for candidate in candidates]
    counted = [row for row, candidate in enumerate(candidates) if candidate.entry.facts.restorable]
    entries = [candidate.entry for candidate in candidates]
    if policy is None:
        for row in counted:
            reasons[row].append("no policy")
    elif counted:
        for row, reason in _Rules(policy, entries, counted, now).reasons():
            reasons[row].append(reason)
    if counted:
        reasons[counted[-1]].insert(0, "newest restorable")
        verified = [row for row in counted if entries[row].facts.verified_at is not None]
        if verified and verified[-1] != counted[-1]:
            reasons[verified[-1]].append("newest verified, while the newest is not")
    return [_decision(entry, why) for entry, why in zip(entries, reasons, strict=True)]


def _decision(entry: Entry, why: list[str]) -> Decision:
    facts = entry.facts
    if facts.doomed or facts.forgotten:
        going = "to be deleted" if facts.doomed else "forgotten"
        return Decision(entry.checkpoint, bool(why), (*why, going))
    if facts.damaged:
        why.append("damaged: neither counted nor deleted")
    elif facts.invalid_reason is not None:
        why.append("marked invalid: neither counted nor deleted")
    elif not facts.restorable:
        why.append("not restorable: neither counted nor deleted")
    return Decision(entry.checkpoint, bool(why), tuple(why) or ("no rule keeps it",))


class _Rules:
    """One policy over one run: (row, reason) of what each of its rules keeps."""

    def __init__(self, policy: Keep, entries: Sequence[Entry], rows: Sequence[int], now: float) -> None:
        """Looks at nothing but the restorable ones, `rows`, oldest first."""
        self._policy = policy
        self._entries = entries
        self._rows = rows
        self._newest = entries[rows[-1]].created_at
        self._untrusted = not self._newest <= now + AHEAD_SECONDS

    def reasons(self) -> Iterator[tuple[int, str]]:
        policy, entries = self._policy, self._entries
        if policy.last:
            yield from ((row, f"last {policy.last}") for row in self._rows[-policy.last :])
        for distance in policy.every:
            yield from self._every(distance)
        if policy.within:
            text = f"within {duration_text(policy.within)} of the newest"
            yield from self._timely(text, (row for row in self._rows if self._age(row) <= policy.within))
        for name, count, period_of in (
            ("hourly", policy.hourly, lambda at: at // _HOUR),
            ("daily", policy.daily, lambda at: at // _DAY),
            ("weekly", policy.weekly, lambda at: (at // _DAY + _THURSDAY) // 7),
        ):
            if count:
                yield from self._timely(f"{name} {count}", self._periods(count, period_of))
        for row in self._rows:
            fitting = [tag for tag in entries[row].facts.tags if _fits(tag, policy.tags)]
            if fitting:
                yield row, f"tagged {', '.join(fitting)}"
        for rule in policy.bests:
            yield from self._best(rule)

    def _age(self, row: int) -> float:
        return self._newest - self._entries[row].created_at

    def _timely(self, text: str, rows: Iterable[int]) -> Iterator[tuple[int, str]]:
        if self._untrusted:
            ahead = "the newest commit time is more than a day ahead of this clock"
            yield from ((row, f"{text}: not decided, {ahead}") for row in self._rows)
        else:
            yield from ((row, text) for row in rows)

    def _every(self, distance: int) -> Iterator[tuple[int, str]]:
        buckets: dict[int, int] = {}
        for (
            row
        ) in self._rows:  # an exact multiple is the lowest step of its bucket; of equals the newer stays
            step = self._entries[row].step
            held = buckets.get(step // distance)
            if held is None or step <= self._entries[held].step:
                buckets[step // distance] = row
        for bucket, row in buckets.items():
            first = bucket * distance
            exact = self._entries[row].step == first
            none = f" (the lowest of {first} to {first + distance - 1}, without a multiple)"
            yield row, f"every {distance}" + ("" if exact else none)

    def _periods(self, count: int, period_of: Callable[[float], float]) -> list[int]:
        newest = {period_of(self._entries[row].created_at): row for row in self._rows}
        return [newest[period] for period in sorted(newest)[-count:]]

    def _best(self, rule: Best) -> Iterator[tuple[int, str]]:
        name = f"best {rule.n} by {rule.metric} ({rule.mode})"
        known: list[int] = []
        for row in reversed(self._rows):  # the newer first: the sort below is stable
            value = self._entries[row].facts.metrics.get(rule.metric)
            if value is None:
                if self._untrusted or self._age(row) < rule.wait:
                    yield row, f"awaiting {rule.metric}, for {duration_text(rule.wait)}"
            elif not math.isnan(value):
                known.append(row)

        def value_of(row: int) -> int | float:
            return self._entries[row].facts.metrics[rule.metric]

        # Not by the negated value: `reverse` keeps equal ones in their order, too.
        for row in sorted(known, key=value_of, reverse=rule.mode == "max")[: rule.n]:
            yield row, f"{name}: {value_of(row):.6g}"


def _rules_text(policy: Keep) -> Iterator[str]:
    if policy.last:
        yield f"last {policy.last}"
    yield from (f"every {distance}" for distance in policy.every)
    if policy.within:
        yield f"within {duration_text(policy.within)}"
    for name in ("hourly", "daily", "weekly"):
        if getattr(policy, name):
            yield f"{name} {getattr(policy, name)}"
    yield from (f"best {rule.n} by {rule.metric} ({rule.mode})" for rule in policy.bests)
    yield "any tag" if "*" in policy.tags else f"tags {', '.join(policy.tags) or 'none'}"


def _fits(tag: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(tag, pattern) for pattern in patterns)


def _count(option: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"retention: {option} must be a whole number, 1 or more, not {value!r}")
    return value


def _seconds(option: str, value: object) -> float:
    seconds = seconds_of(cast(Any, value), f"retention: {option}")
    if option == "within" and not seconds:
        raise UsageError("retention: within must be more than 0")
    return seconds


def _patterns(tags: object) -> tuple[str, ...]:
    items = list(tags) if isinstance(tags, Iterable) and not isinstance(tags, (str, bytes)) else [None]
    if not all(isinstance(item, str) and item for item in items):
        raise UsageError(f"retention: tags must be a list of names or patterns, not {tags!r}")
    return tuple(sorted(set(cast("list[str]", items))))


def _refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    unknown = sorted(str(name) for name in fields if name not in known)
    if unknown:
        raise UsageError(f"{what}: unknown option {unknown[0]!r}", hint=f"it has {', '.join(known)}")
