"""diff --values of a large checkpoint: memory stays under 256 MiB + two chunks."""

import subprocess
import sys
import textwrap

import pytest

CHUNK_MIB = 64
STATE_MIB = 384


@pytest.mark.parametrize(
    ("dtype", "other_chunk_mib"),
    [
        ("float32", 16),
        pytest.param("float32", 64, marks=pytest.mark.soak),
        pytest.param("uint8", 64, marks=pytest.mark.soak),
    ],
)
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, dtype, other_chunk_mib):
    """A large tensor and many small ones, in one grid and in two; in a process of its own."""
    save = f"""
        import numpy as np, ckptstore
        a = ckptstore.init({str(tmp_path / "a")!r}, chunk_bytes={CHUNK_MIB} << 20)
        b = ckptstore.init({str(tmp_path / "b")!r}, chunk_bytes={other_chunk_mib} << 20)
        rows = ({STATE_MIB} << 20) // 4096 // np.dtype({dtype!r}).itemsize
        big = np.arange(rows * 4096, dtype={dtype!r}).reshape(rows, 4096)
        small = {{str(i): np.full(9, i, np.float32) for i in range(2000)}}
        a.run("r").save(1, {{"big": big, "small": small}}).result()
        big *= 3
        for value in small.values():
            value += 1
        b.run("r").save(2, {{"big": big, "small": small}}).result()
    """
    compare = f"""
        import re, sys, ckptstore
        from pathlib import Path
        from ckptstore.inspect.diff import diff
        a = ckptstore.open({str(tmp_path / "a")!r}).run("r").latest
        b = ckptstore.open({str(tmp_path / "b")!r}).run("r").latest
        found = diff(a, b, values=True)
        assert len(found.of("changed")) == 2001, len(found.tensors)
        assert found.bytes_read >= 2 * {STATE_MIB} << 20
        assert "torch" not in sys.modules
        # Not ru_maxrss: a new program inherits that from the process that started it.
        print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
    """
    for code in (save, compare):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert int(done.stdout) < 256 + 2 * CHUNK_MIB
