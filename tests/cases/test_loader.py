"""The position in the data, through the store."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptstore
from ckptstore.errors import UsageError
from ckptstore.torch import ResumableLoader, ResumableSampler
from tests.roundtrip.made import again, fresh

SAMPLES = 48


def data():
    return TensorDataset(torch.arange(SAMPLES))


def loader(rank, world_size, seed=7):
    return ResumableLoader(data(), 2, seed=seed, rank=rank, world_size=world_size)


def numbers(batches):
    return [int(n) for (batch,) in batches for n in batch]


def take(source, count):
    batches = iter(source)
    return numbers(next(batches) for _ in range(count))


def test_c169_world_size_and_rank_are_recorded_with_the_position():
    source = loader(1, 4)
    take(source, 3)
    store = fresh()
    store.run("r").save(1, ckptstore.TrainState(loader=source)).result()
    found = again(store).run("r").latest.load("loader")["loader"]
    assert found["place"] == {0: {"rank": 1, "world_size": 4, "mesh": None}}  # by process


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_c169_another_world_size_goes_on_with_the_samples_not_yet_seen(world_size):
    seen = []
    sources = [loader(rank, 4) for rank in range(4)]
    for source in sources:
        seen += take(source, 3)
    store = fresh()
    store.run("r").save(1, ckptstore.TrainState(loader=sources[0])).result()
    for rank in range(world_size):
        other = loader(rank, world_size)
        again(store).run("r").restore(ckptstore.TrainState(loader=other))
        assert (other.global_position, other.world_size) == (24, world_size)
        seen += numbers(other)
    assert set(seen) == set(range(SAMPLES))
    if (SAMPLES - 24) % (2 * world_size) == 0:  # else the last are repeated so that all ranks have as many
        assert sorted(seen) == list(range(SAMPLES))


def test_c167_each_place_keeps_its_own_position():
    # One process's share: two loaders of one training never share a name.
    first, second = loader(0, 1, seed=1), loader(0, 1, seed=2)
    take(first, 3)
    take(second, 5)
    expected = take(first, 1), take(second, 1)
    store = fresh()
    made = {"text": loader(0, 1, seed=1), "images": loader(0, 1, seed=2)}
    take(made["text"], 3)
    take(made["images"], 5)
    store.run("r").save(1, ckptstore.TrainState(loader=made)).result()
    others = {"text": loader(0, 1, seed=1), "images": loader(0, 1, seed=2)}
    again(store).run("r").restore(ckptstore.TrainState(loader=others))
    assert (take(others["text"], 1), take(others["images"], 1)) == expected


def test_a_loader_that_cannot_say_where_it_stands_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match="cannot say where it stands") as caught:
        ckptstore.TrainState(loader=DataLoader(data(), shuffle=True))
    assert "ResumableLoader" in caught.value.hint


def test_going_back_can_skip_the_bad_batches():
    source = loader(0, 1)
    state = ckptstore.TrainState(loader=source)
    store = fresh()
    run = store.run("r")
    order = numbers(loader(0, 1))
    take(source, 4)
    run.save(4, state).result()
    other = loader(0, 1)
    assert again(store).run("r").restore(ckptstore.TrainState(loader=other), skip_samples=6) == 4
    assert numbers(other) == order[8 + 6 :]


def test_a_sampler_alone_is_a_position_too():
    sampler = ResumableSampler(data(), seed=3, batch_size=2)
    plain = DataLoader(data(), batch_sampler=sampler)
    order = numbers(DataLoader(data(), batch_sampler=ResumableSampler(data(), seed=3, batch_size=2)))
    assert take(plain, 5) == order[:10]
    store = fresh()
    store.run("r").save(1, ckptstore.TrainState(loader=plain)).result()
    other = DataLoader(data(), batch_sampler=ResumableSampler(data(), seed=3, batch_size=2))
    again(store).run("r").restore(ckptstore.TrainState(loader=other))
    assert numbers(other) == order[10:]
