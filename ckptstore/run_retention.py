"""What is kept of a run: its policy, removing checkpoints on purpose, and taking that back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import ConflictError, GuardError, NotFoundError
from ckptstore.gc import forgetting, listing
from ckptstore.gc.forgetting import Kind
from ckptstore.model.durations import duration_text
from ckptstore.model.history import Facts
from ckptstore.model.policies import Policy
from ckptstore.model.record import CommitEnd
from ckptstore.run_notes import RunNotes
from ckptstore.tier import commits
from ckptstore.tier.copies import Copy

log = logging.getLogger("ckptstore")


class RunRetention(RunNotes):
    """Keeping and removing. Needs no session: a training that goes on is not disturbed."""

    _retention: Policy | None = None  # as given to store.run()
    _missed: frozenset[str] = frozenset()  # metrics that a save came without

    @property
    def policy(self) -> Policy | None:
        """What is kept of this run: its own policy, else the store's default; None keeps everything.

        Raises:
            DocumentError, FormatTooNewError: a policy cannot be read.
        """
        return self._store.policies.of(self.name, given=self._retention)

    def forget(self, *which: int | str | Checkpoint) -> list[Checkpoint]:
        """Asks garbage collection to delete checkpoints, whatever the policy says; the next round does.

        They are not restorable from now on. :meth:`undelete` takes it back, until they are being deleted.

        Returns:
            The checkpoints, as they were.

        Raises:
            NotFoundError: there is no such checkpoint; none is forgotten.
            GuardError: somebody needs one: a pin, a reader, a fork, a training; the error names who, and none
                is forgotten.
            BackendError: a tier could not be told; some may be forgotten.
        """
        found = [self.find(each) for each in which]
        self._forget(found)
        return found

    def forget_all(self) -> list[Checkpoint]:
        """As :meth:`forget`, of all checkpoints of the run."""
        found = self.checkpoints()
        if not found:
            raise self._nothing("all of them")
        self._forget(found)
        return found

    def undelete(self, which: int | str | Checkpoint) -> Checkpoint:
        """Takes :meth:`forget` back, and what garbage collection has announced for later.

        A policy that does not keep the checkpoint will have it expire again: tag or pin it, or change the
        policy.

        Raises:
            NotFoundError: there is none.
            ConflictError: nothing was to be deleted; or it is too late.
        """
        self._store.catalog.refresh(self.key)
        checkpoint = self._find_to_undelete(which)
        name = f"run {self.name!r} step {checkpoint.step}"
        copies = self._all_copies(checkpoint.id)
        alive = [(copy, facts) for copy, facts in copies if not facts.doomed]
        marks: list[Kind] = ["forgotten"] if any(facts.forgotten for _, facts in alive) else []
        if marks or any(facts.state == "expiring" for _, facts in alive):
            marks.append("expiring")
        if alive and not marks:
            raise ConflictError(f"{name} is {checkpoint.state}: nothing is to be undeleted")
        if alive:
            forgetting.mark(
                [copy for copy, _ in alive], self.name, checkpoint.id, dict.fromkeys(marks, False)
            )
        # Asked after the notes: a round that had not seen them has doomed it by then, or sees them.
        lost = forgetting.doomed_in(copy for copy, _ in copies)
        if len(lost) == len(copies):
            raise ConflictError(f"{name} is being deleted, or gone: it is too late to undelete it")
        if lost:
            log.warning("%s is being deleted in tier %s already", name, ", ".join(lost))
        return self.find(checkpoint.id)

    def _find_to_undelete(self, which: int | str | Checkpoint) -> Checkpoint:
        try:
            return self.find(which)
        except NotFoundError:
            if isinstance(which, str) and any(
                isinstance(commits.read_commit(tier, self.key, which.upper()), CommitEnd)
                for tier in self._store.tiers
                if listing.is_attempt(which.upper())
            ):
                raise ConflictError(
                    f"run {self.name!r}: {which} was deleted: it is too late to undelete it"
                ) from None
            raise

    def _all_copies(self, checkpoint: str) -> list[tuple[Copy, Facts]]:
        """Its records in the tiers that answer, doomed ones included, with their facts."""
        replicas = self._store.replicas(self.key)
        return [
            (Copy(tier, self.key, entry.attempt), entry.facts)
            for tier in self._store.tiers
            if (entry := replicas.get(tier.uuid, {}).get(checkpoint)) is not None
        ]

    def _warn_of_metrics(self, step: int, metrics: Mapping[str, object]) -> None:
        """Says once of each metric that retention counts by that a save came without it."""
        policy = self._store.policies.said(self.name, self._retention)
        if policy is None:
            return
        keeps = [policy.keep, *policy.components.values(), *policy.tiers.values()]
        wanted = {rule.metric: rule.wait for keep in keeps if keep is not None for rule in keep.bests}
        for metric in sorted(wanted.keys() - metrics.keys() - self._missed):
            self._missed |= {metric}
            log.warning(
                "run %r step %d has no metric %r, by which retention keeps the best: it has %s; "
                "annotate() adds it, and until then the checkpoint is kept for %s",
                self.name,
                step,
                metric,
                ", ".join(sorted(metrics)) or "none",
                duration_text(wanted[metric]),
            )

    # --- forgetting ---------------------------------------------------------------------------

    def _forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Notes it of all, unless somebody needs one of them."""
        self._store.refresh()  # forks are runs of their own
        wanted = [found for found in checkpoints if found.copies]
        who = self._needed_by(wanted)
        if who is not None:
            checkpoint, reason, hint = who
            raise GuardError(
                f"run {self.name!r} step {checkpoint.step} cannot be forgotten: {reason}", hint=hint
            )
        for checkpoint in wanted:
            forgetting.mark(checkpoint.copies, self.name, checkpoint.id, {"forgotten": True})
        for name in self._store.unreachable:
            log.warning("tier %s does not answer: what it has of run %r stays", name, self.name)

    def _needed_by(self, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, str, str] | None:
        """The first that somebody needs: (which, by whom, what to do about it)."""
        held = forgetting.held(copy for found in checkpoints for copy in found.copies)
        forks = self._forks()
        trainer, trained = self._live_session()
        for found in checkpoints:
            who = next(
                (held[pin] for copy in found.copies if (pin := (copy.run_key, copy.attempt)) in held), None
            )
            if who is not None:
                return found, f"it is {who}", "`ckptstore unpin` takes pins back; readers and saves end"
            if found.id in forks:
                return (
                    found,
                    f"run {forks[found.id]!r} was forked from it",
                    "forget the fork first",
                )
            if trainer is not None and trained(found):
                return found, f"it is of {trainer}", "end that training first"
        return None

    def _forks(self) -> dict[str, str]:
        """Checkpoint -> another run that began with it and can be restored."""
        found: dict[str, str] = {}
        for name, key in self._store.run_names():
            bases = {session.resumed_from for session in self._store.sessions(key)} if key != self.key else ()
            if bases and any(entry.facts.restorable for entry in self._store.catalog.history(key)):
                found.update({base: name for base in bases if base is not None})
        return found

    def _live_session(self) -> tuple[str | None, Callable[[Checkpoint], bool]]:
        """(who trains the run now, which checkpoints are that session's)."""
        sessions = self._store.sessions(self.key)
        if not sessions:
            return None, lambda _: False
        newest = sessions[-1]
        own = [entry for entry in self._store.catalog.history(self.key) if entry.epoch == newest.number]
        saved_at = max((entry.created_at for entry in own), default=0.0)
        who = forgetting.trained_by(self._tier, newest, saved_at)
        return who, lambda found: found.epoch == newest.number or found.id == newest.resumed_from
