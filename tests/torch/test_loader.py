from __future__ import annotations

import itertools
import logging
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.shards import PerRank
from ckptstore.torch import ResumableLoader, ResumableSampler, TrainState
from ckptstore.torch.loader import position_source
from tests.torch.fake_core import save

pytestmark = pytest.mark.torch


class Numbers(Dataset):
    """Each sample is its index, and what this process drew for it."""

    def __init__(self, length=20):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, random.random(), np.random.random(), torch.rand(()).item()


class Plain(Numbers):
    def __getitem__(self, index):
        return index


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2, "prefetch_factor": 3, "multiprocessing_context": "fork"},
    {"num_workers": 2, "prefetch_factor": 3, "multiprocessing_context": "fork", "persistent_workers": True},
]
workers = pytest.mark.parametrize("options", WORKERS, ids=["0-workers", "2-workers", "2-persistent"])


def endless(loader):
    while True:
        yield from loader


def take(loader, count):
    return [batch.tolist() for batch in itertools.islice(endless(loader), count)]


@workers
@pytest.mark.parametrize("cut", [0, 1, 4, 5, 7, 10, 12])
def test_it_resumes_after_what_the_loop_received(options, cut):
    """20 samples by 4: the epoch ends at 5 and 10."""

    def make():
        return ResumableLoader(Plain(), 4, seed=2, **options)

    whole = take(make(), 15)
    assert sorted(itertools.chain(*whole[:5])) == list(range(20))
    loader = make()
    batches = endless(loader)
    for _ in range(cut):
        next(batches)
    checkpoint = save(TrainState(loader=loader))
    batches.close()
    fresh = make()
    checkpoint.restore(TrainState(loader=fresh))
    assert fresh.global_position == cut * 4
    assert take(fresh, 15 - cut) == whole[cut:]


@workers
def test_saving_in_the_loop_every_step_gives_every_position(options):
    loader = ResumableLoader(Plain(18), 4, drop_last=False, **options)
    positions = []
    for _ in range(2):
        for _ in loader:
            positions += [loader.state_dict()]
    assert [(state["epoch"], state["offset"]) for state in positions] == [
        (0, 4), (0, 8), (0, 12), (0, 16), (1, 0), (1, 4), (1, 8), (1, 12), (1, 16), (2, 0),
    ]  # fmt: skip
    assert loader.epoch == 2


@workers
def test_leaving_a_loop_early_loses_no_prepared_batch(options):
    loader = ResumableLoader(Plain(), 4, shuffle=False, **options)
    for batch in loader:
        assert batch.tolist() == [0, 1, 2, 3]
        break
    assert [batch.tolist()[0] for batch in loader] == [4, 8, 12, 16]


def test_an_infinite_loader_goes_over_the_epochs_end():
    loader = ResumableLoader(Plain(6), 4, shuffle=False, infinite=True)
    assert [batch.tolist() for batch in itertools.islice(loader, 3)] == [
        [0, 1, 2, 3],
        [4, 5, 0, 1],
        [2, 3, 4, 5],
    ]
    assert (loader.epoch, loader.global_position) == (2, 12)


def test_world_sizes_change_under_workers_and_the_global_batches_stay():
    def run(world, state, count):
        got, states = [], []
        for rank in range(world):
            loader = ResumableLoader(
                Plain(50), 12 // world, rank=rank, world_size=world, infinite=True, **WORKERS[1]
            )
            if state is not None:
                loader.load_state_dict(state)
            got.append([batch.tolist() for batch in itertools.islice(loader, count)])
            states.append(loader.state_dict())
        assert all(other == states[0] for other in states)
        return [sorted(itertools.chain(*parts)) for parts in zip(*got, strict=True)], states[0]

    expected, _ = run(1, None, 8)
    one, state = run(4, None, 3)
    two, state = run(2, state, 3)
    three, _ = run(3, state, 2)
    assert one + two + three == expected


def test_beginning_an_iteration_draws_nothing_from_the_global_state():
    before = torch.get_rng_state()
    for options in WORKERS[:2]:
        next(iter(ResumableLoader(Plain(), 4, **options)))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_draw_the_same_at_the_start_of_an_epoch():
    def make():
        return ResumableLoader(Numbers(8), 4, seed=1, **WORKERS[1])

    loader = make()
    list(loader)
    state = loader.state_dict()
    second = [torch.stack(batch[1:]) for batch in loader]
    fresh = make()
    fresh.load_state_dict(state)
    assert all(torch.equal(one, torch.stack(batch[1:])) for one, batch in zip(second, fresh, strict=True))


