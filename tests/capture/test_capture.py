"""Capturing: exact copies, in waves where memory is short, and errors that reach who writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ckptstore import arrays
from ckptstore.errors import SaveFailedError
from ckptstore.model.dtypes import BY_NAME
from ckptstore.save import capture as capture_module
from ckptstore.save import copying
from ckptstore.save.arena import PAGE_BYTES, Arena
from ckptstore.save.capture import Waves, begin, capture, room_for
from ckptstore.save.cut import Piece
from ckptstore.save.packing import LARGE_BYTES, taken_bytes, units_of, waves_of
from tests.capture.made import bytes_of, pieces_of, written

MIB = 1 << 20


def _state(mib: int = 5) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    state: dict[str, Any] = {f"small{i}": draw.integers(0, 256, 1 + 37 * i, np.uint8) for i in range(60)}
    state |= {f"mid{i}": draw.standard_normal((3, 50001)) for i in range(2)}
    state |= {f"z_large{i}": draw.integers(0, 256, MIB + i, np.uint8) for i in range(mib)}
    state["fortran"] = np.asfortranarray(draw.standard_normal((70, 90)))
    state["empty"] = np.zeros((0, 3))
    state["scalar"] = np.array(3.5)
    return {"m": state}


def _spoil(state: dict[str, Any]) -> None:
    for array in state["m"].values():
        array[...] = 0


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 16 * MIB])
def test_what_changes_after_the_capture_is_not_in_it(chunk_bytes: int) -> None:
    state = _state()
    arena = Arena(64 * MIB)
    pieces = pieces_of(state, chunk_bytes)
    expected = bytes_of(pieces)
    waves = Waves(arena)
    capture(pieces, arena, waves)
    _spoil(state)
    assert written(waves) == expected
    assert arena.used_bytes == 0


def test_large_pieces_begin_at_pages() -> None:
    arena = Arena(64 * MIB)
    waves = Waves(arena)
    capture(pieces_of(_state(), 16 * MIB), arena, waves)
    (pieces,) = list(waves)
    large = [piece for piece in pieces if piece.nbytes >= LARGE_BYTES]
    assert len(large) > 4
    assert all(np.frombuffer(piece.data(), np.uint8).ctypes.data % PAGE_BYTES == 0 for piece in large)


def test_many_threads_copy_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.save.copying.cores", lambda: 4)
    monkeypatch.setattr("ckptstore.save.copying._PARALLEL_BYTES", 1)
    monkeypatch.setattr("ckptstore.save.copying._JOB_BYTES", 100_000)
    arena = Arena(64 * MIB)
    pieces = pieces_of(_state(), 16 * MIB)
    expected = bytes_of(pieces)
    waves = Waves(arena)
    capture(pieces, arena, waves)
    assert written(waves) == expected


def test_a_state_larger_than_the_budget_goes_in_waves_while_it_is_written() -> None:
    state = _state(12)
    arena = Arena(4 * MIB)
    pieces = pieces_of(state)
    expected = bytes_of(pieces)
    waves = Waves(arena)
    found: dict[int, bytes] = {}
    writer = threading.Thread(target=lambda: found.update(written(waves)))
    started: list[bool] = []

    def start() -> None:
        started.append(True)
        writer.start()

    capture(pieces, arena, waves, started=start)
    _spoil(state)
    writer.join(20)
    assert started == [True]
    assert found == expected
    assert arena.allocated_bytes <= 4 * MIB
    assert arena.used_bytes == 0


def test_a_state_that_fits_needs_no_writer_yet() -> None:
    started: list[bool] = []
    arena = Arena(64 * MIB)
    capture(pieces_of(_state()), arena, Waves(arena), started=lambda: started.append(True))
    assert not started


def test_a_chunk_larger_than_the_budget_is_captured() -> None:
    state = {"m": {"a": np.arange(3 * MIB, dtype=np.uint32)}}
    arena = Arena(MIB)
    pieces = pieces_of(state, 4 * MIB)
    expected = bytes_of(pieces)
    waves = Waves(arena)
    found: dict[int, bytes] = {}
    writer = threading.Thread(target=lambda: found.update(written(waves)))
    capture(pieces, arena, waves, started=writer.start)
    writer.join(20)
    assert found == expected
    assert arena.allocated_bytes == 4 * MIB


def test_two_saves_of_different_sizes_are_in_flight_each_with_its_own_memory() -> None:
    arena = Arena(40 * MIB)
    expected, flights = [], []
    for mib in (5, 9):
        pieces = pieces_of(_state(mib))
        expected.append(bytes_of(pieces))
        waves = Waves(arena)
        capture(pieces, arena, waves)
        flights.append(waves)
    assert [written(waves) for waves in flights] == expected
    assert arena.used_bytes == 0


def test_an_empty_state_has_no_waves() -> None:
    arena = Arena(MIB)
    waves = Waves(arena)
    capture([], arena, waves)
    assert list(waves) == []


def test_a_small_piece_takes_its_own_bytes_only() -> None:
    pieces = pieces_of({"m": {f"b{i}": np.ones(10, np.uint8) for i in range(500)}})
    assert room_for(pieces) == taken_bytes(pieces) == 2 * PAGE_BYTES
    (wave,) = waves_of(units_of(pieces, MIB), MIB)
    assert wave.blocks == 1


def test_pieces_find_a_place_in_blocks_begun_before() -> None:
    sizes = [600, 600, 400, 400, 1000]  # KiB, in blocks of 1 MiB
    pieces = pieces_of(
        {"m": {f"{i}": np.ones(size << 10, np.uint8) for i, size in enumerate(sizes)}}, 16 * MIB
    )
    units = [unit for piece in pieces for unit in units_of([piece], MIB)]
    (wave,) = waves_of(units, MIB)
    assert [unit.block for unit in wave.units] == [0, 1, 0, 1, 2]
    assert [wave.blocks for wave in waves_of(units, MIB, 1)] == [1, 1, 1, 1]


# --- what fails -----------------------------------------------------------------------------------


def _failing(nbytes: int) -> arrays.LazyArray:
    def read(_start: int, _stop: int) -> memoryview:
        raise OSError("the source is gone")

    return arrays.LazyArray(BY_NAME["uint8"], (nbytes,), "numpy", None, read)


@pytest.mark.parametrize("nbytes", [10, 2 * MIB])
def test_a_failed_capture_never_passes_for_a_whole_one(nbytes: int) -> None:
    arena = Arena(64 * MIB)
    state = _state()
    state["m"]["lazy"] = _failing(nbytes)
    waves = Waves(arena)
    with pytest.raises(OSError, match="the source is gone"):
        capture(pieces_of(state), arena, waves)
    with pytest.raises(SaveFailedError, match="could not be captured: OSError: the source is gone"):
        list(waves)
    waves.abandon()
    assert arena.used_bytes == 0


def test_a_failure_after_the_first_wave_reaches_the_writer() -> None:
    state = _state(12)
    state["m"]["zz"] = _failing(200_000)
    arena = Arena(4 * MIB)
    waves = Waves(arena)
    told: list[BaseException] = []

    def write() -> None:
        try:
            written(waves)
        except SaveFailedError as error:
            told.append(error)

    writer = threading.Thread(target=write)
    with pytest.raises(OSError, match="gone"):
        capture(pieces_of(state), arena, waves, started=writer.start)
    writer.join(20)
    assert "the source is gone" in str(told[0])
    waves.abandon()
    assert arena.used_bytes == 0


def test_a_writer_that_waits_for_an_abandoned_save_ends() -> None:
    arena = Arena(MIB)
    waves = Waves(arena)
    told: list[BaseException] = []

    def write() -> None:
        try:
            list(waves)
        except SaveFailedError as error:
            told.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    waves.abandon()
    writer.join(10)
    assert "given up" in str(told[0])


def test_an_abandoned_save_gives_everything_back_whatever_its_writer_held() -> None:
    arena = Arena(4 * MIB)
    waves = Waves(arena)
    reading: list[Iterator[Any]] = []

    def write_one() -> None:
        reading.append(iter(waves))
        next(reading[0])
        waves.abandon()  # the first write failed

    writer = threading.Thread(target=write_one)
    capture(pieces_of(_state(12)), arena, waves, started=writer.start)
    writer.join(20)
    assert arena.used_bytes == 0
    waves.put([], arena.take(1))
    assert arena.used_bytes == 0


def test_live_pieces_are_not_copied() -> None:
    state = _state()
    pieces = pieces_of(state)
    waves = Waves.live(pieces)
    _spoil(state)
    assert not any(written(waves)[piece.row].strip(b"\0") for piece in pieces[-1:])


# --- a part copied later --------------------------------------------------------------------------


class Held:
    """Lets the background copy begin when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        copy = copying.copy_wave

        def held(*args: Any, **kwargs: Any) -> None:
            if threading.current_thread().name == "ckptstore-capture":
                assert self.go.wait(20)
            copy(*args, **kwargs)

        monkeypatch.setattr(capture_module, "copy_wave", held)


