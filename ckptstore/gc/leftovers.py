"""Documents and files that ended attempts left: intents, what ranks said, temporary files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from ckptstore.gc import deleting, listing
from ckptstore.gc.holders import is_silent
from ckptstore.gc.listing import SAVERS, Announced
from ckptstore.gc.lock import ASKED
from ckptstore.gc.standing import Standing
from ckptstore.tier import layout
from ckptstore.tier.intents import SILENT_SECONDS
from ckptstore.tier.tier import Tier

LONG_SECONDS = 86400.0
"""So old, what ranks left for each other is of no start, and of no save, that goes on."""

_ATTEMPT = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}--?[0-9]{1,19}-[0-9]{1,10}")


class Leftovers:
    """Clears the documents and files of a tier.

    Args:
        standing: intents and commit keys, just now.
        is_over: attempt -> whether it is ended, or counts as such, and is to be cleared.
        now: seconds since the epoch, by the tier's own clock.
        run_keys: only of these runs; None: of all, and what belongs to none.
        dry_run: only counts.
    """

    def __init__(
        self,
        tier: Tier,
        standing: Standing,
        is_over: Callable[[str], bool],
        now: float,
        *,
        run_keys: Collection[str] | None,
        dry_run: bool,
    ) -> None:
        self._tier = tier
        self._standing = standing
        self._is_over = is_over
        self._now = now
        self._run_keys = run_keys
        self._dry_run = dry_run
        self._of_run = {attempt: run_key for run_key, attempt in standing.keys}
        self._announced: Mapping[str, Announced] = {one.document.attempt: one for one in standing.intents}

    def _tidy(self, keys: Sequence[str]) -> int:
        return len(keys) if self._dry_run else deleting.tidy(self._tier, keys)

    def intents(self) -> int:
        """Those of savers with an outcome, of silent readers, and heartbeats without an intent."""
        over = []
        for attempt, announced in self._announced.items():
            kind = announced.document.kind
            is_over = kind == "read" and is_silent(announced, self._now)
            if kind in SAVERS:
                is_decided = listing.is_decided(self._tier, announced, self._standing.keys)
                is_over = is_decided or self._is_over(attempt)
            if is_over and self._is_asked_for(announced.commit[0]):
                over += [layout.intent_key(attempt), layout.beat_key(attempt)]
        gone = self._tidy(over) // 2
        beats = [
            info.key
            for info in self._tier.listing("intents/")
            if info.key.endswith(".beat")
            and info.key.removeprefix("intents/").removesuffix(".beat") not in self._announced
            and self._now - info.modified > SILENT_SECONDS
        ]
        self._tidy(beats)
        return gone

    def _is_asked_for(self, run_key: str) -> bool:
        return self._run_keys is None or run_key in self._run_keys

    def parts(self) -> int:
        """What the ranks of decided attempts said, and words of starts of long ago."""
        over = []
        for info in self._tier.listing("parts/"):
            owner, _, _ = info.key.removeprefix("parts/").partition("/")
            age = self._now - info.modified
            if owner in self._of_run:
                # A rank may still be about to read why it failed.
                is_over = age > SILENT_SECONDS and self._is_asked_for(self._of_run[owner])
            elif listing.is_attempt(owner):  # of a save that rank 0 never announced, if it is so old
                is_lost = owner not in self._announced and age > LONG_SECONDS and self._run_keys is None
                is_over = is_lost or self._is_over(owner)
            else:
                is_over = owner.startswith("words-") and age > LONG_SECONDS and self._run_keys is None
            if is_over:
                over.append(info.key)
        return self._tidy(over)

    def temporaries(self) -> int:
        """Files of writes that ended long ago, but for those of attempts that may still go on."""
        if self._run_keys is not None:
            return 0
        backend = self._tier.backend
        over = [
            info.key
            for info in backend.list_temporaries("")
            if self._now - info.modified > SILENT_SECONDS and not self._may_go_on(info.key)
        ]
        over += [
            info.key
            for info in self._tier.listing("gc/")
            if info.key.startswith(ASKED) and self._now - info.modified > SILENT_SECONDS
        ]
        return self._tidy(over)

    def _may_go_on(self, key: str) -> bool:
        owner = _ATTEMPT.search(key)
        announced = None if owner is None else self._announced.get(owner[0])
        return announced is not None and not is_silent(announced, self._now)
