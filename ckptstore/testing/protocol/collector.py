"""A round of garbage collection."""

from __future__ import annotations

from collections.abc import Iterable

from ckptstore.testing.protocol.processes import Process
from ckptstore.testing.protocol.world import Record, World

Seen = tuple[tuple[str, Record], ...]


class Collector(Process):
    """Dooms, looks again, plans, makes GONE, deletes, tidies.

    Args:
        targets: attempts to go; dooms and plans of others are taken up besides.
        order: the order in which its listing comes to the attempts, one a step; if empty the listing is
            one step.
        strays: also deletes objects of attempts that read VOID or GONE, fences every silent saver and reaps
            intents: a full round.
        patient: takes nobody for silent; else every saver, at any time.
        alone: takes readers for silent, too.
        mutations: "intents not listed again", "records before intents", "one look", "time alone", "only
            owners fenced", "no look after the fence", "pins not asked for", "shared objects not asked for",
            "objects before GONE", "doom removed early", "doom taken back", "VOID removed", "GONE removed",
            "guard not asked again", "strays without an end".
    """

    first = "begin"

    def __init__(
        self,
        name: str,
        targets: str = "",
        mutations: Iterable[str] = (),
        *,
        order: str = "",
        strays: bool = False,
        patient: bool = False,
        alone: bool = False,
    ) -> None:
        super().__init__(name, mutations)
        self.targets = targets
        self.order = order
        self.strays, self.patient, self.alone = strays, patient, alone
        self.plans: frozenset[str] = frozenset()
        self.unfinished: frozenset[str] = frozenset()
        self.intents: tuple[tuple[str, tuple[str, bool]], ...] = ()
        self.dooms: frozenset[str] = frozenset()
        self.before: Seen | None = None
        self.seen: Seen = ()
        self.left = order
        self.then = "doom"
        self.fenced: frozenset[str] = frozenset()
        self.must_look = False
        self.going: tuple[str, ...] = ()
        self.garbage: tuple[str, ...] = ()
        self.tidied = self.reaped = ""

    def begin(self, world: World) -> str:
        self.plans = frozenset(world.plans)
        self.unfinished = frozenset(key for keys in world.plans.values() for key in keys)
        if "intents not listed again" in self.without:
            self.intents = tuple(sorted(world.intents.items()))
        return "list_records"

    def list_records(self, world: World) -> str:
        """Once before the dooms and at least once after the intents."""
        if not self.order:
            self.seen = tuple(sorted(world.records.items()))
            return self.then
        attempt, self.left = self.left[0], self.left[1:]
        if attempt in world.records:
            self.seen = (*self.seen, (attempt, world.records[attempt]))
        if self.left:
            return "list_records"
        self.left = self.order
        return self.then

    def _look_again(self, then: str) -> str:
        self.before, self.seen, self.then = self.seen, (), then
        return "list_records"

    def doom(self, world: World) -> str:
        target, self.targets = self.targets[:1], self.targets[1:]
        others = {a for a, r in self.seen if not isinstance(r, str)} - world.dooms
        if target in others and len(others) > 1:
            world.dooms.add(target)
        return "doom" if self.targets else "list_dooms"

    def list_dooms(self, world: World) -> str:
        self.dooms = frozenset(world.dooms)
        if "intents not listed again" in self.without:
            return self._look_again("fence")
        if "records before intents" in self.without:
            return self._look_again("list_intents")
        return "list_intents"

    def list_intents(self, world: World) -> str:
        self.intents = tuple(sorted(world.intents.items()))
        return "fence" if "records before intents" in self.without else self._look_again("fence")

    def fence(self, world: World) -> str:
        seen = dict(self.seen)
        for attempt, (pin, is_saver) in () if self.patient else self.intents:
            needed = self.strays or (pin in self.dooms and not isinstance(seen.get(pin, ""), str))
            if not is_saver or not needed or attempt in seen or attempt in self.fenced:
                continue
            owns = any(key.endswith(f".{attempt}") for key in world.objects)
            if "time alone" in self.without or ("only owners fenced" in self.without and not owns):
                self._forget(attempt)
                continue
            world.records.setdefault(attempt, "VOID")
            self.fenced |= {attempt}
            self.must_look = True
            return "fence"
        if self.must_look and "no look after the fence" in self.without:
            for attempt in self.fenced:
                self._forget(attempt)
        elif self.must_look:
            self.must_look = False
            return self._look_again("fence")
        return self._judge(world)

    def _forget(self, attempt: str) -> None:
        self.intents = tuple(one for one in self.intents if one[0] != attempt)

    def _judge(self, world: World) -> str:
        seen, before = dict(self.seen), dict(self.before or ())
        ended = any(isinstance(r, str) and not isinstance(before.get(a), str) for a, r in seen.items())
        if ended and "one look" not in self.without and "no look after the fence" not in self.without:
            return self._look_again("fence")
        live = {a: r for a, r in seen.items() if not isinstance(r, str)}
        pinned = {
            pin
            for a, (pin, is_saver) in self.intents
            if (a not in seen if is_saver else not self.alone) and "pins not asked for" not in self.without
        }
        if "doom taken back" in self.without:
            world.dooms -= pinned
        going = (self.dooms & live.keys()) - pinned
        garbage = set(self.unfinished).union(*(live[a] for a in going))
        if self.strays:
            without_end = "strays without an end" in self.without
            garbage |= {
                key
                for key in world.objects
                if (key[2:] not in live if without_end else isinstance(seen.get(key[2:], live), str))
            }
        if "shared objects not asked for" not in self.without:
            garbage -= {key for a, keys in live.items() if a not in going for key in keys}
        self.going, self.garbage = tuple(sorted(going)), tuple(sorted(garbage))
        self.tidied = "".join(sorted(self.dooms))
        decided = {a for a, (_, is_saver) in self.intents if (a in seen if is_saver else self.alone)}
        self.reaped = "".join(sorted(decided)) if self.strays else ""
        # What does not matter any more is forgotten, so that states come together again.
        self.before, self.seen, self.intents = None, (), ()
        self.dooms = self.unfinished = self.fenced = frozenset()
        return "plan" if going or garbage else "tidy"

    def plan(self, world: World) -> str:
        world.plans[self.name] = frozenset(self.garbage)
        if "doom removed early" in self.without:
            world.dooms -= set(self.going)
        return self._next("delete" if "objects before GONE" in self.without else "make_gone")

    def _next(self, first: str) -> str:
        if self.going and (first == "make_gone" or not self.garbage):
            return "make_gone"
        return "delete" if self.garbage else "tidy"

    def make_gone(self, world: World) -> str:
        attempt, self.going = self.going[0], self.going[1:]
        others = world.live().keys() - world.dooms - {attempt}
        if others or "guard not asked again" in self.without:
            world.records[attempt] = "GONE"
            if "GONE removed" in self.without:
                del world.records[attempt]
        else:
            kept = world.live().get(attempt, frozenset())
            self.garbage = tuple(key for key in self.garbage if key not in kept)
        return self._next("make_gone")

    def delete(self, world: World) -> str:
        key, self.garbage = self.garbage[0], self.garbage[1:]
        world.objects.discard(key)
        world.sent.add(("delete", key, frozenset()))
        return self._next("delete")

    def tidy(self, world: World) -> str | None:
        for attempt in self.tidied:
            if world.records.get(attempt, "GONE") == "GONE":
                world.dooms.discard(attempt)
        for attempt in self.reaped:
            world.intents.pop(attempt, None)
        if "VOID removed" in self.without:
            world.records = {a: r for a, r in world.records.items() if r != "VOID"}
        for plan in (self.name, *self.plans):
            world.plans.pop(plan, None)
        return None
