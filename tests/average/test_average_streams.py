"""A mean holds a few chunks whatever the size, and is whole or not there wherever its process ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from tests.average.made import model_at, saved
from tests.crash._support import check_objects, copy_of, make_place, memory_place, same, store_over
from tests.inline import all_inline

LIMIT_BYTES = 128 << 20
"""A chunk in float64 (32 MiB), as it is read and as it is written, for two threads. A 64 MiB tensor of each
of three checkpoints would be 192 MiB, and their sum 128 MiB."""

_SCRIPT = """
import json, sys
from pathlib import Path

import numpy as np

import ckptstore
from ckptstore.arrays import LazyArray
from ckptstore.model.dtypes import BY_NAME


def memory(what):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10


def lazy(seed, mib):
    def read(start, stop):
        block = np.arange(start // 4, stop // 4, dtype="<u4")
        block *= 2654435761 + 2 * seed
        block &= 0x3FFFFFFF  # finite floats
        return block.view(np.uint8).data
    return LazyArray(BY_NAME["float32"], (mib * 256, 1024), "numpy", None, read)


found = {}
with ckptstore.open(Path(sys.argv[1]) / "store", create=True) as store:
    for name, mib in (("tiny", 1), ("large", 64)):  # the first brings in all code
        run = store.run(name)
        parents = [run.save(n, {"w": lazy(n, mib)}, wait=True).result() for n in range(3)]
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        made = store.run(name + "-mean").average(parents, step=0)
        found[name] = memory("VmHWM") - before
        part = [parent.tensors["w"][100:101, :8].astype("f8") for parent in parents]
        expected = sum(each * (1 / 3) for each in part).astype("f4")
        assert made.tensors["w"][100:101, :8].tolist() == expected.tolist()
print(json.dumps(found))
"""


def test_the_memory_of_a_mean_does_not_grow_with_its_tensors(tmp_path):
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print({name: f"{size >> 20} MiB" for name, size in found.items()})
    assert found["large"] < LIMIT_BYTES


def _average(backend):
    with contextlib.closing(store_over(backend)) as store:
        run = store.run("gpt")
        store.run("mean").average([run[1], run[2]], step=2)


def test_a_process_that_ends_anywhere_leaves_the_mean_whole_or_nothing(monkeypatch):
    all_inline(monkeypatch)
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")  # the copies of a place are one store on disk
    with memory_place() as place:
        make_place(place)
        with contextlib.closing(store_over(place)) as store:
            saved(store, model_at(1), model_at(2))
        with copy_of(place) as counted:
            backend = FaultBackend(counted)
            _average(backend)
            with contextlib.closing(store_over(counted)) as store:
                expected = store.run("mean").latest.load()
        outcomes = set()
        for call in backend.log:
            if call.op not in ("put", "delete", "sync"):
                continue
            with copy_of(place) as copy:
                with contextlib.suppress(SimulatedCrash):
                    _average(FaultBackend(copy, [Fault("crash_after", n=call.n)]))
                check_objects(copy)
                with contextlib.closing(store_over(copy)) as store:
                    assert [found.step for found in store.run("gpt").checkpoints()] == [1, 2]
                    made = store.run("mean").latest
                    outcomes.add(made is None)
                    assert made is None or same(made.load(), expected)
        assert outcomes == {True, False}
