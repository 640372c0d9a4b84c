"""What the coordinator of a session keeps of its ranks' parts, so that they need not say it again."""

from __future__ import annotations

from collections.abc import Iterable

from ckptstore.model.heads import Heads
from ckptstore.model.ids import Digest
from ckptstore.model.layout import Layout


class Known:
    """Layouts by digest, and whatever else of thousands of parts is equal, once.

    Attributes:
        heads: of the layouts, by their bytes: see :meth:`Layout.decode`.
    """

    def __init__(self) -> None:
        self.heads: dict[bytes, Heads] = {}
        self._layouts: dict[Digest, Layout] = {}
        self._trees: dict[bytes, bytes] = {}

    def layout(self, digest: Digest) -> Layout | None:
        """The layout of that digest, if it has been seen."""
        return self._layouts.get(digest)

    def same_layout(self, layout: Layout) -> Layout:
        """The layout first seen that is equal to this one."""
        return self._layouts.setdefault(layout.digest, layout)

    def same_tree(self, tree: bytes) -> bytes:
        """The packed tree first seen since the last :meth:`keep` that is equal to this one."""
        return self._trees.setdefault(tree, tree)

    def keep(self, layouts: Iterable[Layout]) -> None:
        """Forgets what is not in these."""
        self._layouts = {layout.digest: layout for layout in layouts}
        used = {id(layout.heads) for layout in self._layouts.values()}
        self.heads = {key: heads for key, heads in self.heads.items() if id(heads) in used}
        self._trees = {}
