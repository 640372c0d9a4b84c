"""The elastic example, of which one worker stops, or kills itself, in the middle of a save.

CKPT_TEST_AT is ``STEP RANK HOW FILE``: in the save of STEP, when it has written its share, the worker of RANK
(``*``: of any) leaves its pid in FILE and is ``stuck`` or ``dead``. Once only: not if there is a FILE.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

from ckptstore.save import ranked, share
from ckptstore.save.parts import Part
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.work import Work
from ckptstore.tier.tier import Tier

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic" / "train.py"


def strike_at(step: int, rank: str, how: str, marker: Path) -> None:
    write = share.write_part

    def struck(tier: Tier, rank_here: int, work: Work, index: ReuseIndex) -> Part:
        part = write(tier, rank_here, work, index)
        if work.attempt.step == step and rank in ("*", os.environ["RANK"]) and not marker.exists():
            marker.with_suffix(".new").write_text(str(os.getpid()))
            marker.with_suffix(".new").rename(marker)
            if how == "dead":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        return part

    setattr(ranked, "write_part", struck)  # noqa: B010 - the name is not the module's own


if __name__ == "__main__":
    told = os.environ.get("CKPT_TEST_AT", "").split(" ", 3)
    if len(told) == 4:
        strike_at(int(told[0]), told[1], told[2], Path(told[3]))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
