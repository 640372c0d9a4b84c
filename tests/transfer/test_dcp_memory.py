"""DCP goes out and comes in within a few chunks, whole tensors and sharded ones; in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

LIMIT_BYTES = (256 << 20) + 2 * (16 << 20)

_SCRIPT = """
import json, sys
from pathlib import Path

import numpy as np
import torch.distributed.checkpoint

import ckptstore
from ckptstore.arrays import LazyArray
from ckptstore.model.dtypes import BY_NAME
from ckptstore.transfer import export, import_

place, large, small = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def memory(what):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10


def lazy(seed, mib):
    def read(start, stop):
        block = np.arange(start // 4, stop // 4, dtype="<u4")
        np.multiply(block, 2654435761 + 2 * seed, out=block)
        return block.view(np.uint8).data
    return LazyArray(BY_NAME["float32"], (mib * 256, 1024), "torch", None, read)


def whole(large, small):
    made = {f"small.{i}": lazy(i, 1) for i in range(small)}
    return made | {f"large.{i}": lazy(1000 + i, 64) for i in range(large // 64)}


def columns(large, small):
    \"\"\"Of each row a part in each of two boxes, so that every range is put together.\"\"\"
    rows = (large + small) * 256
    draw = np.arange(rows * 512, dtype="<u4").reshape(rows, 512)
    shard = ckptstore.LocalShard
    return {"w": [shard(draw + i, global_shape=(rows, 1024), offsets=(0, 512 * i)) for i in range(2)]}


def measured(call):
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    call()
    return memory("VmHWM") - before


found = {}
with ckptstore.open(place / "store", create=True) as store:
    for sizes in ((16, 2), (large, small)):  # the first brings in all code
        for make in (whole, columns):
            name = f"{make.__name__}-{sizes[0]}"
            given = store.run(name).save(0, {"model": make(*sizes)}).result()
            back = store.run(name + "-back")
            path = place / name
            out = measured(lambda: export(given, path, format="dcp", component="model"))
            into = measured(lambda: import_(back, path, step=0))
            assert back.latest.nbytes == given.nbytes
            found[make.__name__] = [out, into]
print(json.dumps(found))
"""


def _measure(tmp_path, large, small):
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(large), str(small)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print({name: [f"{size >> 20} MiB" for size in sizes] for name, sizes in found.items()})
    shutil.rmtree(tmp_path)
    assert {name: sizes for name, sizes in found.items() if max(sizes) > LIMIT_BYTES} == {}


@pytest.mark.timeout(600)
def test_memory_stays_bounded(tmp_path):
    """340 MiB: what held all of it would be seen."""
    _measure(tmp_path, 256, 84)


@pytest.mark.soak
def test_memory_stays_bounded_for_a_large_checkpoint(tmp_path):
    _measure(tmp_path, 2048, 512)
