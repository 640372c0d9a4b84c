"""A process that ends while something is copied: the copying ends before the interpreter does."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.replicate.made import TOML

CODE = """
import atexit, sys, threading, time
from ckptstore.replicate import copying
import ckptstore, numpy as np

def at_last():  # registered last, so called first: saves and copying go on
    print("exits", flush=True)

entered = threading.Event()
real = copying.read_rows
def read_rows(*arguments):
    entered.set()
    time.sleep(0.3)
    real(*arguments)
    print("read", flush=True)
copying.read_rows = read_rows
store = ckptstore.init({toml!r}, chunk_bytes=65536)
run = store.run("r")
run.save(1, {{"a": np.arange(100)}}, wait=True)
assert entered.wait(60)
atexit.register(at_last)
sys.exit(7)
"""


def test_an_object_under_way_is_there_when_the_process_ends(tmp_path):
    toml = tmp_path / "ckptstore.toml"
    toml.write_text(TOML.format(required="async"))
    code = textwrap.dedent(CODE).format(toml=str(toml))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == ["exits", "read"], done.stderr