def test_what_belongs_to_the_loader_cannot_be_given():
    data = Plain()
    for name, value in {"sampler": RandomSampler(data), "generator": torch.Generator()}.items():
        with pytest.raises(UsageError, match=f"makes its own {name}"):
            ResumableLoader(data, 4, **{name: value})
    with pytest.raises(UsageError, match="in_order"):
        ResumableLoader(data, 4, in_order=False)

    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(UsageError, match="IterableDataset"):
        ResumableLoader(Stream(), 4)


def test_the_position_of_a_running_loop_cannot_be_changed():
    loader = ResumableLoader(Plain(), 4)
    batches = iter(loader)
    next(batches)
    loader.skip(4)
    with pytest.raises(UsageError, match="while an iteration was under way"):
        next(batches)


# --- other loaders ---------------------------------------------------------------------------------


def test_a_dataloader_is_accepted_by_its_sampler():
    data = Plain()

    def make(kind):
        if kind == "batch":
            return DataLoader(data, batch_sampler=ResumableSampler(data, batch_size=4))
        return DataLoader(data, batch_size=4, sampler=ResumableSampler(data))

    for kind in ("batch", "single"):
        whole = take(make(kind), 12)
        loader = make(kind)
        assert take(loader, 3) == whole[:3]
        checkpoint = save(TrainState(loader=loader))
        fresh = make(kind)
        checkpoint.restore(TrainState(loader=fresh))
        assert take(fresh, 9) == whole[3:]


def test_a_plain_dataloader_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"cannot say where it stands.*ResumableLoader.*ResumableSampler"):
        TrainState(loader=DataLoader(Plain(), batch_size=2, shuffle=True))
    with pytest.raises(UsageError, match=r"loader\.eval \(list\) has no state_dict.*ResumableSampler"):
        TrainState(loader={"train": ResumableLoader(Plain()), "eval": [1, 2]})


def test_a_sampler_behind_workers_is_refused_because_it_runs_ahead():
    data = Plain(100)
    sampler = ResumableSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(UsageError, match=r"has workers, which read ahead.*ResumableLoader"):
        TrainState(loader=loader)
    state = TrainState(loader=sampler)  # nothing shows the workers yet
    batches = iter(loader)
    next(batches)
    assert sampler.offset > 2
    with pytest.raises(UsageError, match="read ahead of the training"):
        state.capture_state(1)
    batches = iter(loader)
    sampler.load_state_dict(ResumableSampler(data).state_dict())
    state.capture_state(1)


def test_a_loader_that_iterates_in_its_own_way_is_refused():
    class Ahead(DataLoader):
        def __iter__(self):
            batches = super().__iter__()
            following = next(batches)
            for batch in batches:
                yield following
                following = batch
            yield following

    data = Plain()
    with pytest.raises(UsageError, match=r"Ahead\) iterates in a way of its own"):
        TrainState(loader=Ahead(data, sampler=ResumableSampler(data)))


