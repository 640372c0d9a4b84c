"""Where the CPU of ckptstore's own background work goes: in hash, read, write and copy calls, or beside them.

    python -m benchmarks.overhead --gib 1.5 --repeats 5 --dir /data/scratch --json out.json

The named calls are replaced by ones that read the calling thread's CPU clock before and after. "files" are
the system calls that belong to a read or a write and move no data (open, rename, close, ...), "sqlite" is
what SQLite does for the manifest. "beside" is what threads spend beside all these, and beside the clocks
themselves: Python, locks, waking each other. It and SQLite are overhead, shown as a share of
the wall time: for a save from its return to the commit, without the caller's thread, which only waits; for a
load, of all of it. "us / tensor" is what is beside, for a save with the CPU of the caller until it returns;
"us more" is by how much a tensor makes that longer: without what one of as many bytes takes. A last save of
each case is sampled instead: the lines that its threads were at, weighted by the CPU that each spent since
the sample before, without the named calls.

Cases: the AdamW state of the other benchmarks, 10,000 tensors of 1 KiB, and one of as many bytes. "the calls
alone" is the floor of the first: see :mod:`benchmarks.bare`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import mmap
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, ClassVar
from unittest import mock

import torch

from benchmarks import bare, command, disk, goals, states
from benchmarks.command import GIB, say
from benchmarks.goals import Goal
from benchmarks.measure import thread_clock
from benchmarks.states import State

_LIMIT = 0.02
_CHUNK_BYTES = 12 << 20  # as long as those of the AdamW state are on average
_MICROSECONDS_PER_TENSOR = 5.0
_SMALL_COUNT, _SMALL_ELEMENTS = 10_000, 256
_HELD = ("AdamW state", "10,000 x 1 KiB")
_SAMPLE_SECONDS = 0.002
_SHOWN_LINES = 12
_CLOCK_CALLS = 2000
_LITTLE_BYTES = 64 << 10
_SAMPLED = 16
_LEAST_PAIRS = 10  # where what a clock takes is measured: that is a small difference
_TURNS = 200_000
KINDS = ("hash", "read", "write", "files", "copy", "sqlite")
# Where the library finds the function, as `module`, `name`, and which kind of work it is.
_CALLS = (
    ("blake3", "blake3", "hash"),
    ("os", "preadv", "read"),
    ("os", "pread", "read"),
    ("os", "readv", "read"),
    ("os", "pwrite", "write"),
    ("os", "pwritev", "write"),
    ("os", "write", "write"),
    ("os", "writev", "write"),
    *(("os", name, "files") for name in ("open", "close", "rename")),
    ("os", "fsync", "write"),
    ("os", "fdatasync", "write"),
    ("ckptstore_local._sys", "preadv", "read"),
    ("ckptstore_local._sys", "pwrite", "write"),
    ("ckptstore_local._sys", "pwritev", "write"),
    ("ckptstore_local._sys", "write", "write"),
    ("ckptstore_local._sys", "writev", "write"),
    ("ckptstore_local._sys", "fsync", "write"),
    *(
        ("ckptstore_local._sys", name, "files")
        for name in (
            "open",
            "close",
            "fstat",
            "ftruncate",
            "link",
            "lstat",
            "mkdir",
            "rename",
            "stat",
            "unlink",
        )
    ),
    ("numpy", "copyto", "copy"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One save or load; `cpu_seconds` is by kind of call."""

    wall_seconds: float
    blocked_seconds: float
    caller_cpu_seconds: float
    """Of a save: what the caller's thread spent of `blocked_seconds`, without what others took from it."""
    background_cpu_seconds: float
    cpu_seconds: dict[str, float]
    clocked: int
    clock_seconds: float
    """What the clocks around so many calls took, as far as they did not count it themselves."""

    @property
    def beside_seconds(self) -> float:
        return self.background_cpu_seconds - sum(self.cpu_seconds.values()) - self.clock_seconds

    def with_clocks_of(self, seconds: float) -> Sample:
        """The same, if each clock took so long."""
        return dataclasses.replace(self, clock_seconds=self.clocked * seconds)

    @property
    def overhead_share(self) -> float:
        return (self.beside_seconds + self.cpu_seconds["sqlite"]) / self.wall_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Medians of one case, in seconds of CPU but for `wall_seconds`."""

    case: str
    wall_seconds: float
    blocked_seconds: float
    caller_cpu_seconds: float
    cpu_seconds: dict[str, float]
    beside_seconds: float
    overhead_share: float
    per_tensor_microseconds: float
    more_microseconds: float | None
    hot_lines: dict[str, list[tuple[str, float]]]
    """Of the caller until `save` returns, and of the background from then on: place, and its share."""
    samples: list[Sample]

    @property
    def spent_seconds(self) -> float:
        """In Python, and for a save all that the caller's thread spent."""
        return self.beside_seconds + self.caller_cpu_seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for."""
    options = command.parser("overhead", __doc__, gib=1.5, repeats=5).parse_args(arguments)
    connect = partial(sqlite3.connect, factory=_ClockedConnection)
    with command.scratch(options.dir, "overhead") as folder, mock.patch.object(sqlite3, "connect", connect):
        command.require_space(folder, int(4 * options.gib * GIB))
        environment = command.environment(folder)
        lines, clock_seconds = _run(options, folder)
    aims = _goals(lines)
    environment["python_turn_nanoseconds"] = _turn_nanoseconds()
    environment["clock_microseconds"] = clock_seconds * 1e6
    document = {
        "environment": environment,
        "lines": [dataclasses.asdict(line) for line in lines],
        "goals": goals.as_json(aims),
    }
    speed = (
        f"a turn of an empty loop takes Python {environment['python_turn_nanoseconds']:.0f} ns here, a clock "
        f"around a call of a large save {environment['clock_microseconds']:.1f} us"
    )
    command.finish(options, f"{table(lines, aims)}\n\n{speed}", document, partial(draw, lines))
    return 0


def _turn_nanoseconds() -> float:
    """How fast this machine runs Python now: the figures of two days compare only beside it."""
    times = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(_TURNS):
            pass
        times.append(time.thread_time() - start)
    return min(times) / _TURNS * 1e9


def _run(options: argparse.Namespace, folder: Path) -> tuple[list[Line], float]:
    """The lines, and what a clock took around the calls of a large save."""
    import ckptstore

    lines: list[Line] = []
    small = {"model": {f"tensor.{n:05}": torch.rand(_SMALL_ELEMENTS) for n in range(_SMALL_COUNT)}}
    one = {"model": {"tensor": torch.rand(_SMALL_COUNT * _SMALL_ELEMENTS)}}
    large = states.adamw_state(options.gib, options.seed)
    alone, clock_seconds = _alone(
        folder / "alone", int(options.gib * GIB), max(options.repeats, _LEAST_PAIRS)
    )
    for name, state in (("AdamW state", large), ("10,000 x 1 KiB", small), ("1 x 10,000 KiB", one)):
        path = folder / "store"
        run = ckptstore.open(str(path), create=True).run("bench")
        saver = _Saver(run, state)
        saver.save()  # its buffers and threads are there from here on
        saves: list[Sample] = []
        twice: list[Sample] = []
        loads: list[Sample] = []
        repeats = max(options.repeats, _LEAST_PAIRS) if state is small else options.repeats
        for repeat in range(repeats):
            say(f"{name}, repeat {repeat + 1} of {repeats}")
            if state is small:
                saver.change()
                twice.append(_measured_save(saver, twice=True))
            saver.change()
            saves.append(_measured_save(saver))
            disk.forget(path)
            loads.append(_measured_load(saver))
        hot = _hot_lines(saver)
        if state is large:  # in the others nobody hashes megabytes or waits for long
            saves, loads = ([s.with_clocks_of(clock_seconds) for s in some] for some in (saves, loads))
        if twice:
            saves = _without_clocks(saves, twice)
        count = len(list(states.tensors(state)))
        lines += [_line(f"save, {name}", saves, count, hot), _line(f"load, {name}", loads, count, {})]
        run.close()
        disk.remove(path)
    lines[2:4] = [alone, *(_compared(line, lines[4:]) for line in lines[2:4])]
    return lines, clock_seconds


def _without_clocks(once: Sequence[Sample], twice: Sequence[Sample]) -> list[Sample]:
    """Saves of small tensors, less what their clocks took: as much as a second one around each call adds.

    That is also what each sixteenth call takes to hash once more: see :func:`_sampled`.
    """
    pairs = zip(once, twice, strict=True)
    more = median([double.beside_seconds - single.beside_seconds for single, double in pairs])
    return [dataclasses.replace(s, clock_seconds=max(s.clock_seconds, more)) for s in once]


def _alone(folder: Path, nbytes: int, repeats: int) -> tuple[Line, float]:
    """What a save of so many bytes takes if it makes nothing but its calls; and what a clock takes there.

    A clock takes longer in a thread whose caches hashing has emptied than in a loop: what a second one around
    each call adds is taken for the first, too, which is a little less than that takes.
    """
    memory = memoryview(mmap.mmap(-1, nbytes - nbytes % mmap.PAGESIZE))
    for start in range(0, len(memory), mmap.PAGESIZE):
        memory[start] = 1
    chunks = [memory[start : start + _CHUNK_BYTES] for start in range(0, len(memory), _CHUNK_BYTES)]
    once: list[Sample] = []
    twice: list[Sample] = []
    for repeat in range(repeats):
        say(f"the calls alone, repeat {repeat + 1} of {repeats}")
        for samples in (once, twice):
            folder.mkdir()
            meter = _Meter()
            with _timed_calls(meter, twice=samples is twice):
                before = time.process_time() - time.thread_time()
                began = time.perf_counter()
                bare.save(folder, chunks)
                seconds = time.perf_counter() - began
                spent = time.process_time() - time.thread_time() - before
            samples.append(Sample(seconds, 0.0, 0.0, spent, meter.totals(), meter.clocked, 0.0))
            if len(list(folder.iterdir())) != len(chunks):  # a thread has failed, and has said why
                raise RuntimeError("the calls alone could not be made")
            disk.remove(folder)
    more = median(s.beside_seconds for s in twice) - median(s.beside_seconds for s in once)
    clock_seconds = max(more / once[0].clocked, _cost_of(_clocked))
    samples = [sample.with_clocks_of(clock_seconds) for sample in once]
    return _line("save, the calls alone", samples, len(chunks), {}), clock_seconds


def _compared(line: Line, ones: Sequence[Line]) -> Line:
    """A line of the small tensors with what each adds to one tensor of all their bytes."""
    one = next(other for other in ones if other.case.split()[0] == line.case.split()[0])
    seconds = (line.spent_seconds - one.spent_seconds) / _SMALL_COUNT
    return dataclasses.replace(line, more_microseconds=seconds * 1e6)


class _Saver:
    """Saves the same tensors again and again, all of them changed, and loads the last checkpoint."""

    def __init__(self, run: Any, state: State) -> None:
        self._run, self._state = run, state
        self._target = states.blank_like(state)
        self._step = 0
        self._pending: Any = None

    def begin(self) -> None:
        self._pending = self._run.save(self._step, self._state)

    def wait(self) -> None:
        self._pending.result()

    def save(self) -> None:
        self.change()
        self.begin()
        self.wait()

    def load(self) -> None:
        self._pending.result().restore(self._target)

    def change(self) -> None:
        self._step += 1
        for _, tensor in states.tensors(self._state):
            tensor.mul_(-1.001)


class _Meter:
    """CPU seconds of each call, by kind. Threads only append: what they did more would be measured, too."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.little: list[None] = []  # one for each call on little data

    def clear(self) -> None:
        for seconds in self.seconds.values():
            seconds.clear()
        self.little.clear()

    def totals(self) -> dict[str, float]:
        """Seconds by kind."""
        return {kind: sum(seconds) for kind, seconds in self.seconds.items()}

    @property
    def clocked(self) -> int:
        """How many calls, but for those on little data."""
        return sum(map(len, self.seconds.values()))

    def own_seconds(self) -> float:
        """What the clocks took beside what they have counted."""
        return self.clocked * _cost_of(_clocked) + len(self.little) * _cost_of(_sampled)


