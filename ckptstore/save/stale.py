"""Saves of a state that does not change: a known way to lose a training.

A state dict that was taken once, or a model that the optimizer does not train, is saved again and again
without an error, and what was learned is gone when it is needed.
"""

from __future__ import annotations

import logging

import numpy as np

from ckptstore.errors import CkptstoreError
from ckptstore.save.cut import Bools
from ckptstore.save.work import Work
from ckptstore.tier.contents import Contents

log = logging.getLogger("ckptstore")


def warn_if_stale(saved: Contents, base: Contents | None, trainable: Bools | None, work: Work) -> None:
    """Warns if all that is trained is as it was at another step; or has doubts, if it may not be trained now.

    Args:
        base: what was saved or restored before.
        trainable: bool, (tensors,): of the saved layout; guessed if not known.
        work: what was saved.
    """
    record = saved.record
    if base is None or base.record.run != record.run or base.record.step == record.step:
        return
    try:
        layout = saved.layout
        if base.record.tables["layout"].digest != record.tables["layout"].digest:
            return
        chosen = trainable
        if chosen is None or len(chosen) != len(layout.heads):
            chosen = layout.heads.probably_trained
        rows = np.flatnonzero(np.repeat(chosen, np.diff(layout.chunks.first)))
        now, before = saved.digests.array, base.digests.array
        # Nearly always the first of them has changed, and all need not be looked at.
        if not len(rows) or any((now[some] != before[some]).any() for some in (rows[:1], rows)):
            return
    except CkptstoreError as error:  # the tables of the base cannot be read: that is told elsewhere
        log.debug("not compared with step %d: %s", base.record.step, error.message)
        return
    if not work.is_sure:
        work.has_doubts = True
        return
    log.warning(
        "run %r step %d: every %s tensor is exactly as at step %d: is the state that is saved the one "
        "that is trained?",
        record.run,
        record.step,
        "trainable" if trainable is not None else "model",
        base.record.step,
    )
