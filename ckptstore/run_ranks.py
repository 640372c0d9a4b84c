"""A run on several ranks: who they are, and deciding things together."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from ckptstore import errors
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, UsageError
from ckptstore.load.host import HostShare, host_peers, this_host
from ckptstore.model.history import Entry, Facts
from ckptstore.ranks import KeyedRanks, Ranks, Solo, TorchRanks, need_session_key
from ckptstore.run_advice import RunAdvice
from ckptstore.save.options import RunOptions
from ckptstore.tier.words import TierWords

if TYPE_CHECKING:
    from ckptstore.store import Store

T = TypeVar("T")


class RunRanks(RunAdvice):
    """What the ranks of a run do together; one process alone is the simplest case."""

    def __init__(self, store: Store, name: str, options: RunOptions | None = None) -> None:
        super().__init__(store, name)
        options = options or RunOptions()
        self._options, self._saving, self._retention = options.ranks, options.saving, options.retention
        self._auto_gc = options.auto_gc
        self._found_ranks: Ranks | None = None
        self._found_in: tuple[int, int] | None = None
        self._peers: tuple[int, int] | None = None
        self._said = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Opened anew where it is unpickled: a session belongs to one process. A group cannot travel.
        ranks = dataclasses.replace(self._options, process_group=None)
        options = RunOptions(ranks, self._saving, self._retention, self._auto_gc)
        return (type(self), (self._store, self.name, options))

    @property
    def _ranks(self) -> Ranks:
        """The ranks of this run as they are now; the first use may be a collective call."""
        here = (os.getpid(), self._world())
        if self._found_ranks is None or self._found_in != here:
            self._found_ranks, self._found_in = self._find_ranks(), here
            self._said, self._peers = 0, None
        return self._found_ranks

    def _world(self) -> int:
        """Tells one initialization of torch.distributed from another; 0 where it does not count."""
        if not self._options.in_torch:
            return 0
        return id(sys.modules["torch.distributed"].group.WORLD)

    def _find_ranks(self) -> Ranks:
        options, environment = self._options, self._tier.environment
        if options.in_torch:
            dist = sys.modules["torch.distributed"]
            size = dist.get_world_size(options.process_group)
            if size < 1:
                raise UsageError(
                    f"run {self.name!r}: rank {dist.get_rank()} is not in its process_group=",
                    hint="make the calls of a run on the ranks of its group only",
                )
            if size == 1:
                return Solo()
            return TorchRanks(options.process_group, environment, options.deadline_seconds)
        if options.rank is None or options.world_size is None or options.world_size == 1:
            return Solo()
        key = need_session_key(options.session_key, options.world_size)
        words = TierWords(self._tier, self.key, key)
        return KeyedRanks(options.rank, options.world_size, key, words, environment, options.deadline_seconds)

    def _checkpoint(self, entry: Entry) -> Checkpoint:
        return Checkpoint(self._store, self._store.tier_of(entry), self.name, entry, self._place())

    def _place(self) -> tuple[int, int] | None:
        """(rank, world size) as this run was told; None where torch.distributed says. Asks no other rank."""
        options = self._options
        if options.rank is not None and options.world_size is not None:
            return options.rank, options.world_size
        if options.process_group is not None:
            dist = sys.modules["torch.distributed"]
            return dist.get_rank(options.process_group), dist.get_world_size(options.process_group)
        return None

    def _topic(self, occasion: str) -> str:
        """A topic of its own for each occasion; all ranks count alike."""
        self._said += 1
        return f"{occasion}-{self._said}"

    def _decide(self, occasion: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's decision (plain values), on every rank; an error of rank 0's is raised on all."""
        failure: list[BaseException] = []

        def say() -> bytes:
            try:
                return _packed({"decision": decide()})
            except BaseException as error:  # noqa: BLE001 - it is raised below, when the others know it
                failure.append(error)
                return _packed({"error": describe_error(error)})

        said = msgpack.unpackb(self._ranks.broadcast(self._topic(occasion), say), strict_map_key=False)
        if failure:
            raise failure[0]
        if "error" in said:
            raise revived(said["error"], "rank 0: ")
        decision: dict[str, Any] = said["decision"]
        return decision

    def _gather(self, occasion: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's plain values, by rank, on every rank."""
        return [
            msgpack.unpackb(word, strict_map_key=False)
            for word in self._ranks.gather(self._topic(occasion), _packed(mine))
        ]

    def _host_share(self, token: str) -> HostShare | None:
        """What the ranks of this host read in one restore, they read once; None where each is alone."""
        ranks, environment = self._ranks, self._tier.environment
        if ranks.world_size == 1:
            return None
        if self._peers is None:
            said = self._gather("hosts", {"host": this_host(environment)})
            self._peers = host_peers([word["host"] for word in said], ranks.rank)
        index, count = self._peers
        if count == 1:
            return None
        return HostShare(
            token,
            index,
            count,
            rank=ranks.rank,
            environment=environment,
            deadline_seconds=self._options.deadline_seconds,
        )

    def _find_together(self, occasion: str, find: Callable[[], Checkpoint]) -> Checkpoint:
        """The checkpoint that rank 0 finds."""
        found: list[Checkpoint] = []

        def decide() -> dict[str, Any]:
            found.append(find())
            return pack_entry(found[0].entry)

        decision = self._decide(occasion, decide)
        return found[0] if found else self._checkpoint(unpack_entry(decision))


def _packed(value: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def pack_entry(entry: Entry) -> dict[str, Any]:
    """A checkpoint's place and facts as plain values."""
    return dataclasses.asdict(entry)


def unpack_entry(values: dict[str, Any]) -> Entry:
    """Back from :func:`pack_entry`."""
    facts = Facts(**{**values["facts"], "tags": tuple(values["facts"]["tags"])})
    copies = tuple((tier, attempt) for tier, attempt in values["copies"])
    return Entry(**{**values, "facts": facts, "trimmed": tuple(values["trimmed"]), "copies": copies})


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as plain values, for other ranks."""
    if isinstance(error, CkptstoreError):
        return {"class": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"class": "CkptstoreError", "message": f"{type(error).__name__}: {error}", "hint": None}


def revived(description: dict[str, Any], prefix: str) -> CkptstoreError:
    """An error of the same class as another rank's."""
    found = getattr(errors, description["class"], CkptstoreError)
    cls = found if isinstance(found, type) and issubclass(found, CkptstoreError) else CkptstoreError
    error = cls.__new__(cls)
    error.__dict__.update(problems=(), key="")  # what some classes have besides
    CkptstoreError.__init__(error, prefix + description["message"], hint=description["hint"])
    return error