def _measured_save(saver: _Saver, *, twice: bool = False) -> Sample:
    """From the return of `save` on, without the caller's thread, which only waits from then on."""
    meter = _Meter()
    with _timed_calls(meter, twice=twice):
        start, own = time.perf_counter(), time.thread_time()
        saver.begin()
        own = time.thread_time() - own
        meter.clear()
        before = time.process_time() - time.thread_time()
        returned = time.perf_counter()
        saver.wait()
        ended = time.perf_counter()
        after = time.process_time() - time.thread_time()
    spent = after - before
    return Sample(
        ended - returned, returned - start, own, spent, meter.totals(), meter.clocked, meter.own_seconds()
    )


def _measured_load(saver: _Saver) -> Sample:
    """All threads: the caller takes part."""
    meter = _Meter()
    with _timed_calls(meter):
        start, before = time.perf_counter(), time.process_time()
        saver.load()
        ended, after = time.perf_counter(), time.process_time()
    spent = after - before
    seconds = ended - start
    return Sample(seconds, seconds, 0.0, spent, meter.totals(), meter.clocked, meter.own_seconds())


@contextlib.contextmanager
def _timed_calls(meter: _Meter, *, twice: bool = False) -> Iterator[None]:
    """Puts clocks around the named calls, wherever the library finds them, and takes them away again.

    Args:
        twice: another clock around each of them, whose figures are not used.
    """
    undo: list[tuple[Any, str, Any]] = []
    calls = [(importlib.import_module(module), name, kind) for module, name, kind in _CALLS]
    try:
        for owner, name, kind in [*calls, (torch.Tensor, "copy_", "copy")]:
            inner = getattr(owner, name, None)
            if inner is not None:
                undo.append((owner, name, inner))
                wrapped = _sampled if kind == "hash" else _clocked
                clocked = wrapped(inner, kind, meter)
                setattr(owner, name, wrapped(clocked, kind, _Meter()) if twice else clocked)
        with mock.patch.object(_ClockedConnection, "meter", meter):
            yield
    finally:
        for owner, name, inner in undo:
            setattr(owner, name, inner)


