"""The loaders of a training: their positions in the data, on as many ranks as then or on others."""

from __future__ import annotations

from typing import Any

from ckptstore.errors import UsageError
from ckptstore.model.targets import LOAD
from ckptstore.shards import PerRank
from ckptstore.torch.components import Named, is_absent, named
from ckptstore.torch.loader import ResumableLoader, position_source
from ckptstore.torch.sampler import ResumableSampler


class Positions:
    """What a checkpoint holds of the loaders, and how they come back.

    A loader that counts in global samples (ours do) has one position for all ranks. Any other is asked on
    every rank, and every rank keeps what it said.

    Attributes:
        loaders: the objects whose ``state_dict`` is the position, by name.
        has_workers: some loader has worker processes.
    """

    def __init__(self, given: Any) -> None:
        loaders: Named[Any] = named("loader", given)
        sources = {name: position_source(part, loaders.label(name)) for name, part in loaders.parts.items()}
        self.loaders = Named("loader", sources, loaders.single)
        self.has_workers = any(getattr(part, "num_workers", 0) for part in loaders.parts.values())

    def place(self, rank: int, world_size: int, mesh: dict[str, Any] | None) -> dict[str, Any]:
        """What a position is taken in; rank and number are the data-parallel ones if a loader says so."""
        sampler = next((part for part in self.loaders.parts.values() if hasattr(part, "world_size")), None)
        return {
            "rank": getattr(sampler, "rank", rank),
            "world_size": getattr(sampler, "world_size", world_size),
            "mesh": mesh,
        }

    def capture(self, place: dict[str, Any]) -> dict[str, Any]:
        """The tree of all positions."""
        return {"state": self.loaders.tree(lambda _, part: _state_of(part)), "place": PerRank(place)}

    def targets(self) -> dict[str, Any]:
        """Everything that was saved of these loaders."""
        return {"state": self.loaders.tree(lambda _label, _part: LOAD), "place": LOAD}

    def check_skip(self, samples: int) -> None:
        """That so many global samples can be skipped.

        Raises:
            UsageError: they cannot; the message says what would do.
        """
        if samples < 0:
            raise UsageError(f"skip_samples={samples} must not be negative")
        if samples == 0:
            return
        if not self.loaders:
            raise UsageError(
                "skip_samples= needs a loader, and this TrainState has none", hint="give loader="
            )
        for name, loader in self.loaders.parts.items():
            if not callable(getattr(loader, "skip", None)):
                raise UsageError(
                    f"skip_samples= needs a loader with skip(samples); {self.loaders.label(name)} "
                    f"({type(loader).__name__}) has none",
                    hint="use ckptstore.torch.ResumableLoader or ResumableSampler",
                )

    def install(self, tree: Any, skip_samples: int, place: dict[str, Any], borrowed: int | None) -> list[str]:
        """Tells the loaders where to go on.

        Args:
            tree: loaded; LOAD where there is nothing.
            place: see :meth:`place`, of this process.
            borrowed: the rank whose positions these are, if not this one's.

        Returns:
            Notes on what is not as it was.
        """
        notes: list[str] = []
        if not is_absent(tree):
            saved_place = tree.get("place", LOAD)
            for name, loader, state in self.loaders.present(tree.get("state", LOAD)):
                loader.load_state_dict(state)
                if not is_absent(saved_place):
                    note = self._moved(self.loaders.label(name), loader, state, saved_place, place, borrowed)
                    notes += [note] if note is not None else []
        if skip_samples:
            for loader in self.loaders.parts.values():
                loader.skip(skip_samples)
            notes.append(f"{skip_samples} samples are skipped")
        return notes

    def _moved(
        self,
        label: str,
        loader: Any,
        state: Any,
        then: dict[str, Any],
        now: dict[str, Any],
        borrowed: int | None,
    ) -> str | None:
        """What has become of a position that was taken in another topology; None in the same."""
        if counts_globally(loader):
            # It means the same on any number of ranks and in any mesh.
            if then["world_size"] == now["world_size"]:
                return None
            sizes = f"{then['world_size']} ranks then, {now['world_size']} now"
            if isinstance(loader, ResumableSampler | ResumableLoader):
                sizes += f"; global batch {state['global_batch']} then, {loader.global_batch} now"
            return f"{label} goes on at global sample {loader.global_position} ({sizes})"
        changed = [key for key in ("world_size", "mesh") if then[key] != now[key]]
        if not changed:
            return None
        changes = ", ".join(f"{key} {then[key]} then, {now[key]} now" for key in changed)
        whose = f", and this rank goes on from rank {borrowed}'s" if borrowed is not None else ""
        return (
            f"the data position of {label} was saved in another topology ({changes}){whose}: "
            "samples may come twice or never"
        )


def counts_globally(loader: Any) -> bool:
    """Whether its position is in samples of the whole training, so that any rank's is all ranks'."""
    return hasattr(loader, "global_position")


def _state_of(loader: Any) -> Any:
    state = loader.state_dict()
    return state if counts_globally(loader) else PerRank(state)
