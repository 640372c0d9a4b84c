"""Two trainings compared: the loss of every step and the last weights, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ckptstore.demo.program import Training


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared.

    Attributes:
        steps: whose losses were compared.
        repeated: steps that the killed training did twice: before the kill and after it.
        differing: steps whose losses differ in any bit, or that one of the two lacks.
        digests: of the last weights: of the uninterrupted training, and of the killed one.
        last_loss: of the uninterrupted training.
    """

    steps: int
    repeated: int
    differing: tuple[int, ...]
    digests: tuple[str, str]
    last_loss: float

    @property
    def identical(self) -> bool:
        """Every loss and all weights."""
        return not self.differing and self.digests[0] == self.digests[1]


def compare(whole: Training, killed: Training) -> Comparison:
    """Compares what two trainings have written down."""
    one, other = _losses(whole.losses), _losses(killed.losses)
    steps = range(1, whole.steps + 1)
    differing = tuple(
        step for step in steps if len(one.get(step, [])) != 1 or {*one[step]} != {*other.get(step, [])}
    )
    return Comparison(
        steps=len(steps),
        repeated=sum(len(values) > 1 for values in other.values()),
        differing=differing,
        digests=(whole.digest.read_text().strip(), killed.digest.read_text().strip()),
        last_loss=float.fromhex(one[whole.steps][0]) if one.get(whole.steps) else float("nan"),
    )


def _losses(path: Path) -> dict[int, list[str]]:
    """Step -> the loss as hexadecimal text, which loses no bit, once for each time it was computed."""
    found: dict[int, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], []).append(entry["loss"])
    return found