def _torch_state() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(0)
    return {"m": {f"t{i}": torch.randn(100 * i + 1, generator=draw) for i in range(30)}}


def test_what_is_captured_first_can_be_written_before_the_rest_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    pieces = pieces_of(_torch_state())
    expected = bytes_of(pieces)
    arena = Arena(8 * MIB)
    waves = Waves(arena)
    capturing = begin(pieces[:10], pieces[10:], arena, waves)
    assert capturing.deferred
    assert not capturing.done
    reading = iter(waves)
    first = bytes_of(next(reading))
    assert first == {piece.row: expected[piece.row] for piece in pieces[:10]}
    held.go.set()
    capturing.wait()
    assert first | bytes_of(next(reading)) == expected
    assert list(reading) == []
    assert arena.used_bytes == 0


def test_memory_of_the_later_part_is_taken_at_once_so_that_two_saves_never_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    arena = Arena(2 * MIB)
    flights = []
    for _ in range(2):
        pieces = pieces_of(_torch_state())
        expected = bytes_of(pieces)
        waves = Waves(arena)
        flights.append((begin(pieces[:10], pieces[10:], arena, waves), waves, expected))
    held.go.set()
    for capturing, waves, expected in flights:
        capturing.wait()
        assert written(waves) == expected


def test_a_state_larger_than_the_budget_is_copied_at_once() -> None:
    arena = Arena(MIB)
    pieces = pieces_of(_state(3))
    expected = bytes_of(pieces)
    waves = Waves(arena)
    found: dict[int, bytes] = {}
    writer = threading.Thread(target=lambda: found.update(written(waves)))
    capturing = begin(pieces[:2], pieces[2:], arena, waves, started=writer.start)
    writer.join(20)
    assert capturing.done
    assert not capturing.deferred
    assert found == expected


