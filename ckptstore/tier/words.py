"""Words that ranks leave for each other in a tier, where no torch.distributed carries them."""

from __future__ import annotations

import logging

from ckptstore.errors import CkptstoreError, ObjectExistsError, UsageError
from ckptstore.model.documents import Fields, seal, unseal
from ckptstore.model.ids import digest_of
from ckptstore.ranks import Words
from ckptstore.tier import layout
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


class TierWords(Words):
    """Words under a room of their own, named after run and session key."""

    def __init__(self, tier: Tier, run_key: str, key: str) -> None:
        self._tier = tier
        self._key = key
        self._room = layout.room(digest_of(f"{run_key}\0{key}".encode("utf-8", "surrogatepass")).hex()[:32])

    def put(self, topic: str, rank: int, data: bytes) -> None:
        """Leaves a word.

        Raises:
            UsageError: another start of this run has left one under the same session key.
        """
        try:
            self._tier.put_new(layout.word_key(self._room, topic, rank), seal("word", {"data": data}))
        except ObjectExistsError as error:
            raise UsageError(
                f"session_key={self._key!r} was used before",
                hint="it must be new at each start, and the same on all ranks: add the restart count",
            ) from error

    def get(self, topic: str, rank: int) -> bytes | None:
        """A word, or None when it is not there yet."""
        key = layout.word_key(self._room, topic, rank)
        found = self._tier.read(key)
        return None if found is None else Fields(unseal(found, "word", what=key)[1], key).get("data", bytes)

    def drop(self, topic: str, ranks: int) -> None:
        """Removes all words about a topic."""
        keys = [layout.word_key(self._room, topic, rank) for rank in range(ranks)]
        try:
            for result in self._tier.backend.delete(keys):
                if result.error is not None:
                    raise result.error
        except CkptstoreError as error:
            log.info("words about %s stay: %s", topic, error.message)
