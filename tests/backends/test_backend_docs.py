"""The example in docs/backends.md is a complete backend, and its test proves it."""

from __future__ import annotations

import itertools
import pathlib
import re
import sys
import types

from ckptstore.backend import Backend
from ckptstore_memory import MemoryBackend

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "backends.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run_block(number, name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module  # the second block imports the first, and pickles name their module
    exec(compile(BLOCKS[number], f"{PAGE}#{number}", "exec"), module.__dict__)  # noqa: S102
    return module


tray_backend = run_block(0, "tray_backend")
TestTray = run_block(1, "tray_backend_proof").TestTray


def test_the_example_is_short_and_complete():
    assert issubclass(tray_backend.TrayBackend, Backend)
    assert len(BLOCKS[0].splitlines()) <= 140


def test_the_loop_over_crash_points_runs():
    left = []
    names = itertools.count()

    def fresh_place():
        place = MemoryBackend(f"docs-{next(names)}")
        place.create_root()
        return place

    def work(backend):
        backend.put("a", [b"1"])
        backend.put("b", [b"2"])

    run_block(
        2,
        "crash_loop",
        work=work,
        fresh_place=fresh_place,
        check_what_is_left=lambda place: left.append([info.key for info in place.list("")]),
    )
    assert left == [[], ["a"], ["a", "b"]]


def test_every_rule_of_the_page_names_real_things():
    text = PAGE.read_text(encoding="utf-8")
    import ckptstore.backend
    import ckptstore.errors
    import ckptstore.testing

    for name in set(re.findall(r"`(\w+Error)`", text)):
        assert hasattr(ckptstore.errors, name), name
    for name in set(re.findall(r"`ckptstore\.testing\.(\w+)`", text)):
        assert hasattr(ckptstore.testing, name), name
    for method in ("put", "sync", "list", "delete", "create_root"):
        assert callable(getattr(ckptstore.backend.Backend, method))