class Foreign:
    """A loader of another library."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_any_loader_with_state_dict_is_asked_itself():
    loader = Foreign()
    loader.at = 7
    checkpoint = save(TrainState(loader=loader))
    fresh = Foreign()
    assert checkpoint.restore(TrainState(loader=fresh)) == []
    assert fresh.at == 7


def test_a_users_own_sampler_with_state_dict_is_used():
    class Own(Foreign, Sampler):
        def __iter__(self):
            yield from range(self.at, 10)

        def __len__(self):
            return 10

    sampler = Own()
    assert position_source(DataLoader(Plain(), sampler=sampler)) is sampler


def test_a_dataloader_gets_a_generator_of_its_own_so_that_resuming_draws_nothing_more():
    loader = DataLoader(Plain(), sampler=ResumableSampler(20))
    TrainState(loader=loader)
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)
    own = torch.Generator()
    loader = DataLoader(Plain(), sampler=ResumableSampler(20), generator=own)
    TrainState(loader=loader)
    assert loader.generator is own


def test_a_stateful_loader_that_shuffles_with_the_global_state_is_warned_about(caplog):
    class Stateful(Foreign, DataLoader):
        def __init__(self):
            DataLoader.__init__(self, TensorDataset(torch.arange(3)), shuffle=True)
            self.at = 0

    with caplog.at_level(logging.WARNING):
        TrainState(loader=Stateful())
    assert "shuffles with the global random state" in caplog.text


def test_c169_the_topology_is_recorded_and_a_mismatch_is_warned_of(monkeypatch, caplog):
    state = TrainState(loader=Foreign())
    state.set_place(3, 4)
    tree, _ = state.capture_state(1)
    assert tree["loader"] == {
        "state": PerRank({"at": 0}),
        "place": PerRank({"rank": 3, "world_size": 4, "mesh": None}),
    }
    checkpoint = save(TrainState(loader=Foreign()))
    state = TrainState(loader=Foreign(), rng="keep")
    state.set_place(1, 8)
    notes = checkpoint.restore(state)
    assert "loader was saved in another topology (world_size 1 then, 8 now)" in notes[0]
    assert "this rank goes on from rank 0's: samples may come twice or never" in notes[0]
    assert "random states of 1 ranks were saved, here are 8: those of this process stay" in notes[1]
    assert all(note in caplog.text for note in notes)
    state = TrainState(loader=Foreign())
    monkeypatch.setattr(state, "_mesh", lambda: {"shape": (2, 4), "names": ("dp", "tp")})
    assert "mesh None then" in checkpoint.restore(state)[0]


def test_c169_a_position_in_global_samples_fits_any_world_size():
    loader = ResumableLoader(Plain(), 2, rank=1, world_size=4)
    take(loader, 1)
    checkpoint = save(TrainState(loader=loader))
    assert checkpoint.values()["loader"]["place"] == {"rank": 1, "world_size": 4, "mesh": None}
    fresh = ResumableLoader(Plain(), 4, rank=0, world_size=2)
    assert checkpoint.restore(TrainState(loader=fresh)) == [
        "loader goes on at global sample 8 (4 ranks then, 2 now; global batch 8 then, 8 now)"
    ]
    assert fresh.global_position == 8


def test_several_loaders_are_kept_apart():
    loaders = {"text": ResumableLoader(Plain(), 4), "image": ResumableLoader(Plain(), 5)}
    take(loaders["text"], 2)
    take(loaders["image"], 1)
    checkpoint = save(TrainState(loader=loaders))
    fresh = {"text": ResumableLoader(Plain(), 4), "image": ResumableLoader(Plain(), 5)}
    checkpoint.restore(TrainState(loader=fresh))
    assert [loader.global_position for loader in fresh.values()] == [8, 5]


def test_another_dataset_is_refused_before_anything_changes():
    model = torch.nn.Linear(1, 1)
    checkpoint = save(TrainState(model=model, loader=ResumableLoader(Plain(20), 4)))
    with pytest.raises(StateMismatchError, match="loader: length was 20, here it is 21"):
        checkpoint.restore(TrainState(model=model, loader=ResumableLoader(Plain(21), 4)))


# --- skipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loader", "dataloader", "sampler"])
def test_skip_samples_passes_over_the_bad_ones(kind):
    data = Plain()

    def make():
        if kind == "loader":
            return ResumableLoader(data, 4)
        sampler = ResumableSampler(data, batch_size=4)
        return sampler if kind == "sampler" else DataLoader(data, batch_sampler=sampler)

    def batches(loader, count):
        if kind == "sampler":
            return list(itertools.islice(endless(loader), count))
        return take(loader, count)

    whole = batches(make(), 12)
    loader = make()
    batches(loader, 3)
    checkpoint = save(TrainState(loader=loader))
    fresh = make()
    notes = checkpoint.restore(TrainState(loader=fresh), skip_samples=16)
    assert notes == ["16 samples are skipped"]
    assert batches(fresh, 5) == whole[7:]


def test_skip_samples_without_a_loader_that_can_is_refused_before_anything_changes():
    loader = Foreign()
    checkpoint = save(TrainState(loader=loader))
    loader.at = 3
    state = TrainState(loader=loader)
    for call in (
        lambda: checkpoint.restore(state, skip_samples=4),
        lambda: state.install(checkpoint.values(), skip_samples=4),
    ):
        with pytest.raises(UsageError, match=r"loader \(Foreign\) has none.*ResumableSampler"):
            call()
    with pytest.raises(UsageError, match="has none"):
        checkpoint.restore(TrainState(), skip_samples=4)
    with pytest.raises(UsageError, match="must not be negative"):
        checkpoint.restore(state, skip_samples=-1)
    assert loader.at == 3
