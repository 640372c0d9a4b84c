"""What an open store consists of, and what can be asked of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from ckptstore.catalog import Catalog
from ckptstore.collecting import Collecting
from ckptstore.config import StoreConfig
from ckptstore.errors import (
    CkptstoreError,
    NotFoundError,
    StoreNotFoundError,
)
from ckptstore.events import Hook, Hooks
from ckptstore.gc.survey import Hints
from ckptstore.manifest import RunRow
from ckptstore.model.history import Entry
from ckptstore.model.record import EpochDoc
from ckptstore.model.retention import Keep
from ckptstore.policies import Policies
from ckptstore.replication import Replication
from ckptstore.tier import layout
from ckptstore.tier import runs as run_documents
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier
from ckptstore.tiers import Tiers

log = logging.getLogger("ckptstore")


class StoreView:
    """Tiers, manifest and services of an open store.

    Attributes:
        tier: the first tier that answers.
        catalog: the manifest, brought up to date from the tiers.
        hooks: told of saves and restores.
        policies, replication, collecting: what goes on in the background, or when it is asked for.
    """

    def __init__(self, config: StoreConfig, tiers: Tiers | Tier, hooks: Iterable[Hook] = ()) -> None:
        self._config = config
        self._opened = tiers if isinstance(tiers, Tiers) else Tiers((tiers,))
        self.tier = self._opened.tiers[0]
        self.catalog = Catalog(*self.tiers, unreachable=self.unreachable)
        self.hooks = Hooks(hooks)
        self.policies = Policies(self, config.policies)
        self.replication = Replication(self)
        self.collecting = Collecting(self)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Its tiers that answer, hottest first."""
        return self._opened.tiers

    @property
    def unreachable(self) -> Mapping[str, CkptstoreError]:
        """Name -> why, of the configured tiers that could not be opened."""
        return self._opened.unreachable

    @property
    def hottest(self) -> Tier:
        """The tier that saves go to.

        Raises:
            CkptstoreError: it could not be opened; :attr:`tier` is then a colder one.
        """
        name = self._opened.hottest
        return self.tier if name is None else self.tier_named(name)

    def tier_named(self, name: str) -> Tier:
        """The tier of that name.

        Raises:
            NotFoundError: it has none; the names are given.
            CkptstoreError: it could not be opened.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        if name in self.unreachable:
            raise self.unreachable[name]
        raise NotFoundError(
            f"{self.url} has no tier {name!r}", hint=f"its tiers are {', '.join(t.name for t in self.tiers)}"
        )

    def check_savable(self, *, offline: bool = False) -> None:
        """That the tier that saves go to is there, and those that know of other sessions answer.

        Args:
            offline: the others need not; those that do not are logged.

        Raises:
            StoreNotFoundError, BackendError: what the tier said.
        """
        for name, error in self.unreachable.items():
            is_absent = isinstance(error, StoreNotFoundError)
            if name == self._opened.hottest:
                hint = "`ckptstore init` makes a tier whose disk is new" if is_absent else "wait for it"
            elif offline:
                log.warning("saves begin without tier %s: %s", name, error.message)
                continue
            else:
                hint = run_documents.MISSING_TIER_HINT
                if is_absent:
                    hint = f"mount it, or make it by `ckptstore init` if its disk is new; else {hint}"
            raise type(error)(
                f"nothing can be saved while tier {name!r} is missing: {error.message}", hint=hint
            )

    def tier_of(self, entry: Entry) -> Tier:
        """Where the record is that speaks for a checkpoint."""
        return next((tier for tier in self.tiers if tier.uuid == entry.tier), self.tier)

    def copies_of(self, run_key: str, entry: Entry) -> list[Copy]:
        """A checkpoint's records in the tiers that answer, hottest first, damaged ones last."""
        by_uuid = {tier.uuid: tier for tier in self.tiers}
        wanted = entry.copies or ((self.tier_of(entry).uuid, entry.attempt),)
        return [Copy(by_uuid[uuid], run_key, attempt) for uuid, attempt in wanted if uuid in by_uuid]

    def note_committed(self, tier: Tier, run_key: str, attempt: str) -> None:
        """Remembers a record that this process knows to be in a tier: a listing may not show it yet."""
        self.catalog.note_committed(tier, run_key, attempt)

    @property
    def url(self) -> str:
        """Where its first tier is."""
        return self.tier.url

    @property
    def uuid(self) -> str:
        """Its identity: made at ``init``, the same in all tiers."""
        return self.tier.marker.store_uuid

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk."""
        return self.tier.marker.chunk_bytes

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    def runs(self) -> list[RunRow]:
        """All runs by name, with totals."""
        self.catalog.refresh()
        return self.catalog.ask(lambda manifest: manifest.runs())

    def run_names(self) -> list[tuple[str, str]]:
        """(name, key) of all runs that are known."""
        return [(row.run, row.run_key) for row in self.catalog.ask(lambda manifest: manifest.runs())]

    def refresh(self, run_key: str | None = None) -> None:
        """Brings the manifest up to date with the tiers: one run's part, or all."""
        self.catalog.refresh(run_key)

    def replicas(self, run_key: str) -> dict[str, dict[str, Entry]]:
        """Tier uuid -> checkpoint id -> the record that counts there, as far as it was read."""
        return self.catalog.replicas(run_key)

    def sessions(self, run_key: str) -> list[EpochDoc]:
        """A run's sessions, in order, as far as they were read."""
        return self.catalog.ask(lambda manifest: manifest.sessions(run_key))

    def keep_in(self, tier: Tier, run: str) -> Keep | None:
        """Which checkpoints of a run retention keeps in a tier, by what the first tier says; None keeps all.

        Raises:
            DocumentError, FormatTooNewError: a policy cannot be read.
        """
        policy = self.policies.of(run)
        return None if policy is None else policy.for_tier(tier.name)

    def silent_below(self, tier: Tier) -> dict[str, CkptstoreError]:
        """Name -> why, of colder tiers that require checkpoints and could not be opened."""
        names = [each.name for each in self._config.tiers]
        place = names.index(tier.name) if tier.name in names else -1
        return {
            each.name: self.unreachable[each.name]
            for each in self._config.tiers[place + 1 :]
            if each.name in self.unreachable and each.requirement != "manual"
        }

    def hints(self, tier: Tier) -> Hints:
        """What the manifest knows of a tier, as it was last brought up to date."""
        known: list[str] = []
        noted: list[str] = []
        for _, key in self.run_names():
            attempts = self.catalog.ask(lambda m, key=key: m.known_attempts(tier.uuid, key))  # type: ignore[misc]
            known += [layout.commit_key(key, a) for a, kind in attempts.items() if kind == "record"]
            noted += self.catalog.ask(lambda m, key=key: m.known_notes(tier.uuid, key))  # type: ignore[misc]
        return Hints(known, noted)