class _ClockedConnection(sqlite3.Connection):
    """SQLite's own type takes no other methods."""

    meter: ClassVar[_Meter | None] = None

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        return self._clocked(super().execute, *arguments)

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:
        return self._clocked(super().executemany, *arguments)

    def _clocked(self, call: Callable[..., sqlite3.Cursor], *arguments: Any) -> sqlite3.Cursor:
        return call(*arguments) if self.meter is None else _clocked(call, "sqlite", self.meter)(*arguments)


@functools.cache
def _cost_of(clocked: Callable[[Any, str, _Meter], Any]) -> float:
    """CPU seconds that a call costs more with such a clock, and that it does not count: least of 5 tries."""
    meter = _Meter()
    call = clocked(_nothing, KINDS[0], meter)
    costs = []
    for _ in range(5):
        meter.clear()
        start = time.thread_time()
        for _ in range(_CLOCK_CALLS):
            call(b"", 0)
        spent = time.thread_time() - start
        costs.append((spent - sum(meter.totals().values())) / _CLOCK_CALLS)
    return min(costs)


@functools.cache
def _empty_interval() -> float:
    """CPU seconds that a clock counts of a call of nothing: the median."""
    meter = _Meter()
    call = _clocked(_nothing, KINDS[0], meter)
    for _ in range(_CLOCK_CALLS):
        call()
    return median(meter.seconds[KINDS[0]])


