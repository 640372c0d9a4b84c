"""What copying to a second tier asks of either tier: counted."""

from __future__ import annotations

import collections
import contextlib

from ckptstore.model.ids import run_key
from ckptstore.testing import FaultBackend
from tests.crash._support import make_state
from tests.replicate.made import RUN, opened, places

LONG = 60.0


def test_a_commit_makes_nobody_look_through_other_runs():
    """With many runs in a bucket their listings would cost more than the copy."""
    with places() as (hot, cold):
        logs = [FaultBackend(hot), FaultBackend(cold)]
        with contextlib.closing(opened(*logs, requirement="async")) as store:
            others = [f"other {number}" for number in range(3)]
            for name in others:
                with store.run(name) as run:
                    run.save(1, make_state(1))
            run = store.run(RUN)
            run.save(1, make_state(1)).wait("replicated", timeout=LONG)
            run.close()
            for log in logs:
                log.log.clear()
            run.save(2, make_state(2)).wait("replicated", timeout=LONG)
            run.close()
        keys = {run_key(name) for name in others}
        asked = [call for log in logs for call in log.log]
        assert not [call for call in asked if any(part in keys for part in call.key.split("/"))]
        listed = collections.Counter(call.key for call in logs[1].log if call.op == "list")
        assert not listed.keys() & {"", "runs/", "commits/"}
        # Twice each: woken by the commit, and by who waits for it.
        assert max(listed[f"{kind}/{run_key(RUN)}/"] for kind in ("commits", "dooms", "notes")) <= 3
