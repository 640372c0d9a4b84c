from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.torch import ResumableSampler

pytestmark = pytest.mark.torch


def take(sampler, count):
    return list(itertools.islice(iter(sampler), count))


def resumed(sampler, **other):
    options = {"seed": sampler.seed, "shuffle": sampler.shuffle, "batch_size": sampler.batch_size}
    options |= {"drop_last": sampler.drop_last, "infinite": sampler.infinite} | other
    fresh = ResumableSampler(sampler.length, **options)
    fresh.load_state_dict(pickle.loads(pickle.dumps(sampler.state_dict())))
    return fresh


def epochs(sampler, count):
    return [list(sampler) for _ in range(count)]


def test_an_epoch_has_every_sample_once_and_each_its_own_order():
    one, two, three = epochs(ResumableSampler(100, seed=1), 3)
    assert sorted(one) == sorted(two) == sorted(three) == list(range(100))
    assert one != two != three
    assert epochs(ResumableSampler(100, seed=1), 3) == [one, two, three]
    assert list(ResumableSampler(100, seed=2)) != one


def test_without_shuffling_samples_come_in_order():
    assert epochs(ResumableSampler(4, shuffle=False), 2) == [[0, 1, 2, 3]] * 2
    assert list(ResumableSampler(5, shuffle=False, batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert list(ResumableSampler(5, shuffle=False, batch_size=2, drop_last=True)) == [[0, 1], [2, 3]]
    assert take(ResumableSampler(3, shuffle=False, batch_size=2, infinite=True), 3) == [
        [0, 1],
        [2, 0],
        [1, 2],
    ]


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
@settings(deadline=None, max_examples=30)
@given(data=st.data(), length=st.integers(6, 40), world_size=st.integers(1, 2))
def test_it_goes_on_exactly_from_any_point(data, length, world_size, batch_size, drop_last, infinite):
    options = {"batch_size": batch_size, "drop_last": drop_last, "infinite": infinite}
    options |= {"world_size": world_size, "rank": world_size - 1, "seed": 5}
    # A whole training, in one go: (epoch, item) as a user's loop sees them.
    sampler = ResumableSampler(length, **options)
    whole = []
    for _ in range(1 if infinite else 3):
        whole += take(sampler, 30 if infinite else None)
    cut = data.draw(st.integers(0, len(whole) - 1))
    first = ResumableSampler(length, **options)
    seen = []
    while len(seen) < cut:
        seen += take(first, cut - len(seen))
    assert seen == whole[:cut]
    second = resumed(first, world_size=world_size, rank=world_size - 1)
    rest = []
    while len(rest) < len(whole) - cut:
        rest += take(second, len(whole) - cut - len(rest))
    assert rest == whole[cut:]


def test_after_the_last_sample_the_position_is_the_next_epoch():
    sampler = ResumableSampler(6, batch_size=2)
    order = iter(sampler)
    next(order), next(order)
    assert (sampler.epoch, sampler.offset, sampler.global_position) == (0, 4, 4)
    next(order)
    assert (sampler.epoch, sampler.offset, sampler.global_position) == (1, 0, 6)
    assert len(list(resumed(sampler))) == 3
    with pytest.raises(StopIteration):
        next(order)


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_world_size_4_to_2_to_3_keeps_the_global_batches(infinite, drop_last, batched):
    """Global batch 12 all along; 100 samples, so the epoch's end is uneven."""

    def ranks(world, state):
        made = []
        for rank in range(world):
            sampler = ResumableSampler(
                100,
                seed=3,
                batch_size=12 // world if batched else None,
                rank=rank,
                world_size=world,
                infinite=infinite,
                drop_last=drop_last,
            )
            if state is not None:
                sampler.load_state_dict(state)
            made.append(sampler)
        return made

    def global_batches(samplers, count):
        """`count` global batches, each as the set of what all ranks got (their order is by rank)."""
        iterators = [iter(sampler) for sampler in samplers]
        batches = []
        for _ in range(count):
            batch = []
            for index in range(len(iterators)):
                for _ in range(1 if batched else 12 // len(iterators)):
                    try:
                        item = next(iterators[index])
                    except StopIteration:
                        iterators[index] = iter(samplers[index])
                        item = next(iterators[index])
                    batch += item if batched else [item]
            batches.append(sorted(set(batch)))
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state["offset"] == states[0]["offset"] for state in states)
        return batches, states[0]

    # Inside one epoch where it yields single indices: there the cut at the end is the loader's.
    count = (3, 2, 3) if not batched and not infinite else (5, 9, 6)
    expected, _ = global_batches(ranks(1, None), sum(count))
    got, state = [], None
    for world, batches in zip((4, 2, 3), count, strict=True):
        more, state = global_batches(ranks(world, state), batches)
        got += more
    for one, other in zip(expected, got, strict=True):
        # At the end of an epoch all ranks get equally many: fewer than one sample for each comes again.
        assert one == other or (len(one) < 12 and set(one) < set(other) and len(other) - len(one) < 4)
    assert sum(one != other for one, other in zip(expected, got, strict=True)) <= 2


def test_ranks_get_equally_many_and_together_everything():
    parts = [list(ResumableSampler(10, rank=rank, world_size=4)) for rank in range(4)]
    assert [len(part) for part in parts] == [3] * 4
    assert set().union(*parts) == set(range(10))
    parts = [list(ResumableSampler(10, rank=rank, world_size=4, drop_last=True)) for rank in range(4)]
    assert [len(part) for part in parts] == [2] * 4
    assert len(set().union(*parts)) == 8


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_length_is_that_of_a_whole_epoch(batch_size, drop_last):
    sampler = ResumableSampler(30, batch_size=batch_size, drop_last=drop_last, world_size=4, rank=1)
    expected = len(sampler)
    assert len(list(sampler)) == expected
    take(sampler, 1)
    assert len(sampler) == expected
    with pytest.raises(TypeError, match="infinite"):
        len(ResumableSampler(3, infinite=True))


def test_skip_counts_global_samples_over_epochs():
    whole = [item for part in epochs(ResumableSampler(10, seed=1), 4) for item in part]
    for count in (0, 1, 9, 10, 11, 25):
        sampler = ResumableSampler(10, seed=1)
        sampler.skip(count)
        rest = [item for part in epochs(sampler, 1) for item in part]
        assert rest == whole[count : count + len(rest)]
        assert sampler.global_position % 10 == 0
    by_ranks = ResumableSampler(10, seed=1, world_size=2, rank=1)
    by_ranks.skip(3)
    assert take(by_ranks, 2) == [whole[4], whole[6]]


def test_skip_passes_over_what_drop_last_leaves_out():
    sampler = ResumableSampler(10, batch_size=4, drop_last=True, shuffle=False)
    sampler.skip(9)
    assert (sampler.epoch, sampler.offset) == (1, 1)
    assert list(sampler) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    with pytest.raises(UsageError, match="cannot go back"):
        sampler.skip(-1)


def test_another_order_is_refused_and_nothing_changed():
    state = ResumableSampler(10, seed=1).state_dict()
    sampler = ResumableSampler(11, seed=2, shuffle=False)
    take(sampler, 3)
    with pytest.raises(StateMismatchError) as caught:
        sampler.load_state_dict(state)
    assert len(caught.value.problems) == 3
    assert sampler.offset == 3
    with pytest.raises(StateMismatchError, match="not the state of a ResumableSampler"):
        sampler.load_state_dict({"epoch": 3})


def test_another_global_batch_is_allowed_and_said(caplog):
    sampler = ResumableSampler(20, batch_size=4, shuffle=False)
    take(sampler, 2)
    fresh = ResumableSampler(20, batch_size=5, shuffle=False)
    fresh.load_state_dict(sampler.state_dict())
    assert "global batch was 4 samples and is 5 now" in caplog.text
    assert next(iter(fresh)) == [8, 9, 10, 11, 12]


def test_changing_the_position_inside_a_loop_is_an_error_not_a_silent_nothing():
    sampler = ResumableSampler(10)
    order = iter(sampler)
    next(order)
    sampler.skip(1)
    with pytest.raises(UsageError, match="while an iteration was under way"):
        next(order)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"rank": 2, "world_size": 2}, "rank=2 must be in"),
        ({"batch_size": 4, "world_size": 4, "rank": 0, "drop_last": True}, "at least 16 are needed"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        ResumableSampler(10, **arguments)
    with pytest.raises(UsageError, match="empty"):
        ResumableSampler(0)


def test_it_draws_nothing():
    before = torch.get_rng_state()
    take(ResumableSampler(1000), 10)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_of_torch_takes_no_more_than_it_gives(drop_last):
    """What `DataLoader(sampler=)` relies on: the position is that of the batches given."""
    sampler = ResumableSampler(10, batch_size=None)
    batches = iter(BatchSampler(sampler, 3, drop_last))
    for count in (3, 6, 9):
        next(batches)
        assert sampler.global_position == count


def test_it_serves_as_sampler_and_as_batch_sampler_of_a_dataloader():
    data = TensorDataset(torch.arange(10))
    one = [batch[0].tolist() for batch in DataLoader(data, batch_size=4, sampler=ResumableSampler(data))]
    two = [b[0].tolist() for b in DataLoader(data, batch_sampler=ResumableSampler(data, batch_size=4))]
    assert one == two
    assert sorted(itertools.chain(*one)) == list(range(10))
