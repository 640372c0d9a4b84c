"""What is to be kept of a run, of each tier's copies and of single components; and its document.

Rules are :class:`~ckptstore.model.retention.Keep`; this says where each of them holds. No I/O here;
:mod:`ckptstore.tier.policies` reads and writes the documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ckptstore.errors import DocumentError, FormatTooNewError, UsageError
from ckptstore.model.documents import Fields, seal, unseal
from ckptstore.model.retention import BEST_OPTIONS, OPTIONS, Keep

Origin = Literal["code", "file", "command"]
ORIGINS: tuple[Origin, ...] = ("code", "file", "command")

_PARTS = ("components", "tiers")


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What is kept, where, and of which components.

    Attributes:
        keep: which checkpoints; None keeps all of them.
        components: component -> of which of the kept checkpoints it is kept, too; the others go on without
            it. A component that is not named stays with its checkpoint.
        tiers: name of a tier -> which checkpoints are kept there, instead of `keep`.

    Example:
        >>> Policy(Keep(last=3, every=1000), components={"optimizer": Keep(last=3)})
    """

    keep: Keep | None = None
    components: Mapping[str, Keep] = dataclasses.field(default_factory=dict, hash=False)
    tiers: Mapping[str, Keep] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Keep | None):
            raise UsageError(f"retention: {self.keep!r} is no Keep", hint="write Keep(last=3)")
        for name in _PARTS:
            object.__setattr__(self, name, _keeps(name, getattr(self, name)))
        if self.keep is None and not self.components and not self.tiers:
            raise UsageError("a retention policy needs a rule", hint="to keep everything, set no policy")

    @classmethod
    def of(cls, given: Keep | Policy) -> Policy:
        """A policy out of rules for all tiers, or as it is.

        Raises:
            UsageError: it is neither.
        """
        if isinstance(given, Policy):
            return given
        if not isinstance(given, Keep):
            raise UsageError(f"retention must be a Keep or a Policy, not {given!r}")
        return cls(given)

    def for_tier(self, name: str) -> Keep | None:
        """The rules that hold in a tier: its own, else those for all; None keeps everything."""
        return self.tiers.get(name, self.keep)

    # --- as plain data ------------------------------------------------------------------------

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Policy:
        """A policy out of a toml table or a stored document.

        Args:
            fields: the options of :meth:`Keep.from_map`, and ``components`` and ``tiers``: tables of such
                tables by name.

        Raises:
            UsageError: names the option that is unknown or cannot be used.
        """
        parts = {
            part: {name: Keep.from_map(_table(rules)) for name, rules in _table(fields.get(part, {})).items()}
            for part in _PARTS
        }
        rules = {name: value for name, value in fields.items() if name not in _PARTS}
        return cls(Keep.from_map(rules) if rules else None, **parts)

    def as_map(self) -> dict[str, Any]:
        """Plain data for :meth:`from_map`: msgpack, JSON and toml hold it."""
        fields: dict[str, Any] = {} if self.keep is None else self.keep.as_map()
        for part in _PARTS:
            keeps: Mapping[str, Keep] = getattr(self, part)
            if keeps:
                fields[part] = {name: keep.as_map() for name, keep in keeps.items()}
        return fields

    def __str__(self) -> str:
        """All rules, for people: ``last 3, any tag; optimizer: last 3, any tag; in s3: every 1000``."""
        parts = ["all" if self.keep is None else str(self.keep)]
        parts += [f"{name}: {keep}" for name, keep in self.components.items()]
        parts += [f"in {name}: {keep}" for name, keep in self.tiers.items()]
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyDoc:
    """A decision about what is to be kept, of one run or of all that have none of their own.

    Attributes:
        number: the highest counts.
        origin: who said so: "code" (``store.run(retention=)``), "file" (a ``ckptstore.toml``), "command".
        policy: None: as if there had never been one.
    """

    number: int
    at: float
    author: str
    origin: Origin
    policy: Policy | None


def encode_policy(document: PolicyDoc) -> bytes:
    """``policies/<n>.mp`` and ``runs/<run key>/policies/<n>.mp``."""
    body = {
        "number": document.number,
        "at": document.at,
        "author": document.author,
        "origin": document.origin,
        "policy": None if document.policy is None else document.policy.as_map(),
    }
    return seal("policy", body)


def decode_policy(data: bytes, what: str) -> PolicyDoc:
    """Reads a policy document back.

    Raises:
        DocumentError: it is damaged, or holds a value that no policy has.
        FormatTooNewError: also when it has a rule that this release does not know: what that would keep,
            this release would delete.
    """
    fields = Fields(unseal(data, "policy", what=what)[1], what)
    origin = fields.get("origin", str)
    given = fields.optional("policy", dict)
    if origin not in ORIGINS:
        raise DocumentError(f"{what}: unknown origin {origin[:20]!r}")
    try:
        policy = None if given is None else Policy.from_map(given)
    except UsageError as error:
        unknown = _unknown_rule(given or {})
        if unknown is not None:
            raise FormatTooNewError(
                f"{what}: unknown retention rule {unknown[:40]!r}", hint="upgrade ckptstore on this machine"
            ) from error
        raise DocumentError(f"{what}: {error.message}") from error
    return PolicyDoc(
        number=fields.get("number", int),
        at=fields.number("at"),
        author=fields.get("author", str),
        origin=origin,
        policy=policy,
    )


def _keeps(what: str, given: object) -> dict[str, Keep]:
    if not isinstance(given, Mapping):
        raise UsageError(f"retention: {what} must map names to rules, not {given!r}")
    for name, keep in given.items():
        if not isinstance(name, str) or not name or not isinstance(keep, Keep):
            raise UsageError(
                f"retention: {what}: {name!r}: {keep!r} is no rule for a name",
                hint=f'write {what}={{"name": Keep(last=3)}}',
            )
    return dict(sorted(given.items()))


def _table(given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise UsageError(f"retention: expected a table of rules, not {given!r}")
    return given


def _unknown_rule(fields: Mapping[str, Any]) -> str | None:
    """The first name in a policy's map that this release does not know; None when that is not the matter."""
    tables = [fields, *(table for part in _PARTS for table in _maps(fields.get(part)))]
    known: list[tuple[object, tuple[str, ...]]] = [(fields, (*OPTIONS, *_PARTS))]
    known += [(table, OPTIONS) for table in tables[1:]]
    for table in tables:
        best = table.get("best") if isinstance(table, Mapping) else None
        known += [(each, BEST_OPTIONS) for each in (best if isinstance(best, list) else [best])]
    for table, names in known:
        for name in table if isinstance(table, Mapping) else ():
            if name not in names:
                return str(name)
    return None


def _maps(given: object) -> list[object]:
    return list(given.values()) if isinstance(given, Mapping) else []