class _Nothing:
    """In place of a hasher."""

    def digest(self) -> None:
        pass


_NOTHING = _Nothing()


def _nothing(*_: object) -> _Nothing:
    return _NOTHING


def _clocked(inner: Any, kind: str, meter: _Meter) -> Any:
    clock, count = time.thread_time, meter.seconds[kind].append

    def call(*arguments: Any, **named: Any) -> Any:
        start = clock()
        try:
            return inner(*arguments, **named)
        finally:
            count(clock() - start)

    return call


def _sampled(inner: Any, kind: str, meter: _Meter) -> Any:
    """Of calls on little data only each sixteenth is clocked, and stands for all: the clocks took longer.

    It is clocked with a `digest`, which is hashing, too: the library's own calls of that are not seen.
    """
    clock, count, empty = time.thread_time, meter.seconds[kind].append, _empty_interval()
    pass_by = meter.little.append
    turns = itertools.count()

    def call(data: Any, *arguments: Any) -> Any:
        if len(data) >= _LITTLE_BYTES:
            start = clock()  # here and not in a second frame, whose cold lines would count as the library's
            hasher = inner(data, *arguments)
            count(clock() - start)
            return hasher
        pass_by(None)
        if next(turns) % _SAMPLED:
            return inner(data, *arguments)
        start = clock()
        hasher = inner(data, *arguments)
        hasher.digest()
        count((clock() - start - empty) * _SAMPLED)
        return hasher

    return call


