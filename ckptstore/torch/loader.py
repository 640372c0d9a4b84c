"""Data loaders and their position: which ones can be saved, and one that always can."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from ckptstore.errors import UsageError
from ckptstore.torch.permutation import derive
from ckptstore.torch.sampler import ResumableSampler

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OURS: Final = ("batch_sampler", "generator", "sampler")
_REMEDY: Final = (
    "use ckptstore.torch.ResumableLoader(dataset, batch_size, num_workers=...) in place of DataLoader, or "
    "without workers DataLoader(dataset, batch_sampler=ckptstore.torch.ResumableSampler(dataset, ...))"
)


class ResumableLoader(DataLoader[T]):
    """A `DataLoader` whose position is what the training loop has received.

    Batches that workers have prepared and the loop has not taken yet do not count, however many there
    are. Each ``for`` goes on at the position and ends with the epoch. Beginning an iteration draws nothing
    from the global random state, so a resumed training draws what it would have drawn.

    Workers are seeded anew at each beginning from seed, epoch and rank: equal at the start of an epoch,
    but a worker that is resumed within one has not made the draws of those before it. Random
    augmentation in workers that must be exact takes its randomness from the index of the sample.

    Args:
        dataset: with a length and random access; an `IterableDataset` has no order to resume.
        batch_size: samples per rank and batch.
        seed, shuffle, drop_last, infinite, rank, world_size: see
            :class:`~ckptstore.torch.ResumableSampler`.
        options: anything else that `DataLoader` takes.

    Raises:
        UsageError: an argument cannot be used.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        infinite: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                "an IterableDataset has no order that could be resumed by position",
                hint="use a dataset with __getitem__ and __len__, or a loader of its own with state_dict",
            )
        for name in _OURS:
            if options.get(name) is not None:
                raise UsageError(f"ResumableLoader makes its own {name}", hint=f"leave {name}= out")
        if options.get("in_order") is False:
            raise UsageError("in_order=False: the order of batches could not be resumed")
        self._resumable = ResumableSampler(
            dataset,  # type: ignore[arg-type]  # a map-style Dataset is Sized; torch does not say so
            seed=seed,
            shuffle=shuffle,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            infinite=infinite,
        )
        self._resumable._attached = True
        super().__init__(dataset, batch_sampler=self._resumable, **options)
        # Its own, or beginning an iteration would draw from the global one: a resumed training begins
        # one more than a training that was never interrupted.
        self.generator = torch.Generator()

    @property
    def global_position(self) -> int:
        """Global samples that the loop has received since the start."""
        return self._resumable.global_position

    @property
    def rank(self) -> int:
        """This process among the data-parallel ranks."""
        return self._resumable.rank

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._resumable.world_size

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together take at a time."""
        return self._resumable.global_batch

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._resumable.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator type
        """Goes on at the position; see the class."""
        return self._count(self._resumable)

    def _count(self, sampler: ResumableSampler) -> Iterator[Any]:
        generation = sampler._generation
        epoch, offset = sampler._normal(sampler._epoch, sampler._offset)
        self.generator.manual_seed(derive(sampler.seed, epoch, sampler.rank) >> 1)
        size = sampler.batch_size or 1
        left = None if sampler.infinite else sampler._items_left(offset)
        for batch in super().__iter__():
            if generation != sampler._generation:
                raise UsageError(
                    "the data position was changed while an iteration was under way",
                    hint="restore or skip before the loop, or begin a new one",
                )
            items = size if left is None else min(size, left)
            left = None if left is None else left - items
            epoch, offset = sampler._after(epoch, offset, items)
            sampler._epoch, sampler._offset = epoch, offset
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop; see :class:`~ckptstore.torch.ResumableSampler`."""
        return self._resumable.state_dict()

    def state_problems(self, state: Any) -> list[str]:
        """Why a saved position cannot be taken up here, one line each; empty if it can."""
        return self._resumable.state_problems(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position; the next ``for`` begins there.

        Raises:
            StateMismatchError: it is a position in another order; this loader is unchanged.
        """
        self._resumable.load_state_dict(state)

    def skip(self, samples: int) -> None:
        """Goes on as if the next `samples` global samples had been trained on."""
        self._resumable.skip(samples)


def is_stateful(value: Any) -> bool:
    """Whether a value has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def position_source(loader: Any, label: str = "loader") -> Any:
    """The object whose `state_dict` is the position of a loader: itself, or its sampler.

    A `DataLoader` that draws its workers' seed from the global random state is given a generator of its
    own: a resumed training begins one more iteration, and would draw differently ever after.

    Raises:
        UsageError: nothing there knows the position, or it runs ahead of the training; with the remedy.
    """
    if isinstance(loader, DataLoader) and loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    if is_stateful(loader):
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            logger.warning(
                "%s shuffles with the global random state, from which a resumed training draws once more: "
                "give it generator=torch.Generator()",
                label,
            )
        return loader
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise UsageError(f"{label} ({name}) has no state_dict and load_state_dict", hint=_REMEDY)
    inner = (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    source = next((candidate for candidate in inner if is_stateful(candidate)), None)
    if source is None:
        raise UsageError(f"{label} ({name}) cannot say where it stands in the data", hint=_REMEDY)
    if loader.num_workers > 0:
        raise UsageError(
            f"{label} ({name}) has workers, which read ahead of the training: its sampler cannot say what "
            "has been trained on",
            hint=_REMEDY,
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{label} ({name}) iterates in a way of its own and may read ahead: its sampler cannot say what "
            "has been trained on",
            hint="give the loader state_dict and load_state_dict, or pass an object that counts as loader=",
        )
    return source
