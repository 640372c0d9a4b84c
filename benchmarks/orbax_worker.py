"""Orbax in a process and an environment of its own (no torch): one task from stdin, one JSON line to stdout.

Started by `benchmarks/orbax.py`. Orbax is used as its documentation says: one `StandardCheckpointer`, kept;
`save` returns when training may go on, `wait_until_finished` when the checkpoint is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks import disk

Tree = dict[str, Any]
_WARM_UP = {"warm": {"up": [1024]}}


def main() -> None:
    task = json.load(sys.stdin)
    folder = Path(task["folder"])
    checkpointer = ocp.StandardCheckpointer()
    try:  # imports, thread pools, compiled helpers: not what is measured
        _save(checkpointer, folder / "warm-up", _tree(_WARM_UP, 0, kind=task.get("kind", "jax")))
        answer = _TASKS[task["task"]](checkpointer, task, folder)
    finally:
        checkpointer.close()
        disk.remove(folder)
    print(json.dumps(answer))


def save_load(checkpointer: Any, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Seconds of a save, flushed as well if `fsync`, and of a cold and a warm load into new arrays."""
    tree = _tree(task["shapes"], task["seed"])
    path = folder / "one"
    os.sync()

    def save() -> None:
        _save(checkpointer, path, tree)
        if task["fsync"]:
            disk.fsync_tree(path)

    answer: dict[str, Any] = {"save": _timed(save), "bytes": disk.allocated_bytes(path)}
    if not task["fsync"]:
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        for row, ready in (("load cold", disk.forget), ("load warm", disk.warm)):
            ready(path)
            start = time.perf_counter()
            loaded = _restored(checkpointer, path, target)
            answer[row] = time.perf_counter() - start
            if not _equal(tree, loaded):
                raise ValueError(f"Orbax gave back other bytes ({row})")
    return answer


def blocked(checkpointer: Any, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Seconds until `save` returns, first and again; whether what is then written to the arrays is loaded."""
    kind = task["kind"]
    answer: dict[str, Any] = {}
    for number, row in enumerate(("first", "warm")):
        tree = _tree(task["shapes"], number, kind)
        os.sync()
        answer[row] = _timed(lambda: checkpointer.save(folder / row, tree))  # noqa: B023 - called at once
        checkpointer.wait_until_finished()
        disk.remove(folder / row)
    if kind == "numpy":  # jax arrays cannot be written to
        tree = _tree(task["shapes"], 2, kind)
        wanted = jax.tree.map(np.copy, tree)
        checkpointer.save(folder / "torn", tree)
        for leaf in reversed(jax.tree.leaves(tree)):
            np.negative(leaf, out=leaf)
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        answer["tears"] = not _equal(wanted, _restored(checkpointer, folder / "torn", target))
    return answer


def shapes(checkpointer: Any, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Seconds and bytes of saves of each of `trees` in turn, `repeats` times, each into a new folder."""
    trees = [_tree(shapes, 0) for shapes in task["trees"]]
    seconds: list[list[float]] = [[] for _ in trees]
    written: list[list[int]] = [[] for _ in trees]
    for _ in range(task["repeats"]):
        for number, tree in enumerate(trees):
            path = folder / "one"
            os.sync()
            seconds[number].append(_timed(lambda: _save(checkpointer, path, tree)))  # noqa: B023
            written[number].append(disk.allocated_bytes(path))
            disk.remove(path)
    return {"seconds": seconds, "bytes": written}


_TASKS: dict[str, Callable[[Any, dict[str, Any], Path], dict[str, Any]]] = {
    "save_load": save_load,
    "blocked": blocked,
    "shapes": shapes,
}


def _tree(shapes: Tree, seed: int, kind: str = "jax") -> Tree:
    """Random float32 arrays of these shapes, of numpy or on jax's CPU device."""
    random = np.random.default_rng(seed)

    def array(shape: list[int]) -> Any:
        made = np.asarray(random.standard_normal(shape, np.float32))
        return made if kind == "numpy" else jax.device_put(made)

    return {key: _made(value, array) for key, value in shapes.items()}


def _made(value: Any, array: Callable[[list[int]], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _made(inner, array) for key, inner in value.items()}
    return array(value)


def _save(checkpointer: Any, path: Path, tree: Tree) -> None:
    checkpointer.save(path, tree)
    checkpointer.wait_until_finished()


def _restored(checkpointer: Any, path: Path, target: Tree) -> Tree:
    loaded: Tree = checkpointer.restore(path, target)
    return jax.block_until_ready(loaded)


def _equal(wanted: Tree, found: Tree) -> bool:
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
