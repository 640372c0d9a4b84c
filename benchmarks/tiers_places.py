"""Stores of one and two tiers for the benchmark of tiers."""

from __future__ import annotations

from pathlib import Path

import ckptstore
from benchmarks import states

RUN = "gpt"
HOT, COLD = "hot", "cold"


def two_tiers(
    file: Path, hot: Path, cold: str, *, replicate: str = "manual", rate: str | None = None
) -> Path:
    """Writes a ckptstore.toml."""
    cap = f'max_bytes_per_second = "{rate}"\n' if rate else ""
    file.write_text(
        f'[[tiers]]\nname = "{HOT}"\nurl = "{hot}"\n\n'
        f'[[tiers]]\nname = "{COLD}"\nurl = "{cold}"\nreplicate = "{replicate}"\n{cap}'
    )
    return file


def save(store: ckptstore.Store, step: int, state: states.State) -> None:
    """A checkpoint, committed; the run is closed again."""
    run = store.run(RUN)
    run.save(step, state, wait=True)
    run.close()


def change(state: states.State) -> None:
    """Every element gets another value."""
    for _, tensor in states.tensors(state):
        tensor.mul_(-1.001)


def change_share(state: states.State, share: float) -> float:
    """Changes whole tensors, as many as fit into this share of the bytes; the share that it was."""
    left = share * states.size_bytes(state)
    changed = 0
    for _, tensor in sorted(states.tensors(state), key=lambda item: -item[1].nbytes):
        if tensor.nbytes <= left:
            tensor.mul_(-1.001)
            left -= tensor.nbytes
            changed += tensor.nbytes
    return changed / states.size_bytes(state)
