"""What the ranks of one attempt tell each other, as objects under ``parts/<attempt>/``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from ckptstore.errors import (
    CkptstoreError,
    DocumentError,
    ObjectExistsError,
    ObjectNotFoundError,
    SaveFailedError,
)
from ckptstore.model.documents import Fields, seal, unseal
from ckptstore.model.ids import DIGEST_BYTES, Attempt, digest_of
from ckptstore.model.layout import Layout
from ckptstore.pool import Pool, default_threads
from ckptstore.save.agree import Agreement
from ckptstore.save.known import Known
from ckptstore.save.parts import (
    Part,
    Start,
    decode_part,
    decode_start,
    encode_part,
    encode_start,
    error_of,
)
from ckptstore.tier import layout
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

_MAX_PLAN_BYTES = 1 << 30
ENDED = "others had given it up"
"""Why a rank has no part of an attempt that it found ended."""

TOLD_LATE = "it was told only now that its save before had failed"
"""Why a rank has no part of an attempt: its training heard of a failure that others had heard of before."""

_ALONE = 4
"""From more documents than this on, several threads read them."""


class Room:
    """One attempt's room; every document in it is written once, by one rank.

    Attributes:
        parts: rank -> its part, as far as :meth:`look` has found them.
        holdings: rank -> what it holds, likewise.
        may_differ: names of tensors of the holdings that may differ between ranks.
    """

    def __init__(self, tier: Tier, attempt: Attempt, known: Known | None = None) -> None:
        """Enters the room.

        Args:
            known: what parts may rest on, of rank 0's :class:`~ckptstore.save.merge.Merger`.
        """
        self._tier = tier
        self._known = known or Known()
        self._attempt = attempt
        self._name = str(attempt)
        self._seen: set[str] = set()
        self.parts: dict[int, Part] = {}
        self.holdings: dict[int, Layout] = {}
        self.may_differ: set[str] = set()

    def look(self) -> None:
        """Reads what has come since the last look.

        Raises:
            DocumentError: something there is no part.
        """
        prefix = layout.part_prefix(self._name)
        keys = [info.key for info in self._tier.listing(prefix) if info.key not in self._seen]
        if len(keys) <= _ALONE:
            for key in keys:
                self._read(key)
            return
        with Pool(min(default_threads(self._tier.backend.capabilities.concurrency), len(keys))) as pool:
            for key in keys:
                pool.submit(self._read, key)
            pool.drain()

    def _read(self, key: str) -> None:
        name = layout.stem(key)
        kind, _, number = name.rpartition(".")
        if kind not in ("", "plan") or not (number.isascii() and number.isdigit()):
            self._seen.add(key)
            return
        data = self._tier.read(key)
        if data is None:
            return
        if kind:
            fields = Fields(unseal(data, "holding", what=key)[1], key)
            held = Layout.decode(fields.get("layout", bytes), seen=self._known.heads)
            self.holdings[int(number)] = self._known.same_layout(held)
            self.may_differ.update(fields.strings("may_differ"))
        else:
            part = decode_part(data, key, self._known)
            if part.rank != int(number):
                raise DocumentError(f"{key} is the part of rank {part.rank}")
            self.parts[part.rank] = part
        self._seen.add(key)

    # --- saying -------------------------------------------------------------------------------

    def say_start(self, start: Start) -> None:
        """Rank 0: which pins hold."""
        self._tier.put_new(layout.start_key(self._name), encode_start(start))

    def say_plan(self, agreement: Agreement) -> None:
        """Rank 0: who writes what. A bulk object, for it may be larger than any document."""
        data = agreement.encode()
        try:
            self._tier.backend.put(layout.plan_key(self._name), [digest_of(data), data], if_absent=True)
        except ObjectExistsError:
            log.info("the plan of %s was there already", self._attempt)

    def say_holding(self, rank: int, held: Layout, may_differ: Iterable[str]) -> None:
        """Any other rank, before who writes what was agreed: what it holds."""
        body = {"layout": held.encode(), "may_differ": list(may_differ)}
        self._tier.put_new(layout.holding_key(self._name, rank), seal("holding", body))

    def say_here(self, rank: int) -> None:
        """Any other rank that waits for the start: that it is at this call."""
        self.say_holding(rank, Layout((), (), 1), ())

    def say_part(self, part: Part, *, with_layout: bool = True) -> None:
        """Any rank: what it wrote, or why it could not."""
        key = layout.part_key(self._name, part.rank)
        self._tier.put_new(key, encode_part(part, with_layout=with_layout))

    def say_reached(self, failure: CkptstoreError | None) -> None:
        """Rank 0, after the commit: whether it is in all tiers that a save must reach, or why not."""
        body = {} if failure is None else {"failure": failure.message, "hint": failure.hint}
        self._tier.put_new(layout.reached_key(self._name), seal("reached", body))

    # --- hearing ------------------------------------------------------------------------------

    def start(self) -> Start | None:
        """What rank 0 announced; None when it has not yet."""
        key = layout.start_key(self._name)
        data = self._tier.read(key)
        return None if data is None else decode_start(data, key)

    def plan(self) -> Agreement | None:
        """Who writes what; None when rank 0 has not said so yet.

        Raises:
            DocumentError: it is damaged.
        """
        key = layout.plan_key(self._name)
        try:
            data = self._tier.backend.get(key, max_bytes=_MAX_PLAN_BYTES)
        except ObjectNotFoundError:
            return None
        if digest_of(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
            raise DocumentError(f"{key}: its digest does not match")
        return Agreement.decode(data[DIGEST_BYTES:])

    def heard_reached(self) -> bool:
        """Whether it is known to be in all tiers that a save must reach; False while rank 0 has said nothing.

        Raises:
            SaveFailedError: it is not there in time, as rank 0 says.
        """
        key = layout.reached_key(self._name)
        data = self._tier.read(key)
        if data is None:
            return False
        fields = Fields(unseal(data, "reached", what=key)[1], key)
        if fields.optional("failure", str) is not None:
            raise SaveFailedError(fields.get("failure", str), hint=fields.optional("hint", str))
        return True

    def clear(self) -> None:
        """Removes what rank 0 has seen and said here, once nobody can need it any more.

        Nothing is listed for it. What a rank has said too late stays, as all does if this fails: gc reaps it.
        """
        own = (layout.start_key(self._name), layout.plan_key(self._name), layout.reached_key(self._name))
        keys = sorted({*self._seen, *own})
        try:
            for result in self._tier.backend.delete(keys):
                if result.error is not None:
                    raise result.error
        except CkptstoreError as error:
            log.info("the parts of %s stay for gc to reap: %s", self._attempt, error.message)

    def reasons(self) -> str:
        """Why ranks could not do their part, as far as they could say.

        Only rank 0 can read parts whole, for they rest on what others have told it before.
        """
        errors: dict[int, str | None] = {}
        try:
            for info in self._tier.listing(layout.part_prefix(self._name)):
                name = layout.stem(info.key)
                data = self._tier.read(info.key) if name.isascii() and name.isdigit() else None
                if data is not None:
                    errors[int(name)] = error_of(data, info.key)
        except CkptstoreError as error:
            log.warning("the parts of %s cannot be read: %s", self._attempt, error.message)
        return reasons_of(errors)


def reasons_of(errors: Mapping[int, str | None]) -> str:
    """``rank 2: ...; rank 5: ...``, of those that failed by themselves if there are any."""
    failed = sorted((rank, error) for rank, error in errors.items() if error is not None)
    for of_others in ((ENDED, TOLD_LATE), (ENDED,)):
        failed = [(rank, error) for rank, error in failed if error not in of_others] or failed
    return "; ".join(f"rank {rank}: {error}" for rank, error in failed)


def is_only_late(error: BaseException) -> bool:
    """Whether a save has failed of nothing but the word of a failure that was told before."""
    return isinstance(error, SaveFailedError) and error.message.endswith(TOLD_LATE)
