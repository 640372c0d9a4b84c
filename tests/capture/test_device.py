"""Copies from a device: their order against training's stream, and their bytes.

Without a GPU a fake stands for torch.cuda, and CPU tensors for those of the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ckptstore.save.arena import Arena
from ckptstore.save.capture import Waves, begin, capture
from ckptstore.save.cut import Piece
from ckptstore.save.device import CudaStreams, DeviceCopies, NoStreams, flat_bytes, streams_of
from tests.capture.made import bytes_of, pieces_of, written

torch = pytest.importorskip("torch")

MIB = 1 << 20


class FakeCuda:
    """torch.cuda, as far as streams go: writes down what it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        cuda = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                cuda.log.append("make stream")

            def wait_stream(self, other: str) -> None:
                cuda.log.append(f"copies wait for {other}")

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                cuda.log.append("record")

            def synchronize(self) -> None:
                cuda.log.append("synchronize")

        self.Stream = Stream
        self.Event = Event

    def current_stream(self, device: Any) -> str:
        return "training"

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append("copy")
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """All torch tensors seem to lie on a device."""
    fake = FakeCuda()
    streams = CudaStreams(fake)
    monkeypatch.setattr("ckptstore.save.device.streams_of", lambda kind: streams)
    monkeypatch.setattr("ckptstore.save.cut.is_fetched", lambda value: isinstance(value, torch.Tensor))
    return fake


def _state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    state = {f"small{i}": torch.randn(50, generator=draw) for i in range(40)}
    state |= {f"half{i}": torch.randn(7, 3, generator=draw).bfloat16() for i in range(5)}
    state["z_large"] = torch.randn(700, 1000, generator=draw)
    state["turned"] = torch.randn(300, 500, generator=draw).t()
    state["channels"] = torch.randn(2, 3, 8, 8, generator=draw).to(memory_format=torch.channels_last)
    state["complex"] = torch.randn(9, dtype=torch.complex64, generator=draw).conj()
    state["bools"] = torch.tensor([True, False, True])
    state["scalar"] = torch.tensor(3.5, dtype=torch.float64)
    state["single"] = torch.ones(1, 5)[:, ::5]
    return {"m": state}


def test_copies_wait_for_training_before_and_are_waited_for_after(cuda: FakeCuda) -> None:
    state = {"m": {"a": torch.ones(1000), "b": torch.ones(3 * MIB)}}
    arena = Arena(64 * MIB)
    pieces = pieces_of(state, 64 * MIB)
    cuda.log.clear()
    capture(pieces, arena, Waves(arena))
    assert cuda.log == ["copies wait for training", "copy", "copy", "record", "synchronize"]


def test_small_tensors_of_one_dtype_go_in_one_transfer(cuda: FakeCuda) -> None:
    state = {"m": {f"t{i}": torch.ones(10, dtype=(torch.float32, torch.int64)[i % 2]) for i in range(100)}}
    arena = Arena(64 * MIB)
    pieces = pieces_of(state)
    cuda.log.clear()
    capture(pieces, arena, Waves(arena))
    assert cuda.log.count("copy") == 2


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 64 * MIB])
def test_the_bytes_are_those_of_the_tensors(cuda: FakeCuda, chunk_bytes: int) -> None:
    state = _state()
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr("ckptstore.save.cut.is_fetched", lambda value: False)
        expected = bytes_of(pieces_of(state, chunk_bytes))
    arena = Arena(64 * MIB)
    waves = Waves(arena)
    pieces = pieces_of(state, chunk_bytes)
    assert all(piece.view is None for piece in pieces)
    assert bytes_of(pieces) == expected  # as a save that copies nothing reads them
    capture(pieces, arena, waves)
    for tensor in state["m"].values():
        tensor.zero_()
    assert written(waves) == expected


def test_the_order_is_fixed_when_a_deferred_copy_begins(cuda: FakeCuda) -> None:
    pieces = pieces_of({"m": {"a": torch.ones(10), "b": torch.ones(10)}})
    arena = Arena(64 * MIB)
    waves = Waves(arena)
    cuda.log.clear()
    capturing = begin(pieces[:1], pieces[1:], arena, waves)
    capturing.wait()
    assert cuda.log == ["copies wait for training", *["copy", "record", "synchronize"] * 2]
    assert len(written(waves)) == 2


def test_memory_goes_back_only_when_no_copy_is_under_way(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(64 * MIB)
    pieces = pieces_of({"m": {"a": torch.ones(10), "b": torch.ones(10, dtype=torch.int64)}})
    cuda.log.clear()
    monkeypatch.setattr(torch, "from_numpy", _second_fails(torch.from_numpy))
    monkeypatch.setattr(arena, "give_back", lambda blocks: cuda.log.append("give back"))
    with pytest.raises(RuntimeError, match="out of memory"):
        capture(pieces, arena, Waves(arena))
    assert cuda.log[-3:] == ["record", "synchronize", "give back"]


def _second_fails(call: Any) -> Any:
    calls: list[int] = []

    def once(array: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of memory")
        return call(array)

    return once


def test_a_stream_is_made_once_per_device() -> None:
    fake = FakeCuda()
    streams = CudaStreams(fake)
    streams.fork("cuda:0")
    streams.fork("cuda:0")
    streams.fork("cuda:1")
    assert fake.log.count("make stream") == 2


def test_devices_without_streams_are_copied_synchronously() -> None:
    assert isinstance(streams_of("mps"), NoStreams)
    piece = Piece(0, "m", 4, 8, None, None, tensor=torch.arange(5, dtype=torch.int32))
    target = torch.zeros(8, dtype=torch.uint8)
    copies = DeviceCopies()
    copies.fork([torch.device("cpu")])
    copies.copy([piece], target.numpy())
    copies.join([torch.device("cpu")])
    assert target.view(torch.int32).tolist() == [1, 2]


def test_rows_of_a_strided_tensor_are_copied_and_not_all_of_it() -> None:
    tensor = torch.arange(6000, dtype=torch.int32).view(60, 100).t()
    part = flat_bytes(tensor, 4 * 130, 4 * 190)
    assert part.view(torch.int32).tolist() == tensor.reshape(-1)[130:190].tolist()
    assert part.untyped_storage().nbytes() == 2 * 60 * 4  # rows 2 and 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_bytes_are_those_at_the_save_whatever_training_does_next() -> None:
    state = {
        "m": {
            "large": torch.randn(1 << 22, device="cuda"),
            **{f"small{i}": torch.randn(100, device="cuda") for i in range(200)},
            "turned": torch.randn(500, 700, device="cuda").t(),
        }
    }
    expected = {name: tensor.clone() for name, tensor in state["m"].items()}
    arena = Arena(256 * MIB)
    waves = Waves(arena)
    pieces = pieces_of(state)
    capture(pieces, arena, waves)
    for tensor in state["m"].values():
        tensor.normal_()
    found = written(waves)
    assert all(block._registration is not None for block in arena._blocks)
    assert found == bytes_of(pieces_of({"m": {name: tensor.cpu() for name, tensor in expected.items()}}))
    arena.release()