def _hot_lines(saver: _Saver) -> dict[str, list[tuple[str, float]]]:
    """Lines by their share of the CPU outside the named calls, of the caller and of the background."""
    spent: dict[str, dict[str, float]] = {"caller": {}, "background": {}}
    returned, done = threading.Event(), threading.Event()
    caller = threading.current_thread()

    def sample() -> None:
        clocks: dict[int, float] = {}
        while not done.wait(_SAMPLE_SECONDS):
            frames = sys._current_frames()
            for thread in threading.enumerate():
                frame = frames.get(thread.ident or 0)
                if frame is None or thread.native_id is None or thread is sampler:
                    continue
                try:
                    now = time.clock_gettime(thread_clock(thread.native_id))
                except OSError:  # it has ended
                    continue
                used = now - clocks.get(thread.native_id, now)
                clocks[thread.native_id] = now
                is_counted = thread is not caller or not returned.is_set()
                # Within a named call the clock around it is the innermost Python frame.
                if used > 0 and is_counted and frame.f_code.co_filename != __file__:
                    places = spent["caller" if thread is caller else "background"]
                    place = _place(frame)
                    places[place] = places.get(place, 0.0) + used
            del frames, frame

    saver.change()
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        with _timed_calls(_Meter()):
            saver.begin()
            returned.set()
            saver.wait()
    finally:
        done.set()
        sampler.join()
    return {part: _most(places) for part, places in spent.items()}


def _most(spent: dict[str, float]) -> list[tuple[str, float]]:
    total = sum(spent.values()) or 1.0
    most = sorted(spent.items(), key=lambda entry: -entry[1])[:_SHOWN_LINES]
    return [(place, used / total) for place, used in most]


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


def _line(case: str, samples: list[Sample], tensors: int, hot: dict[str, list[tuple[str, float]]]) -> Line:
    line = Line(
        case,
        median(sample.wall_seconds for sample in samples),
        median(sample.blocked_seconds for sample in samples),
        median(sample.caller_cpu_seconds for sample in samples),
        {kind: median(sample.cpu_seconds[kind] for sample in samples) for kind in KINDS},
        median(sample.beside_seconds for sample in samples),
        median(sample.overhead_share for sample in samples),
        0.0,
        None,
        hot,
        samples,
    )
    return dataclasses.replace(line, per_tensor_microseconds=line.spent_seconds / tensors * 1e6)


def _goals(lines: Sequence[Line]) -> list[Goal]:
    large, small = (next(line for line in lines if line.case == f"save, {name}") for name in _HELD)
    share, each = large.overhead_share, small.more_microseconds or 0.0
    return [
        Goal(large.case, f"at most {_LIMIT:.0%} of background wall", share, _LIMIT, at_most=True),
        Goal(small.case, "at most 5 us more per tensor", each, _MICROSECONDS_PER_TENSOR, at_most=True),
    ]


def table(lines: Sequence[Line], aims: Sequence[Goal]) -> str:
    """For people: CPU seconds by kind, what is beside them, and the lines where that is spent."""
    heads = ("blocked s", "wall s", *KINDS, "beside", "of wall", "us / tensor", "us more")
    text = [f"{'':24}" + "".join(f"{head:>12}" for head in heads)]
    for line in lines:
        figures = (line.blocked_seconds, line.wall_seconds, *line.cpu_seconds.values(), line.beside_seconds)
        text.append(
            f"  {line.case:<22}"
            + "".join(f"{figure:>12.3f}" for figure in figures)
            + f"{line.overhead_share:>12.1%}{line.per_tensor_microseconds:>12.1f}"
            + ("" if line.more_microseconds is None else f"{line.more_microseconds:>12.1f}")
        )
    for line in lines:
        for part, places in line.hot_lines.items():
            text += ["", f"{line.case}, {part}: CPU beside the named calls"]
            text += [f"  {share:>6.1%}  {place}" for place, share in places]
    text += ["", "aims", *goals.table(aims)]
    return "\n".join(text)


def draw(lines: Sequence[Line], path: Path) -> None:
    """CPU seconds by kind, stacked, and the wall time as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(lines), figsize=(3 * len(lines), 3.6))
    colours = ("#2f6f4f", "#5b8fb9", "#9aa5b1", "#7d6b91", "#d9b44a", "#4a4a68", "#b3402a")
    for axis, line in zip(axes, lines, strict=True):
        figures = {**line.cpu_seconds, "beside": line.beside_seconds}
        bars = axis.bar(list(figures), list(figures.values()), color=colours)
        axis.bar_label(bars, fmt="%.2g", padding=2, fontsize=8)
        axis.axhline(line.wall_seconds, color="#333333", linestyle="--", linewidth=1)
        axis.set_title(f"{line.case}\nCPU s (line: wall)", loc="left", fontsize=9)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
