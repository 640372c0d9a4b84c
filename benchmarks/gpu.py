"""Captures from a GPU: exact while training goes on, and how near they come to a copy into pinned memory.

    python -m benchmarks.gpu --gib 4 --repeats 7 --json gpu.json

Checks first, each by comparing bytes: a capture is the state at its call, whatever the compute stream was
given before and is given after; an overlapped one too, when the update waits for it. Then times, floors and
captures interleaved, as medians. `--device cpu` runs the same program without a GPU; its floor is memcpy.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.states import State, adamw_state, size_bytes, tensors
from ckptstore.save.arena import Arena
from ckptstore.save.capture import Waves, begin, capture, split
from ckptstore.save.cut import Piece, Share, cut
from ckptstore.save.flatten import flatten_state

_GIB = 1 << 30
_CHUNK_BYTES = 16 << 20
_SMALL_TENSORS = 10_000
_SMALL_ELEMENTS = 256  # of 4 bytes
_BUSY_SIZE = 2048  # of the matrices that keep the compute stream behind the host


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print; 1 when a check fails, 2 without the device."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu runs the program without one", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    wrong = _check(_moved(adamw_state(min(options.gib, 0.25)), device), device)
    for problem in wrong:
        print(f"WRONG: {problem}")
    figures = {
        "AdamW state": _measure(_moved(adamw_state(options.gib), device), device, options.repeats),
        "10,000 x 1 KiB": _measure(_small(device), device, options.repeats),
    }
    result = {"device": _name(device), "torch": torch.__version__, "wrong": wrong, "figures": figures}
    print(_table(figures))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=summary)
    parser.add_argument("--gib", type=float, default=4.0, help="least size of the AdamW state (default 4)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default 7)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


# --- is it right ----------------------------------------------------------------------------------


def _check(state: State, device: torch.device) -> list[str]:
    """What went wrong; nothing if every capture held the bytes of its moment."""
    wrong = []
    for name, how in (("capture", _capture), ("overlapped capture", _overlapped)):
        arena = Arena(3 * size_bytes(state) + (256 << 20))
        for attempt in range(3):
            _keep_busy(device)
            _change(state)  # the device has not come to this when the capture is called
            expected = {row: data.clone() for row, data in _rows(state).items()}
            waves = how(state, arena, device)
            _change(state)
            found = {piece.row: bytes(piece.data()) for pieces in waves for piece in pieces}
            if found != {row: data.cpu().numpy().tobytes() for row, data in expected.items()}:
                wrong.append(f"{name}, attempt {attempt + 1}: other bytes than at the call")
        if arena.used_bytes:
            wrong.append(f"{name}: {arena.used_bytes} bytes were not given back")
        arena.release()
    return wrong


def _capture(state: State, arena: Arena, device: torch.device) -> Waves:
    waves = Waves(arena)
    capture(_pieces(state), arena, waves)
    return waves


def _overlapped(state: State, arena: Arena, device: torch.device) -> Waves:
    """All but scalars is copied while the device computes; the update waits."""
    waves = Waves(arena)
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in tensors(state)}
    now, later = split(_pieces(state), storages)
    capturing = begin(now, later, arena, waves)
    _keep_busy(device)
    capturing.wait()
    return waves


def _keep_busy(device: torch.device) -> None:
    """Gives the compute stream work for some milliseconds."""
    if device.type == "cuda":
        matrix = torch.randn(_BUSY_SIZE, _BUSY_SIZE, device=device)
        for _ in range(50):
            matrix = matrix @ matrix
            matrix /= matrix.norm()


def _change(state: State) -> None:
    for _, tensor in tensors(state):
        tensor.add_(0.5)


def _rows(state: State) -> dict[int, torch.Tensor]:
    """The bytes of every piece, on the device: uint8, (piece bytes,)."""
    found = {}
    for piece in _pieces(state):
        flat = piece.tensor.reshape(-1).view(torch.uint8)
        found[piece.row] = flat[piece.start : piece.start + piece.nbytes]
    return found


def _pieces(state: State) -> list[Piece]:
    flat = flatten_state(state, _CHUNK_BYTES)
    pieces = cut(flat.layout, flat.sources, Share.everything(flat.layout))
    return [piece for piece in pieces if isinstance(piece, Piece)]


# --- how fast -------------------------------------------------------------------------------------


def _measure(state: State, device: torch.device, repeats: int) -> dict[str, Any]:
    """Seconds: lists of samples, the first capture and what `prepare` takes by themselves."""
    size = size_bytes(state)
    arena = Arena(3 * size + (256 << 20))
    first = _timed(lambda: _drop(_capture(state, arena, device)), device)
    arena.release()
    prepared = _timed(lambda: arena.prepare(size, 2, pin=device.type == "cuda"), device)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(0)
    ours: list[float] = []
    floor: list[float] = []
    whole: list[float] = []
    overlapped: list[float] = []
    for _ in range(repeats):
        floor.append(_timed(lambda: target.copy_(source, non_blocking=True), device))
        whole.append(_timed(lambda: _drop(_capture(state, arena, device)), device))
        pieces = _pieces(state)
        waves = Waves(arena)
        ours.append(_timed(functools.partial(capture, pieces, arena, waves), device))
        _drop(waves)
        overlapped.append(_time_begin(state, arena, device))
    arena.release()
    return {
        "bytes": size,
        "pinned copy": floor,
        "capture": ours,
        "flatten, cut and capture": whole,
        "overlap: until save may return": overlapped,
        "first capture": [first],
        "prepare for two": [prepared],
    }


def _time_begin(state: State, arena: Arena, device: torch.device) -> float:
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in tensors(state)}
    now, later = split(_pieces(state), storages)
    waves = Waves(arena)
    start = time.perf_counter()
    capturing = begin(now, later, arena, waves)
    seconds = time.perf_counter() - start
    capturing.wait()
    _drop(waves)
    return seconds


def _drop(waves: Waves) -> None:
    for _ in waves:
        pass


def _timed(work: Callable[[], object], device: torch.device) -> float:
    gc.collect()
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _small(device: torch.device) -> State:
    return {"m": {f"t{i}": torch.randn(_SMALL_ELEMENTS, device=device) for i in range(_SMALL_TENSORS)}}


def _moved(state: State, device: torch.device) -> State:
    return {
        key: _moved(value, device) if isinstance(value, dict) else value.to(device)
        for key, value in state.items()
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for state, rows in figures.items():
        gib = rows["bytes"] / _GIB
        floor = statistics.median(rows["pinned copy"])
        lines.append(f"{state}, {gib:.3f} GiB")
        for name, samples in rows.items():
            if name != "bytes":
                seconds = statistics.median(samples)
                speed, ratio = gib / seconds, seconds / floor
                lines.append(f"  {name:32} {seconds * 1e3:9.2f} ms {speed:8.2f} GiB/s {ratio:7.2f} x floor")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
