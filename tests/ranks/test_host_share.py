"""Ranks of one host share a restore: each byte is read once, and who fails leaves nobody waiting."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import arrays
from ckptstore.backend import Backend
from ckptstore.environment import Environment
from ckptstore.errors import BackendError, ChunkDamagedError, CkptstoreError, DeadlineError
from ckptstore.load import segment
from ckptstore.load.division import Assignment, Places
from ckptstore.load.fetch import Fetched, Fetcher
from ckptstore.load.host import HostShare, host_peers, this_host
from ckptstore.load.plan import Want
from ckptstore.model.boxes import Box
from ckptstore.model.tables import Locations
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier

CHUNK = 1 << 20
CAME = 20.0
"""More than any of these threads needs; a test that comes to wait for it fails."""


@dataclasses.dataclass
class Saved:
    """A checkpoint, and the arrays that it holds by name."""

    tier: Tier
    contents: Contents
    arrays: dict[str, np.ndarray]

    def want(self, name: str, box: Box | None = None) -> Want:
        index = self.contents.layout.by_name[name]
        tensor = self.contents.layout.tensors[index]
        box = box or Box.whole(tensor.shape)
        return Want(index, box, np.zeros(box.sizes, arrays.raw_dtype(tensor.dtype.itemsize)))

    def wants(self, names: Sequence[str]) -> list[Want]:
        return [self.want(name) for name in names]

    @property
    def all(self) -> list[Want]:
        return self.wants(list(self.arrays))

    def check(self, wants: Sequence[Want]) -> None:
        for want in wants:
            name = self.contents.layout.tensors[want.tensor].name
            expected = self.arrays[name][want.box.within(Box.whole(self.arrays[name].shape))]
            assert want.raw.tobytes() == expected.tobytes(), name


@contextlib.contextmanager
def saved(directory: Path, state: dict[str, np.ndarray], chunk_bytes: int = CHUNK) -> Iterator[Saved]:
    with ckptstore.init(directory, chunk_bytes=chunk_bytes) as store:
        checkpoint = store.run("train").save(1, {"m": dict(state)}).result()
        yield Saved(
            checkpoint.tier, checkpoint.contents, {f"m.{name}": value for name, value in state.items()}
        )


class Counting(FaultBackend):
    """Notes every range that is read; by then the ranks' file has no name any more."""

    def __init__(self, inner: Backend, script: Sequence[Fault], place: Path) -> None:
        super().__init__(inner, script)
        self.place = place
        self.ranges: list[tuple[str, int, int]] = []

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        assert not any(self.place.iterdir()), "a crash now would leave something"
        super().read_into(key, offset, buffer)
        self.ranges.append((key, offset, offset + buffer.nbytes))


@dataclasses.dataclass
class Outcome:
    done: Fetched
    error: BaseException | None
    ranges: list[tuple[str, int, int]]


def together(
    it: Saved,
    wants: Sequence[Sequence[Want]],
    place: Path,
    *,
    scripts: dict[int, Sequence[Fault]] | None = None,
    absent: Sequence[int] = (),
    contents: dict[int, Contents] | None = None,
    again: Sequence[Sequence[Want]] | None = None,
    failing: threading.Event | None = None,
    **options: Any,
) -> list[Outcome]:
    """Each rank in a thread of its own; world ranks are 10, 11, ..."""
    outcomes = [Outcome(Fetched(), None, []) for _ in wants]
    options = {"directories": [str(place)], "join_seconds": CAME, "deadline_seconds": CAME, **options}

    def rank(index: int) -> None:
        backend = Counting(it.tier.backend, (scripts or {}).get(index, ()), place)
        tier = Tier(backend, it.tier.marker, it.tier.environment)
        share = HostShare("token", index, len(wants), rank=10 + index, **options)
        fetcher = Fetcher(tier, (contents or {}).get(index, it.contents), share)
        outcome = outcomes[index]
        try:
            fetcher.fetch(list(wants[index]))
            if again is not None:
                fetcher.fetch(list(again[index]))
        except BaseException as error:
            outcome.error = error
            if failing is not None:
                failing.set()
        outcome.done, outcome.ranges = fetcher.done, backend.ranges

    threads = [threading.Thread(target=rank, args=[i]) for i in range(len(wants)) if i not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * CAME)
        assert not thread.is_alive(), "a rank hangs"
    assert list(place.iterdir()) == [], "something is left"
    return outcomes


