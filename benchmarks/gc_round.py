"""One round in a process of its own, so that its memory is nobody else's.

    python -m benchmarks.gc_round STORE [--dry-run] [--profile FILE]

prints what it did, how long it took and the most memory it had, as JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import re
import time
from pathlib import Path

import ckptstore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--profile", type=Path, help="write a profile of this process here, for pstats")
    options = parser.parse_args()
    wall, cpu = time.perf_counter(), time.process_time()
    profile = cProfile.Profile()
    with ckptstore.open(options.store) as store:
        if options.profile:
            profile.enable()
        (report,) = store.gc(dry_run=options.dry_run)
        profile.disable()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if options.profile:
        profile.dump_stats(options.profile)
    found = {
        "seconds": wall,
        "cpu_seconds": cpu,
        "peak_bytes": peak_bytes(),
        "checkpoints": len(report.fates),
        "going": sum(fate.outcome == "delete" for fate in report.fates),
        "collected": len(report.collected),
        "deleted_objects": report.deleted_objects,
        "cleared_objects": report.cleared.objects,
        "failures": len(report.failures),
    }
    print(json.dumps(found))


def peak_bytes() -> int:
    """High-water mark of this process's memory."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("the high-water mark of memory is only known on Linux")
    return int(found[1]) << 10


if __name__ == "__main__":
    main()
