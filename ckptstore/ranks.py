"""The ranks of one training, and the few words that they exchange.

Only what training waits for anyway is said here: which checkpoint is restored, and whether all could.
With torch.distributed the words go over a gloo group (never device memory); without it, through small
objects in the tier. A save exchanges no words but start, parts and outcome (:mod:`ckptstore.save.ranked`).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ckptstore.environment import Environment
from ckptstore.errors import DeadlineError, UsageError

DEADLINE_SECONDS = 600.0

_RESTART_KEYS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class RankOptions:
    """What a caller says about the ranks that train a run together; see :meth:`ckptstore.Store.run`.

    Raises:
        UsageError: the options contradict each other.
    """

    rank: int | None = None
    world_size: int | None = None
    session_key: str | None = None
    process_group: Any = None
    replicas: Literal["strict", "warn"] = "strict"
    check_replicas: Literal["sample", "all"] = "sample"
    deadline_seconds: float = DEADLINE_SECONDS

    def __post_init__(self) -> None:
        if self.replicas not in ("strict", "warn"):
            raise UsageError(f"replicas must be 'strict' or 'warn', not {self.replicas!r}")
        if self.check_replicas not in ("sample", "all"):
            raise UsageError(f"check_replicas must be 'sample' or 'all', not {self.check_replicas!r}")
        if not self.deadline_seconds > 0:
            raise UsageError(f"deadline_seconds must be positive, not {self.deadline_seconds!r}")
        if (self.rank is None) != (self.world_size is None):
            raise UsageError("rank= and world_size= go together", hint="give both, or neither")
        if self.rank is not None and self.process_group is not None:
            raise UsageError("give rank= and world_size=, or process_group=, not both")
        if self.rank is not None and self.world_size is not None:
            check_place(self.rank, self.world_size)

    @property
    def in_torch(self) -> bool:
        """Whether torch.distributed says who the ranks are."""
        return self.rank is None and (self.process_group is not None or in_torch_distributed())


def check_place(rank: int, world_size: int) -> None:
    """That there can be such a rank; raises UsageError."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(
                f"{name} must be an int, not {value!r}",
                hint="environment variables are text: int(os.environ[...])",
            )
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} of world_size {world_size} is impossible", hint="0 <= rank < world_size"
        )