def raised(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error


def check_once(outcomes: Sequence[Outcome]) -> int:
    """Bytes read by all; no byte was read twice."""
    raised(outcomes)
    found = sorted(span for outcome in outcomes for span in outcome.ranges)
    for (key, _, end), (other, start, _) in itertools.pairwise(found):
        assert key != other or end <= start, f"{key} is read twice"
    total = sum(end - start for _, start, end in found)
    assert total == sum(outcome.done.bytes_read for outcome in outcomes)
    return total


def numbers(count: int, nbytes: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"t{i:05d}": random.integers(0, 255, nbytes, np.uint8) for i in range(count)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the ranks meet."""
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Saved]:
    """200 chunks of 256 KiB in objects of their own."""
    with saved(tmp_path / "store", numbers(200, CHUNK // 4)) as it:
        yield it


# --- what is read ---------------------------------------------------------------------------------


def test_what_all_need_is_read_once(large, place):
    wants = [large.all for _ in range(4)]
    outcomes = together(large, wants, place)
    assert check_once(outcomes) == sum(a.nbytes for a in large.arrays.values())
    for each in wants:
        large.check(each)
    read = [outcome.done.bytes_read for outcome in outcomes]
    assert max(read) - min(read) <= CHUNK, "the work is spread evenly"
    assert all(outcome.done.placed for outcome in outcomes)


def test_without_others_nothing_changes(large, place):
    wants = [large.all]
    outcomes = together(large, wants, place)
    assert check_once(outcomes) == sum(a.nbytes for a in large.arrays.values())
    large.check(wants[0])


@pytest.mark.parametrize("seed", range(6))
def test_mixtures(tmp_path, place, seed):
    random = np.random.default_rng(seed)
    state = {
        f"t{i}": random.standard_normal(tuple(random.integers(1, 60, random.integers(0, 3)))).astype("f4")
        for i in range(40)
    }
    state["wide"] = random.standard_normal((64, 1500))
    with saved(tmp_path / "store", state, chunk_bytes=CHUNK // 16) as it:
        wants: list[list[Want]] = []
        for _ in range(int(random.integers(2, 6))):
            mine = it.wants([name for name in it.arrays if random.random() < 0.5])
            rows, columns = sorted(random.integers(0, 65, 2)), sorted(random.integers(0, 1501, 2))
            sizes = (int(rows[1] - rows[0]), int(columns[1] - columns[0]))
            if all(sizes):
                mine.append(it.want("m.wide", Box((int(rows[0]), int(columns[0])), sizes)))
            wants.append(mine)
        outcomes = together(it, wants, place, budget_bytes=int(random.integers(1, 300_000)))
        check_once(outcomes)
        for each in wants:
            it.check(each)


def test_each_rank_its_own_shard_reads_as_before(tmp_path, place):
    state = {"w": np.arange(1 << 20, dtype=np.float64)}
    with saved(tmp_path / "store", state) as it:
        rows = len(state["w"]) // 4
        wants = [[it.want("m.w", Box((i * rows,), (rows,)))] for i in range(4)]
        outcomes = together(it, wants, place)
        assert check_once(outcomes) == state["w"].nbytes
        assert [outcome.done.bytes_read for outcome in outcomes] == [rows * 8] * 4
        for each in wants:
            it.check(each)


def test_neighbours_in_a_pack_that_different_ranks_need_are_one_read(tmp_path, place):
    with saved(tmp_path / "store", numbers(100, 500)) as it:
        names = list(it.arrays)
        wants = [it.wants(names[i::2]) for i in range(2)]
        outcomes = together(it, wants, place)
        assert check_once(outcomes) <= 1.1 * 100 * 500
        assert sum(outcome.done.reads for outcome in outcomes) == 1
        for each in wants:
            it.check(each)


def test_ranks_that_need_nothing_take_part(large, place):
    wants: list[list[Want]] = [[], large.all, [], large.all]
    outcomes = together(large, wants, place)
    assert check_once(outcomes) == sum(a.nbytes for a in large.arrays.values())
    assert [outcome.done.bytes_read > 0 for outcome in outcomes] == [False, True, False, True]
    large.check([*wants[1], *wants[3]])
    raised(together(large, [[], [], []], place))


def test_odd_sizes(tmp_path, place):
    random = np.random.default_rng(3)
    state: dict[str, np.ndarray] = {f"n{n}": random.integers(0, 9, n, np.uint8) for n in (1, 3, 7, 63, 4097)}
    state |= {"scalar": np.array(2.5), "empty": np.zeros((0, 3)), "big": random.standard_normal(99_999)}
    state["complex"] = random.standard_normal(1001) + 1j
    with saved(tmp_path / "store", state, chunk_bytes=CHUNK // 8) as it:
        names = [name for name in it.arrays if it.arrays[name].size]
        wants = [it.wants(names) for _ in range(3)]
        check_once(together(it, wants, place, budget_bytes=4097))
        for each in wants:
            it.check(each)


@pytest.mark.parametrize("budget", [1, 1000, CHUNK // 4 + 1, 3 * CHUNK])
def test_a_small_budget_bounds_the_memory(large, place, monkeypatch, budget):
    made: list[int] = []
    fill = segment.fill
    monkeypatch.setattr(segment, "fill", lambda fd, at, n: made.append(n) or fill(fd, at, n))
    wants = [large.all for _ in range(4)]
    outcomes = together(large, wants, place, budget_bytes=budget)
    assert check_once(outcomes) == sum(a.nbytes for a in large.arrays.values())
    assert sum(made) <= max(budget, CHUNK // 4) + 4 * 4096, "one chunk is always held, and a few pages"
    for each in wants:
        large.check(each)


def test_a_second_fetch_is_not_shared(large, place):
    wants, again = [large.all for _ in range(2)], [large.all for _ in range(2)]
    outcomes = together(large, wants, place, again=again)
    raised(outcomes)
    once = sum(a.nbytes for a in large.arrays.values())
    assert sum(outcome.done.bytes_read for outcome in outcomes) == 3 * once
    for each in [*wants, *again]:
        large.check(each)


def test_many_tiny_tensors_are_not_slower(tmp_path, place):
    with saved(tmp_path / "store", numbers(10_000, 64)) as it:
        count = 4

        def alone() -> None:
            threads = [
                threading.Thread(target=Fetcher(it.tier, it.contents).fetch, args=[it.all])
                for _ in range(count)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def shared() -> None:
            check_once(together(it, [it.all for _ in range(count)], place))

        def seconds(call: Callable[[], None]) -> float:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started

        alone()
        # Both are mostly Python under one lock here; the best of three leaves out what others do meanwhile.
        assert min(seconds(shared) for _ in range(3)) < 2 * min(seconds(alone) for _ in range(3)) + 0.2


@pytest.mark.parametrize("seed", range(12))
def test_the_division(seed):
    random = np.random.default_rng(seed)
    objects = np.sort(random.integers(0, 12, 300))
    lengths = random.integers(1, 5000, 300)
    gaps = random.integers(0, 100_000, 300) * (random.random(300) < 0.1)
    offsets = np.zeros(300, np.int64)
    for i in range(1, 300):
        if objects[i] == objects[i - 1]:
            offsets[i] = offsets[i - 1] + lengths[i - 1] + gaps[i]
    where = Locations(objects, offsets, lengths, np.zeros(300, np.uint8))
    contents: Any = SimpleNamespace(
        locations=where, keys=SimpleNamespace(keys=[f"o{i:02d}" for i in range(12)])
    )
    needs = random.random((4, 300)) < 0.3
    budget = int(random.integers(1, 40_000))
    assignment = Assignment(contents, Places.of(contents), needs, budget)
    capacity = assignment.longest + 64 + int(random.integers(0, 2 * assignment.longest))
    runs = assignment.runs(capacity)
    assert (assignment.read_of_row >= 0).tolist() == needs.any(axis=0).tolist()
    for read in range(assignment.read_of_row.max() + 1):
        inside = np.flatnonzero(assignment.read_of_row == read)
        needers = np.flatnonzero(needs[:, inside].any(axis=1)).tolist()
        assert (read in runs) == (len(needers) > 1)
        if read not in runs:
            continue
        run = runs[read]
        assert run.reader in needers
        assert run.rows == tuple(inside.tolist())
        assert run.offset == offsets[inside].min()
        assert run.offset + run.length == (offsets + lengths)[inside].max()
        assert [assignment.needed_by(i)[run.number] for i in range(4)] == [i in needers for i in range(4)]
        assert 0 <= run.start <= run.start + run.length <= capacity
        for other in runs.values():
            if run.after <= other.number < run.number:  # may still lie there when this one is read
                apart = other.start + other.length <= run.start or run.start + run.length <= other.start
                assert apart, "a run overwrites one that is not yet taken"
    loads = [sum(run.length for run in runs.values() if run.reader == i) for i in range(4)]
    assert sum(loads) == sum(run.length for run in runs.values())


# --- when it cannot be done -----------------------------------------------------------------------


def check_alone(it: Saved, wants: Sequence[Sequence[Want]], outcomes: Sequence[Outcome]) -> None:
    raised(outcomes)
    for each, outcome in zip(wants, outcomes, strict=True):
        it.check(each)
        assert outcome.done.bytes_read == sum(want.raw.nbytes for want in each)


def test_no_place_to_share(large, place, caplog):
    wants = [large.all for _ in range(3)]
    check_alone(large, wants, together(large, wants, place, directories=["/nowhere"]))
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


@pytest.mark.parametrize("last", ["header", "ring"])
def test_no_room(large, place, monkeypatch, caplog, last):
    fill = segment.fill
    room = 0 if last == "header" else 4096
    monkeypatch.setattr(segment, "fill", lambda fd, at, n: n <= room and fill(fd, at, n))
    wants = [large.all for _ in range(3)]
    check_alone(large, wants, together(large, wants, place, join_seconds=0.3))
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


def test_little_room_makes_a_smaller_ring(large, place, monkeypatch):
    fill = segment.fill
    monkeypatch.setattr(segment, "fill", lambda fd, at, n: n < 3 * CHUNK and fill(fd, at, n))
    wants = [large.all for _ in range(3)]
    check_once(together(large, wants, place))
    for each in wants:
        large.check(each)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes(large, place, caplog, absent):
    wants = [large.all for _ in range(4)]
    outcomes = together(large, wants, place, absent=[absent], join_seconds=0.2)
    present = [i for i in range(4) if i != absent]
    check_alone(large, [wants[i] for i in present], [outcomes[i] for i in present])
    if absent:
        assert f"number {absent} of 4" in caplog.text


def test_ranks_that_restore_different_checkpoints_do_not_share(tmp_path, place):
    with ckptstore.init(tmp_path / "store") as store:
        run = store.run("train")
        made = [run.save(step, numbers(5, 1000, step)).result() for step in (1, 2)]
        both = [Saved(one.tier, one.contents, numbers(5, 1000, one.step)) for one in made]
        wants = [it.all for it in both]
        outcomes = together(both[0], wants, place, contents={1: both[1].contents})
        raised(outcomes)
        for it, each in zip(both, wants, strict=True):
            it.check(each)


# --- when a rank fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
def test_a_damaged_chunk_fails_all_and_names_the_reader(large, place, index):
    outcomes = together(
        large, [large.all for _ in range(4)], place, scripts={index: [Fault("flip", op="read_into", skip=9)]}
    )
    for i, outcome in enumerate(outcomes):
        if i == index:
            assert isinstance(outcome.error, ChunkDamagedError)
            assert "tensor 'm.t0" in str(outcome.error)
        else:
            assert isinstance(outcome.error, DeadlineError)
            assert f"rank {10 + index}" in str(outcome.error)
            assert "is damaged" in str(outcome.error)


def test_a_backend_that_fails_for_one_rank(large, place):
    script = [Fault("error", op="read_into", error=BackendError("no route to host"))]
    outcomes = together(large, [large.all for _ in range(3)], place, scripts={1: script})
    assert "no route to host" in str(outcomes[1].error)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, DeadlineError)
        assert "rank 11" in str(outcome.error)
        assert "no route to host" in str(outcome.error)


def test_a_rank_that_fails_before_it_reads(large, place):
    bad = [Want(10**6, Box.whole((1,)), np.zeros(1, np.uint8))]
    outcomes = together(large, [large.all, bad, large.all], place)
    assert isinstance(outcomes[1].error, IndexError)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, DeadlineError)
        assert "rank 11" in str(outcome.error)
        assert not outcome.done.placed


class Standing(threading.Event):
    """A rank waits for it until another has failed; the clock of the ranks begins to run when it waits."""

    began: float | None = None

    def wait(self, timeout: float | None = None) -> bool:
        self.began = time.monotonic()
        return super().wait(timeout)

    def monotonic(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began


def test_a_rank_that_stands_still(large, place):
    event = Standing()
    outcomes = together(
        large,
        [large.all for _ in range(3)],
        place,
        scripts={2: [Fault("hang", op="read_into", skip=5, event=event)]},
        deadline_seconds=2.0,
        environment=Environment(monotonic=event.monotonic),
        failing=event,
    )
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, DeadlineError)
        assert "rank 12" in str(outcome.error)
        assert "nothing moved" in str(outcome.error)


def test_the_first_rank_dies_before_all_have_come(large, place):
    first = HostShare("token", 0, 2, directories=[str(place)])
    created = first._create()
    assert created is not None
    os.close(created[1])  # as the system does when a process dies
    outcomes = together(large, [[], large.all], place, absent=[0])
    assert isinstance(outcomes[1].error, DeadlineError)
    assert "rank 0" in str(outcomes[1].error)


# --- hosts ----------------------------------------------------------------------------------------


def test_peers_of_a_host():
    hosts = ["a", "b", "a", "a", "b"]
    assert [host_peers(hosts, rank) for rank in range(5)] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


def test_a_host_is_told_by_its_memory_too():
    assert this_host(Environment()) == this_host(Environment())
    assert Environment().host in this_host(Environment())


# --- real processes -------------------------------------------------------------------------------


class Stopping(FaultBackend):
    """Says when a rank has read that much, and then never answers again."""

    def __init__(self, inner: Backend, after: int | None, pipe: Connection) -> None:
        super().__init__(inner)
        self._left = after
        self._pipe = pipe

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if self._left is not None and key.startswith("chunks/"):
            if not self._left:
                self._pipe.send("stopped")
                threading.Event().wait()
            self._left -= 1
        super().read_into(key, offset, buffer)


def process_rank(
    directory: str, place: str, index: int, count: int, stop_after: int | None, pipe: Connection
) -> None:
    import sys

    with ckptstore.open(directory) as store:
        checkpoint = store.run("train").latest
        assert checkpoint is not None
        it = Saved(checkpoint.tier, checkpoint.contents, {})
        wants = it.wants(list(it.contents.layout.by_name))
        backend = Stopping(it.tier.backend, stop_after, pipe)
        tier = Tier(backend, it.tier.marker, it.tier.environment)
        fetcher = Fetcher(tier, it.contents, HostShare("processes", index, count, directories=[place]))
        try:
            fetcher.fetch(wants)
            total = sum(int(want.raw.sum(dtype=np.int64)) for want in wants)
            pipe.send((fetcher.done.bytes_read, total, "torch" in sys.modules))
        except CkptstoreError as error:
            pipe.send(error)


@pytest.mark.parametrize("killed", [None, 0, 2])
def test_real_processes(large, tmp_path, killed):
    count = 3
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else str(tmp_path)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(count)]
    directory = str(tmp_path / "store")
    processes = [
        context.Process(
            target=process_rank, args=(directory, memory, i, count, 20 if i == killed else None, pipes[i][1])
        )
        for i in range(count)
    ]
    for process in processes:
        process.start()
    try:
        if killed is not None:
            assert pipes[killed][0].poll(60)
            assert pipes[killed][0].recv() == "stopped"
            os.kill(processes[killed].pid or 0, signal.SIGKILL)
        killed_at = time.monotonic()
        answers = [
            pipe.recv() if i != killed and pipe.poll(60) else None for i, (pipe, _) in enumerate(pipes)
        ]
        took = time.monotonic() - killed_at
    finally:
        for process in processes:
            process.kill()
            process.join()
    if killed is None:
        assert sum(read for read, _, _ in answers) == sum(a.nbytes for a in large.arrays.values())
        expected = sum(int(a.sum(dtype=np.int64)) for a in large.arrays.values())
        assert all(total == expected and not torch for _, total, torch in answers)
    else:
        for i, answer in enumerate(answers):
            if i != killed:
                assert isinstance(answer, DeadlineError)
                assert f"rank {killed}" in str(answer)
        assert took < 30, "long before the deadline: the system tells that it has ended"
    # Names carry the token's digest, so that what other processes share meanwhile does not count.
    assert not [path for path in HostShare("processes", 0, count)._paths if path.exists()]
