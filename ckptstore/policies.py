"""What an open store keeps: what its tiers say, and what a ``ckptstore.toml`` or a caller adds to it.

Whoever collects reads the policy in the tier itself, so what is said elsewhere has to get there: it is
recorded when a session opens and when a full collection begins. Of two that speak of the same run, the one
that names it more closely counts: ``store.run(retention=)`` and ``ckptstore policy set RUN`` before a pattern
in a file, and that before a default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ckptstore.config import FilePolicies
from ckptstore.errors import CkptstoreError, ConflictError, DocumentError
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.policies import Origin, Policy, PolicyDoc
from ckptstore.tier import policies as documents
from ckptstore.tier import runs
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


Change = tuple[Policy | None, Origin]
"""What is to be recorded, and who says so."""


class Source(Protocol):
    """What this asks of its store."""

    @property
    def tiers(self) -> Sequence[Tier]: ...


class Policies:
    """The retention policies of one open store.

    Args:
        source: the store.
        file: what its ``ckptstore.toml`` says; None when it was not opened by one.
    """

    def __init__(self, source: Source, file: FilePolicies | None) -> None:
        self._source = source
        self._file = file

    def of(
        self,
        run: str,
        tier: Tier | None = None,
        *,
        given: Policy | None = None,
        default: Policy | None = None,
    ) -> Policy | None:
        """What holds for a run, as soon as it is recorded; None keeps everything.

        Args:
            tier: whose documents are read; of the first unless given.
            given: instead of the run's own.
            default: instead of the store's.

        Raises:
            DocumentError, FormatTooNewError: a policy cannot be read.
        """
        where = tier or self._source.tiers[0]
        if given is None:
            newest = documents.newest_policy(where, run_key_of(run))
            given = _after(newest, self._change(run, newest))
        if default is None:
            newest = documents.newest_policy(where, None)
            default = _after(newest, self._default_change(newest))
        return documents.overlaid(given, default)

    def said(self, run: str, given: Policy | None) -> Policy | None:
        """What code or the file says of a run; nothing is read."""
        if given is not None or self._file is None:
            return given
        return documents.overlaid(self._file.of_run(run), self._file.default)

    def own(self, run: str | None) -> PolicyDoc | None:
        """What was recorded last of a run or, with None, of all that have no policy of their own.

        Raises:
            DocumentError, FormatTooNewError: it cannot be read.
        """
        return documents.newest_policy(self._source.tiers[0], None if run is None else run_key_of(run))

    def own_of_runs(self) -> list[tuple[str, PolicyDoc]]:
        """(run, its own policy) of those that have one, by name.

        Raises:
            DocumentError, FormatTooNewError: one cannot be read.
        """
        tier = self._source.tiers[0]
        found = []
        for run_key in documents.runs_with_policies(tier):
            named, newest = runs.read_run(tier, run_key), documents.newest_policy(tier, run_key)
            if newest is not None and newest.policy is not None:
                found.append((run_key if named is None else named[0], newest))
        return sorted(found, key=lambda pair: pair[0])

    def set(self, run: str | None, policy: Policy | None) -> PolicyDoc:
        """Records a policy of a run or, with None, the default; ``policy=None`` takes it back.

        It holds from the next round of collecting on. A training that says something else by
        ``store.run(retention=)`` says so again when it starts.

        Raises:
            ConflictError: the store's ``ckptstore.toml`` has a default, which would soon be back.
            BackendError: the first tier cannot be written.
        """
        if run is None and self._file is not None and self._file.default is not None:
            raise ConflictError(
                f"the default retention of this store is in {self._file.path}", hint="change it there"
            )
        return self._write(run, policy, "command")

    def opened(self, run: str, given: Policy | None) -> None:
        """Records what a session says as it opens; failing is loud, and stops no training."""
        if given is None and self._file is None:
            return
        try:
            if self._file is not None:
                self._record(None, self._default_change)
            self._record(
                run,
                lambda newest: self._change(run, newest) if given is None else _said(given, newest, "code"),
            )
        except CkptstoreError as error:
            log.error("the retention of run %r could not be recorded: %s", run, error.message)

    def settle(self, runs: Iterable[str]) -> None:
        """Before a full collection: what the file says is recorded, and the tiers agree.

        Raises:
            DocumentError, FormatTooNewError: a policy cannot be read.
            BackendError: a tier does not answer.
        """
        tiers = self._source.tiers
        # One listing, for there may be ten thousand runs without a policy of their own.
        have = {run_key for tier in tiers for run_key in documents.runs_with_policies(tier)}
        for run in (None, *runs):
            newest = None
            if run is None or run_key_of(run) in have:
                if len(tiers) > 1:
                    documents.level(tiers, None if run is None else run_key_of(run))
                newest = self.own(run)
            change = self._default_change(newest) if run is None else self._change(run, newest)
            if change is not None:
                self._write(run, *change)

    # --- what a file and a caller say ----------------------------------------------------------

    def _default_change(self, newest: PolicyDoc | None) -> Change | None:
        """What the file makes of the default."""
        if self._file is None:
            return None
        if self._file.default is not None:
            return _said(self._file.default, newest, "file")
        return _taken_back(newest)

    def _change(self, run: str, newest: PolicyDoc | None) -> Change | None:
        """What the file makes of a run's own policy: what code or a person said of that very run stays."""
        if self._file is None:
            return None
        wanted = self._file.of_run(run)
        if wanted is None:
            return _taken_back(newest)
        if newest is not None and newest.policy is not None and newest.origin != "file":
            return None
        return _said(wanted, newest, "file")

    def _record(self, run: str | None, change_of: Callable[[PolicyDoc | None], Change | None]) -> None:
        try:
            newest = self.own(run)
        except DocumentError as error:
            log.error("a retention policy cannot be read, and is replaced: %s", error.message)
            newest = None
        change = change_of(newest)
        if change is not None:
            if newest is not None and newest.origin == "command":
                log.warning("what %s set by `ckptstore policy` is replaced", newest.author)
            self._write(run, *change)

    def _write(self, run: str | None, policy: Policy | None, origin: Origin) -> PolicyDoc:
        key = None if run is None else run_key_of(run)
        document = documents.write_policy(self._source.tiers, key, policy, origin=origin)
        log.info(
            "retention of %s is now: %s",
            "all runs without their own" if run is None else f"run {run!r}",
            policy or ("everything" if run is None else "as the default says"),
        )
        return document


def _said(policy: Policy, newest: PolicyDoc | None, origin: Origin) -> Change | None:
    if newest is not None and newest.policy == policy and newest.origin in (origin, "code", "command"):
        return None
    return policy, origin


def _taken_back(newest: PolicyDoc | None) -> Change | None:
    """What a file said once and says no more."""
    if newest is None or newest.policy is None or newest.origin != "file":
        return None
    return None, "file"


def _after(newest: PolicyDoc | None, change: Change | None) -> Policy | None:
    if change is not None:
        return change[0]
    return None if newest is None else newest.policy
