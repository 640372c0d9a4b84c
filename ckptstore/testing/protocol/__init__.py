"""The protocol of intents, dooms and records as a model small enough to look at every interleaving.

Savers, readers, collectors and a trimmer share one :class:`World`, which stands for a tier. A process makes
one step at a time; between two steps any other may run, and a process that never runs again has crashed.
:func:`search` visits every state that can be reached. Each rule of DESIGN part 8 can be taken out by naming
a mutation, and then the search has to find a loss.

    >>> start = World.of(a={"1.a", "2.a"}, z={"2.a"})
    >>> search(start, [Saver("b", "a", "13"), Collector("g", "a")]).loss is None
    True
    >>> search(start, [Saver("b", "a", "13"), Collector("g", "a", {"doom removed early"})]).loss
    "b names ['1.a'], which is gone"

Attempts are letters, digests are digits, and a key is both: ``1.a`` was written by attempt a, as in the
store. The method is that of C. Baier and J.-P. Katoen, *Principles of Model Checking* (2008), chapter 3.
"""

from __future__ import annotations

from ckptstore.testing.protocol.collector import Collector
from ckptstore.testing.protocol.processes import Network, Process, Reader, Saver, Trimmer
from ckptstore.testing.protocol.search import Found, search
from ckptstore.testing.protocol.world import World

__all__ = ["Collector", "Found", "Network", "Process", "Reader", "Saver", "Trimmer", "World", "search"]
