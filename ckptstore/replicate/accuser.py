"""Writing down what turned out bad while it was read."""

from __future__ import annotations

import logging

from ckptstore.errors import CkptstoreError
from ckptstore.save.saver import Reporter
from ckptstore.tier.copies import Copy

log = logging.getLogger("ckptstore")


class Accuser:
    """Marks copies damaged whose objects turned out bad, once each."""

    def __init__(self) -> None:
        self._reporters: dict[str, Reporter] = {}

    def accuse(self, copy: Copy, key: str, reason: str) -> None:
        """Writes it down in that tier, as far as that is possible."""
        try:
            reporter = self._reporters.setdefault(copy.tier.uuid, Reporter(copy.tier))
            reporter.report(copy.record, key, reason)
        except CkptstoreError as error:
            log.warning("that %s is damaged was not written down: %s", key, error.message)
