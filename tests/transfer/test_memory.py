"""Both directions hold a few chunks, whatever the size; measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_BYTES = (256 << 20) + 2 * (16 << 20)

_SCRIPT = """
import json, sys
from pathlib import Path

import numpy as np
import torch

import ckptstore
from ckptstore.arrays import LazyArray
from ckptstore.model.dtypes import BY_NAME
from ckptstore.transfer import export, import_

place, suffixes = Path(sys.argv[1]), json.loads(sys.argv[2])
large, small = int(sys.argv[3]), int(sys.argv[4])


def memory(what):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10


def lazy(seed, mib):
    def read(start, stop):
        block = np.arange(start // 4, stop // 4, dtype="<u4")
        np.multiply(block, 2654435761 + 2 * seed, out=block)
        np.bitwise_and(block, 0x3FFFFFFF, out=block)  # finite floats
        return block.view(np.uint8).data
    return LazyArray(BY_NAME["float32"], (mib * 256, 1024), "torch", None, read)


def state(large, small):
    made = {f"small.{i}": lazy(i, 1) for i in range(small)}
    return made | {f"large.{i}": lazy(1000 + i, 64) for i in range(large // 64)}


def measured(call):
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    call()
    return memory("VmHWM") - before


found = {}
with ckptstore.open(place / "store", create=True) as store:
    for name, sizes in (("tiny", (64, 4)), ("source", (large, small))):  # the first brings in all code
        given = store.run(name).save(0, {"model": state(*sizes)}).result()
        back = store.run(name + "-back")
        for suffix in suffixes:
            path = place / f"{name}.{suffix}"
            out = measured(lambda: export(given, path, component="model"))
            into = measured(lambda: import_(back, path, step=0))
            assert back.latest.nbytes == given.nbytes
            assert back.latest.contents.digests == given.contents.digests
            if suffix == "safetensors":
                wide = measured(lambda: import_(store.run(name + "-wide"), path, step=0, dtype="float64"))
                options = {"component": "model", "dtype": "bfloat16", "overwrite": True}
                thin = measured(lambda: export(given, path, **options))
                found[f"convert {suffix}"] = [thin, wide]
            path.unlink()
            found[suffix] = [out, into]
print(json.dumps(found))
"""


def _measure(tmp_path, suffixes, large, small):
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path), json.dumps(suffixes), str(large), str(small)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print({name: [f"{size >> 20} MiB" for size in sizes] for name, sizes in found.items()})
    assert {name: sizes for name, sizes in found.items() if max(sizes) > LIMIT_BYTES} == {}


@pytest.mark.timeout(600)
def test_memory_stays_bounded(tmp_path):
    """340 MiB: what held all of it would be seen."""
    _measure(tmp_path, ["safetensors", "pt", "npz"], 256, 84)


@pytest.mark.soak
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
@pytest.mark.parametrize(("large", "small"), [(4096, 0), (64, 2048)])
def test_memory_stays_bounded_for_a_large_checkpoint(tmp_path, suffix, large, small):
    _measure(tmp_path, [suffix], large, small)
