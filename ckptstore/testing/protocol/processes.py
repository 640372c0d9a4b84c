"""Those who save, trim and read, and the network between them and the tier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeVar

from ckptstore.testing.protocol.world import World

P = TypeVar("P", bound="Process")


class Process:
    """Somebody who makes one step after another: each step is a method that returns the next one's name.

    What it remembers is in hashable attributes, all of them set by ``__init__``.

    Attributes:
        at: the next step; None when it has ended.
    """

    first: ClassVar[str]

    def __init__(self, name: str, mutations: Iterable[str] = ()) -> None:
        self.name = name
        self.without = frozenset(mutations)
        self.at: str | None = self.first

    def moves(self: P, world: World) -> Iterator[tuple[str, World, P]]:
        """(step, world, process) after each step that it can make now."""
        if self.at is not None:
            after, me = world.copy(), self.copy()
            me.at = getattr(me, self.at)(after)
            yield f"{self.name}: {self.at}", after, me

    def copy(self: P) -> P:
        """Another one that remembers the same."""
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(self.__dict__)
        return other

    def key(self) -> tuple[object, ...]:
        """Equal for processes that go on in the same way."""
        return tuple(self.__dict__.values())


class Saver(Process):
    """Pins `base`, reuses its objects if the pin survives, writes the other ones, commits, withdraws.

    Args:
        digests: what it saves, a digit each.
        known: what it remembers of the base, from long before; only "record not read again" goes by it.
        mutations: "dooms before intent", "dooms not read", "record not read again", "reuse because it
            exists", "bare keys".
    """

    first = "begin"

    def __init__(
        self,
        name: str,
        base: str,
        digests: str,
        mutations: Iterable[str] = (),
        *,
        known: Iterable[str] = (),
    ) -> None:
        super().__init__(name, mutations)
        self.base = base
        self.digests = frozenset(digests)
        self.known = frozenset(known)
        self.doomed = False
        self.named: frozenset[str] = frozenset()

    def begin(self, world: World) -> str:
        if "dooms before intent" in self.without:
            self.doomed = self.base in world.dooms
            return "announce"
        return self.announce(world)

    def announce(self, world: World) -> str:
        world.intents[self.name] = (self.base, True)
        return "read_record" if "dooms before intent" in self.without else "read_doom"

    def read_doom(self, world: World) -> str:
        self.doomed = self.base in world.dooms and "dooms not read" not in self.without
        return "read_record"

    def read_record(self, world: World) -> str:
        record = world.records[self.base]
        if "record not read again" in self.without:
            record = self.known
        if "reuse because it exists" in self.without:
            self.named = frozenset(key for key in world.objects if key[0] in self.digests)
        elif not self.doomed and not isinstance(record, str):
            self.named = frozenset(key for key in record if key[0] in self.digests)
        return self._next()

    def _next(self) -> str:
        return "put" if self.digests - {key[0] for key in self.named} else "commit"

    def put(self, world: World) -> str:
        digest = min(self.digests - {key[0] for key in self.named})
        key = digest if "bare keys" in self.without else f"{digest}.{self.name}"
        self.named |= {key}
        world.objects.add(key)
        world.sent.add(("put", key, frozenset()))
        return self._next()

    def commit(self, world: World) -> str:
        world.records.setdefault(self.name, self.named)  # create-if-absent
        world.sent.add(("commit", self.name, self.named))
        return "withdraw"

    def withdraw(self, world: World) -> None:
        world.intents.pop(self.name, None)


class Trimmer(Saver):
    """Commits the next generation of `base`, which names fewer digests; then dooms the old one.

    Args:
        mutations: besides a saver's: "trim in place".
    """

    def commit(self, world: World) -> str:
        if "trim in place" in self.without:
            return "cut"
        if len(self.named) == len(self.digests):  # else the old one is going, and a trim writes nothing new
            super().commit(world)
        return "withdraw"

    def _next(self) -> str:
        return "commit"

    def cut(self, world: World) -> str:
        record = world.records[self.base]
        if not isinstance(record, str):
            world.objects -= {key for key in record if key[0] not in self.digests}
        return "withdraw"

    def withdraw(self, world: World) -> None:
        super().withdraw(world)
        if not isinstance(world.records.get(self.name, ""), str):
            world.dooms.add(self.base)


class Reader(Process):
    """Reads `base`; whatever happens, it gets all of it or hears that it is gone."""

    first = "announce"

    def __init__(self, name: str, base: str) -> None:
        super().__init__(name)
        self.base = base
        self.left: tuple[str, ...] = ()

    def announce(self, world: World) -> str:
        world.intents[self.name] = (self.base, False)
        return "read_doom"

    def read_doom(self, world: World) -> str:
        return "withdraw" if self.base in world.dooms else "read_record"

    def read_record(self, world: World) -> str:
        record = world.records[self.base]
        self.left = () if isinstance(record, str) else tuple(sorted(record))
        return "read" if self.left else "withdraw"

    def read(self, world: World) -> str:
        if self.left[0] not in world.objects:
            world.lost = f"{self.name} holds {self.base}, and {self.left[0]} is gone"
        self.left = self.left[1:]
        return "read" if self.left else "withdraw"

    def withdraw(self, world: World) -> None:
        world.intents.pop(self.name, None)


class Network(Process):
    """Repeats, once and at any later time, one request that somebody made: a put, a delete, a commit."""

    first = "repeat"

    def moves(self, world: World) -> Iterator[tuple[str, World, Network]]:
        """See :meth:`Process.moves`."""
        for what, key, content in world.sent if self.at else ():
            after, me = world.copy(), self.copy()
            me.at = None
            if what == "put":
                after.objects.add(key)
            elif what == "delete":
                after.objects.discard(key)
            else:
                after.records.setdefault(key, content)
            yield f"{self.name}: repeats {what} {key}", after, me
