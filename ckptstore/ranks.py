"""The ranks of one training, and the few words that they exchange.

A rank says something by writing it once; the others wait for it with a deadline that names who is
missing. With torch.distributed the words go over a gloo subgroup (never device memory); without it,
through small objects in the tier. Nothing here is a barrier for training: a save exchanges words in its
background only, but for the one agreement on who writes what.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptstore.environment import Environment
from ckptstore.errors import DeadlineError, UsageError

DEADLINE_SECONDS = 600.0

_RESTART_KEYS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)


class Ranks(abc.ABC):
    """This process's place among the processes that train together.

    Attributes:
        rank: 0 leads: it opens sessions, decides what is restored, and commits.
        world_size: how many there are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise UsageError(
                f"rank {rank} of world_size {world_size} is impossible", hint="0 <= rank < world_size"
            )
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
            say: called on rank 0 only. If it raises, the others' call raises, too.

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

    def __init__(self) -> None:
        super().__init__(0, 1)

    def broadcast(self, topic: str, say: Callable[[], bytes]) -> bytes:
        """What it says itself."""
        return say()

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """Only its own."""
        return [mine]


@dataclasses.dataclass(frozen=True, slots=True)
class _Failed(Exception):
    """Rank 0 could not say what the others wait for."""

    message: str


class TorchRanks(Ranks):
    """The ranks of torch.distributed, over a gloo group of their own."""

    def __init__(self, process_group: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        # NCCL would move these words through device memory, in the way of training.
        self._group = process_group if process_group is not None else dist.new_group(backend="gloo")
        super().__init__(dist.get_rank(self._group), dist.get_world_size(self._group))

    def broadcast(self, topic: str, say: Callable[[], bytes]) -> bytes:
        """Rank 0's word by one broadcast."""
        box: list[Any] = [None]
        error: BaseException | None = None
        if self.leads:
            try:
                box = [(topic, say())]
            except BaseException as caught:  # noqa: BLE001 - the others must not wait for ever
                error, box = caught, [(topic, _Failed(str(caught)))]
        source = self._dist.get_global_rank(self._group, 0)
        self._dist.broadcast_object_list(box, src=source, group=self._group)
        if error is not None:
            raise error
        return self._same_topic(topic, box[0])

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """All words by one all-gather."""
        boxes: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(boxes, (topic, mine), group=self._group)
        return [self._same_topic(topic, box) for box in boxes]

    @staticmethod
    def _same_topic(topic: str, box: tuple[str, Any]) -> bytes:
        found, word = box
        if found != topic:
            raise UsageError(
                f"the ranks are not at the same call: one is at {topic!r}, another at {found!r}",
                hint="every rank must make the same calls of save and restore, in the same order",
            )
        if isinstance(word, _Failed):
            raise DeadlineError(f"rank 0 failed at {topic!r}: {word.message}")
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


class KeyedRanks(Ranks):
    """Ranks that know each other by a key that is the same on all and new at each start."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        words: Words,
        environment: Environment,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        super().__init__(rank, world_size)
        self._words = words
        self._environment = environment
        self._deadline_seconds = deadline_seconds

    def broadcast(self, topic: str, say: Callable[[], bytes]) -> bytes:
        """Rank 0 leaves its word; the others look for it with growing patience."""
        if self.leads:
            try:
                word = say()
            except BaseException as error:
                self._words.put(topic, 0, b"!" + str(error).encode()[:2000])
                raise
            self._words.put(topic, 0, b"=" + word)
            return word
        return self._opened(topic, self._wait(topic, [0])[0])

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """Each leaves its word and looks for all."""
        self._words.put(topic, self.rank, b"=" + mine)
        return [self._opened(topic, word) for word in self._wait(topic, range(self.world_size))]

    @staticmethod
    def _opened(topic: str, word: bytes) -> bytes:
        if word[:1] == b"!":
            raise DeadlineError(f"rank 0 failed at {topic!r}: {word[1:].decode(errors='replace')}")
        return word[1:]

    def _wait(self, topic: str, ranks: Sequence[int]) -> list[bytes]:
        found: dict[int, bytes] = {}
        wait = Backoff(self._environment, self._deadline_seconds)
        while True:
            for rank in ranks:
                if rank not in found and (word := self._words.get(topic, rank)) is not None:
                    found[rank] = word
            missing = [rank for rank in ranks if rank not in found]
            if not missing:
                return [found[rank] for rank in ranks]
            if not wait.pause():
                raise DeadlineError(
                    f"{show_ranks(missing)} said nothing about {topic!r} in {self._deadline_seconds:g} s",
                    hint="look at the logs of these ranks; every rank must make the same calls",
                )


class Backoff:
    """Growing, jittered pauses until a deadline."""

    def __init__(self, environment: Environment, seconds: float) -> None:
        self._environment = environment
        self._end = environment.monotonic() + seconds
        self._next = 0.002

    def pause(self) -> bool:
        """Sleeps a little; False when the deadline has passed."""
        left = self._end - self._environment.monotonic()
        if left <= 0:
            return False
        jitter = 0.5 + int.from_bytes(self._environment.random_bytes(2), "big") / 65536
        self._environment.sleep(min(self._next * jitter, left))
        self._next = min(self._next * 1.6, 1.0)
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
