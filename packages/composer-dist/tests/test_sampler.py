import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, IterableDataset

from composer_dist import get_sampler

lengths, world_sizes, seeds = st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000)


@given(lengths, world_sizes, seeds, st.booleans())
def test_the_ranks_together_read_every_sample(length, world_size, seed, shuffle):
    shares = [
        list(get_sampler(range(length), num_replicas=world_size, rank=rank, seed=seed, shuffle=shuffle))
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    assert {index for share in shares for index in share} == set(range(length))


@given(lengths, world_sizes, seeds)
def test_dropping_the_last_repeats_no_sample(length, world_size, seed):
    shares = [
        list(get_sampler(range(length), num_replicas=world_size, rank=rank, seed=seed, shuffle=True, drop_last=True))
        for rank in range(world_size)
    ]
    read = [index for share in shares for index in share]
    assert len(read) == len(set(read)) == length // world_size * world_size


def test_the_share_is_that_of_this_process(environ):
    environ.update(RANK="1", WORLD_SIZE="3")
    assert list(get_sampler(range(6))) == [1, 4]


def test_a_process_that_is_alone_reads_everything_in_order():
    assert list(get_sampler(range(5))) == [0, 1, 2, 3, 4]


def test_each_epoch_has_an_order_of_its_own_that_the_seed_repeats():
    first, second = (get_sampler(range(50), shuffle=True, seed=3) for _ in range(2))
    assert isinstance(first, DistributedSampler)
    order = list(first)
    first.set_epoch(1)
    assert list(first) != order == list(second)


def test_rank_zero_of_an_explicit_set_is_not_taken_for_missing(environ):
    environ.update(RANK="1", WORLD_SIZE="2")
    assert list(get_sampler(range(4), num_replicas=4, rank=0)) == [0]


def test_arguments_after_the_dataset_are_keywords():
    with pytest.raises(TypeError):
        get_sampler(range(4), True)


def test_a_dataset_that_shares_its_samples_by_itself_takes_no_sampler():
    class Lines(IterableDataset):
        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 4

    with pytest.raises(TypeError, match=r"Lines object at .* is an IterableDataset.*without a sampler"):
        get_sampler(Lines())
