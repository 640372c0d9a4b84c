"""How much memory a process may still take: what the host has free, and what its cgroup lets it have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_UNKNOWN_BYTES = 4 << 30
_UNLIMITED_V1 = 1 << 60  # cgroup v1 says "no limit" by a number near 2**63


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes free now: the host's MemAvailable, or what is left under the tightest cgroup limit if less.

    Page cache that the kernel can drop counts as free. 4 GiB where the system does not tell.
    """
    return min([_available(root), *_left_in_cgroups(root)])


def local_ranks(environ: Mapping[str, str] | None = None) -> int:
    """How many ranks share this host, as torchrun, Slurm or Open MPI say; 1 if none does."""
    environ = os.environ if environ is None else environ
    for name in (
        "LOCAL_WORLD_SIZE",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ):
        # Slurm writes "4", or "8(x2),3" for nodes that differ: the most is safe for all.
        counts = re.findall(r"(\d+)(?:\(x\d+\))?", environ.get(name, ""))
        if counts:
            return max(1, *map(int, counts))
    return 1


def _available(root: Path) -> int:
    found = _field(root / "proc/meminfo", "MemAvailable:")
    return _UNKNOWN_BYTES if found is None else found << 10


def _left_in_cgroups(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Limits nest. Inside a container the path may be the host's, and only the mount itself is there.
        inner = Path(path.lstrip("/"))
        for folder in {mount, *(mount / part for part in (inner, *inner.parents))}:
            limit, usage = _number(folder / names[0]), _number(folder / names[1])
            if limit is None or usage is None or limit >= _UNLIMITED_V1:
                continue
            droppable = _field(folder / "memory.stat", names[2]) or 0
            yield max(limit - max(usage - droppable, 0), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" means no limit


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
