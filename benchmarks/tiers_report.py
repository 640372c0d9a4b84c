"""What the benchmark of tiers says: aims, and the table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import goals, tiers_counts, tiers_slowdown
from benchmarks.goals import Goal
from benchmarks.report import OURS, Report
from benchmarks.tiers_counts import Counted, Memory, Moved, OneTensor
from benchmarks.tiers_slowdown import Slowed

_OF_PEER, _MOVED, _SLOWED = 0.9, 0.02, 0.05


def aims(
    report: Report,
    moved: Moved,
    tensor: OneTensor,
    counts: dict[str, list[Counted]],
    slowed: Sequence[Slowed],
    memory: Memory,
) -> list[Goal]:
    """What ckptstore is held to."""
    found = []
    for row in report.rows:
        rivals = [
            line
            for line in report.lines()
            if line.row == row and line.name != OURS and line.mark == "yes" and line.times_ours is not None
        ]
        nearest = min(rivals, key=lambda line: line.seconds, default=None)
        if nearest is not None and nearest.times_ours is not None:
            aim = f"at least {_OF_PEER} of the faster checked peer"
            found.append(Goal(row, aim, nearest.times_ours, _OF_PEER, at_most=False, note=nearest.name))
    aim = f"at most {_MOVED:.0%} of the bytes"
    found.append(
        Goal("second checkpoint, 99 % unchanged", aim, 100 * moved.stored_share, 100 * _MOVED, at_most=True)
    )
    found.append(
        Goal(
            "one tensor out of a checkpoint on S3",
            "bytes got / its own, at most 1",
            tensor.bytes_got / tensor.tensor_bytes,
            1.0,
            at_most=True,
        )
    )
    lists = max(each.requests.get("LIST", 0) for each in counts["save"])
    found.append(Goal("LISTs of a save", "none", lists, 0, at_most=True))
    for each in slowed[:1]:
        aim = f"at most {_SLOWED:.0%} slower, while {tiers_slowdown.RATE}/s are copied"
        note = f"{each.low - 1:+.1%} .. {each.high - 1:+.1%}"
        found.append(
            Goal(
                "save to the local tier", aim, 100 * (each.times - 1), 100 * _SLOWED, at_most=True, note=note
            )
        )
    limit = memory.budget_bytes / (1 << 20)
    found.append(
        Goal(
            "memory of replication",
            f"at most its budget, {limit:.0f} MiB",
            memory.grown_bytes / (1 << 20),
            limit,
            at_most=True,
        )
    )
    return found


def table(
    report: Report,
    shares: dict[str, float],
    moved: Moved,
    counts: dict[str, list[Counted]],
    tensor: OneTensor,
    slowed: Sequence[Slowed],
    memory: Memory,
) -> str:
    """Everything, for people."""
    held_to, report.goals = report.goals, []
    text = [report.table().rstrip("\n"), "", "the server's share of the CPUs, while ours ran"]
    report.goals = held_to
    text += [f"  {row:<28}{share:>5.0%}" for row, share in shares.items()]
    text += ["", *tiers_counts.lines(moved, counts, tensor), "", *tiers_slowdown.lines(slowed)]
    text += ["", "memory of replication, at its peak beyond what the process had before"]
    grown, budget = memory.grown_bytes / (1 << 20), memory.budget_bytes / (1 << 20)
    text += [f"  {grown:.0f} MiB; budget {budget:.0f} MiB, of which a quarter is kept for the next objects"]
    text += ["", "aims", *goals.table(held_to)]
    return "\n".join(text)