def test_a_deferred_copy_that_fails_ends_the_save_and_not_the_wait() -> None:
    torch = pytest.importorskip("torch")
    arena = Arena(8 * MIB)
    waves = Waves(arena)
    now = pieces_of({"m": {"a": np.ones(10)}})
    later = pieces_of({"m": {"lazy": _failing(10)}})
    failing = later[0]
    assert isinstance(failing, Piece)
    failing.tensor = torch.ones(1)
    failing.view, failing.source = memoryview(b"short"), None  # not the bytes that it says
    capturing = begin(now, later, arena, waves)
    capturing.wait()
    with pytest.raises(SaveFailedError, match="could not be captured: ValueError"):
        list(waves)
    waves.abandon()
    assert arena.used_bytes == 0


def test_a_tensor_that_changes_too_early_fails_the_save_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    state = _torch_state()
    pieces = pieces_of(state)
    arena = Arena(8 * MIB)
    waves = Waves(arena)
    capturing = begin([], pieces, arena, waves, name_of=lambda piece: f"chunk {piece.row}")
    changed = next(piece.row for piece in pieces if piece.tensor is state["m"]["t3"])
    state["m"]["t3"].add_(1)
    held.go.set()
    capturing.wait()
    with pytest.raises(SaveFailedError, match=f"^chunk {changed} changed while they were captured") as raised:
        list(waves)
    assert "capture_lock" in (raised.value.hint or "")
    waves.abandon()
    assert arena.used_bytes == 0


def test_a_capture_that_fails_at_once_gives_the_memory_of_the_later_part_back() -> None:
    arena = Arena(8 * MIB)
    waves = Waves(arena)
    later = pieces_of(_torch_state())
    with pytest.raises(OSError, match="the source is gone"):
        begin(pieces_of({"m": {"lazy": _failing(10)}}), later, arena, waves)
    with pytest.raises(SaveFailedError, match="the source is gone"):
        list(waves)
    assert arena.used_bytes == 0


def test_a_process_without_threads_to_spare_copies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    arena = Arena(8 * MIB)
    waves = Waves(arena)
    pieces = pieces_of(_torch_state())
    expected = bytes_of(pieces)
    assert begin(pieces[:2], pieces[2:], arena, waves).done
    assert written(waves) == expected


def test_a_save_given_up_while_it_waits_for_memory_holds_none() -> None:
    arena = Arena(8 * MIB)
    held = arena.take(arena.total_blocks)
    waves = Waves(arena)
    waves.abandon()
    pieces = pieces_of(_torch_state())
    assert begin(pieces[:2], pieces[2:], arena, waves).done
    arena.give_back(held)
    assert arena.used_bytes == 0