class Ranks(abc.ABC):
    """This process's place among the processes that train together.

    Attributes:
        rank: 0 leads: it opens sessions, decides what is restored, and commits.
        world_size: how many there are.
        key: the same on all ranks of this start and never used before.
    """

    key: str

    def __init__(self, rank: int, world_size: int) -> None:
        check_place(rank, world_size)
        self.rank = rank
        self.world_size = world_size

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @abc.abstractmethod
    def broadcast(self, topic: str, say: Callable[[], bytes]) -> bytes:
        """Rank 0's bytes, on every rank.

        Args:
            topic: names the occasion; every rank uses the same topics in the same order.
            say: called on rank 0 only; it must not raise.

        Raises:
            DeadlineError: rank 0 said nothing in time.
        """

    @abc.abstractmethod
    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, on every rank.

        Raises:
            DeadlineError: names the ranks that said nothing.
        """


class Solo(Ranks):
    """One process alone."""

    key = ""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def broadcast(self, topic: str, say: Callable[[], bytes]) -> bytes:
        """What it says itself."""
        return say()

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """Only its own."""
        return [mine]


class TorchRanks(Ranks):
    """The ranks of torch.distributed; making one is a collective call."""

    def __init__(self, process_group: Any, environment: Environment, deadline_seconds: float) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._seconds = deadline_seconds
        self._timeout = datetime.timedelta(seconds=deadline_seconds)
        # NCCL would move these words through device memory, in the way of training: a group of our own.
        members = None if process_group is None else dist.get_process_group_ranks(process_group)
        with self._exchange("key"):
            self._group = dist.new_group(
                members, timeout=self._timeout, backend="gloo", use_local_synchronization=members is not None
            )
        super().__init__(dist.get_rank(self._group), dist.get_world_size(self._group))
        self.key = self.broadcast("key", lambda: environment.new_ulid().encode()).decode()

    def broadcast(self, topic: str, say: Callable[[], bytes]) -> bytes:
        """Rank 0's word by one broadcast."""
        box: list[Any] = [(topic, say())] if self.leads else [None]
        with self._exchange(topic):
            # It names the ranks that do not come; the exchange itself would only say that it timed out.
            self._dist.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)
            source = self._dist.get_global_rank(self._group, 0)
            self._dist.broadcast_object_list(box, src=source, group=self._group)
        return self._same_topic(topic, box[0])

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """All words by one all-gather; it follows a broadcast, to which all ranks have come."""
        boxes: list[Any] = [None] * self.world_size
        with self._exchange(topic):
            self._dist.all_gather_object(boxes, (topic, mine), group=self._group)
        return [self._same_topic(topic, box) for box in boxes]

    @contextlib.contextmanager
    def _exchange(self, topic: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DeadlineError(
                f"not all ranks came to {topic!r} in {self._seconds:g} s: {reason}",
                hint="every rank must make the same calls of save and restore, in the same order; for a run "
                "that only this process uses: store.run(name, rank=0, world_size=1)",
            ) from error

    @staticmethod
    def _same_topic(topic: str, box: tuple[str, Any]) -> bytes:
        found, word = box
        if found != topic:
            raise UsageError(
                f"the ranks are not at the same call: one is at {topic!r}, another at {found!r}",
                hint="every rank must make the same calls of save and restore, in the same order",
            )
        assert isinstance(word, bytes)
        return word


class Words(abc.ABC):
    """Where ranks without torch.distributed leave their words: written once, read by anybody."""

    @abc.abstractmethod
    def put(self, topic: str, rank: int, data: bytes) -> None:
        """Leaves a word."""

    @abc.abstractmethod
    def get(self, topic: str, rank: int) -> bytes | None:
        """A word, or None when it is not there yet."""

    @abc.abstractmethod
    def drop(self, topic: str, ranks: int) -> None:
        """Removes all words about a topic; failing is harmless."""


class KeyedRanks(Ranks):
    """Ranks that know each other by a key that is the same on all and new at each start."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        key: str,
        words: Words,
        environment: Environment,
        deadline_seconds: float,
    ) -> None:
        super().__init__(rank, world_size)
        self.key = key
        self._words = words
        self._environment = environment
        self._seconds = deadline_seconds
        self._topics: list[str] = []

    def broadcast(self, topic: str, say: Callable[[], bytes]) -> bytes:
        """Rank 0 leaves its word; the others look for it with growing patience."""
        if self.leads:
            word = say()
            self._words.put(topic, 0, word)
            self._topics.append(topic)  # the others may be far behind
            return word
        return self._wait(topic, [0])[0]

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """Each leaves its word and looks for all."""
        self._words.put(topic, self.rank, mine)
        found = self._wait(topic, range(self.world_size))
        if self.leads:  # all have come to this topic, and have read those before it
            while self._topics:
                self._words.drop(self._topics.pop(), self.world_size)
            self._topics.append(topic)
        return found

    def _wait(self, topic: str, ranks: Sequence[int]) -> list[bytes]:
        found: dict[int, bytes] = {}
        wait = Backoff(self._environment, self._seconds, self.world_size)
        while True:
            for rank in ranks:
                if rank not in found and (word := self._words.get(topic, rank)) is not None:
                    found[rank] = word
            missing = [rank for rank in ranks if rank not in found]
            if not missing:
                return [found[rank] for rank in ranks]
            if not wait.pause():
                raise DeadlineError(
                    f"{show_ranks(missing)} said nothing about {topic!r} in {self._seconds:g} s",
                    hint="look at their logs; every rank must make the same calls, with the same "
                    "session_key, and see the same store",
                )


class Backoff:
    """Growing, jittered pauses until a deadline.

    Args:
        seconds: until then.
        world_size: how many may be looking: the more there are, the less often each looks, so that the
            tier is asked some hundred times a second at most.
    """

    def __init__(self, environment: Environment, seconds: float, world_size: int = 1) -> None:
        self._environment = environment
        self._end = environment.monotonic() + seconds
        self._next = 0.002
        self._longest = min(0.05 + 0.002 * world_size, 5.0)

    def pause(self) -> bool:
        """Sleeps a little; False when the deadline has passed."""
        left = self._end - self._environment.monotonic()
        if left <= 0:
            return False
        jitter = 0.5 + int.from_bytes(self._environment.random_bytes(2), "big") / 65536
        self._environment.sleep(min(self._next * jitter, left))
        self._next = min(self._next * 1.6, self._longest)
        return True


def show_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 2, 5`` or ``ranks 0, 1, 2 and 40 more``."""
    shown = ", ".join(str(rank) for rank in list(ranks)[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def session_key_of(environ: Mapping[str, str]) -> str | None:
    """A key that the launcher gives all ranks of one start, if it gives one."""
    for job, count in _RESTART_KEYS:
        if environ.get(job):
            return f"{job}={environ[job]}/{environ.get(count) or 0}"
    return None


def in_torch_distributed() -> bool:
    """Whether this process is a rank of torch.distributed; torch is not imported to find out."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available()) and bool(dist.is_initialized())


def place_in_torch() -> tuple[int, int]:
    """(rank, world size) as torch.distributed says; (0, 1) where it is not in use."""
    if not in_torch_distributed():
        return 0, 1
    dist = sys.modules["torch.distributed"]
    return int(dist.get_rank()), int(dist.get_world_size())


def tell_place(state: Any, place: tuple[int, int]) -> None:
    """Tells a state that wants to know (a TrainState) which of how many ranks it is on."""
    if callable(getattr(state, "set_place", None)):
        state.set_place(*place)


def need_session_key(given: str | None, world_size: int) -> str:
    """The key under which ranks without torch.distributed find each other.

    Raises:
        UsageError: none was given, and no launcher gives one.
    """
    key = given or session_key_of(os.environ)
    if key is None:
        raise UsageError(
            f"world_size={world_size} without torch.distributed wants session_key=",
            hint="pass a str that is the same on all ranks and new at each start, such as the job id",
        )
    return key
