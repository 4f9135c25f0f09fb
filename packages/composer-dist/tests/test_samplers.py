"""The samplers of a curriculum and of repeated augmentation: what all ranks read together, and how much each."""

import math
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_dist import LengthCurriculumSampler, RepeatedAugmentationSampler

shares = st.fixed_dictionaries({"world_size": st.integers(1, 5), "seed": st.integers(0, 9), "drop_last": st.booleans()})
datasets = st.lists(st.integers(1, 6), min_size=5, max_size=40)


def read(make, world_size, epoch=0, **settings):
    """Return what the ranks read together, in the order of steps."""
    samplers = [make(num_replicas=world_size, rank=rank, **settings) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    orders = [list(sampler) for sampler in samplers]
    assert {len(order) for order in orders} == {len(sampler) for sampler in samplers}  # equal on all ranks
    return list(chain.from_iterable(zip(*orders, strict=True)))


def number_read(length, world_size, drop_last, **_):
    return (length // world_size if drop_last else math.ceil(length / world_size)) * world_size


@given(datasets, st.integers(1, 4), shares)
def test_each_sample_is_repeated_in_sequence(data, num_repeats, share):
    def make(**settings):
        return RepeatedAugmentationSampler(data, num_repeats, **settings)

    together = read(make, **share)
    assert len(together) == number_read(len(data), **share)
    alone = read(make, 1, seed=share["seed"])
    assert together[: len(data)] == alone[: len(together)]
    firsts = alone[::num_repeats]
    assert alone == [index for index in firsts for _ in range(num_repeats)][: len(data)]
    assert len(set(firsts)) == len(firsts) == math.ceil(len(data) / num_repeats)


@given(datasets, st.sampled_from([0.3, 1, 1.5, 2]), st.sampled_from([0.01, 0.25, 1]), shares)
def test_the_curriculum_grows_from_the_shortest_to_all(lengths, num_epochs, initial_fraction, share):
    def make(**settings):
        return LengthCurriculumSampler(range(len(lengths)), lengths, num_epochs, initial_fraction, **settings)

    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for epoch in range(3):
        together = read(make, epoch=epoch, **share)
        assert len(together) == number_read(len(lengths), **share)
        for position, index in enumerate(together):
            t = min(1, (epoch + position / len(together)) / num_epochs)
            allowed = math.sqrt(t * (1 - initial_fraction**2) + initial_fraction**2) * len(lengths)
            assert by_length.index(index) < allowed + 1e-9 or index == by_length[0]
        if epoch >= num_epochs:
            assert len(set(together)) == min(len(together), len(lengths))


def test_the_curriculum_draws_evenly_from_the_share_that_it_has_reached():
    """Half of the dataset, for most of an epoch: about as often each sample of it."""
    sampler = LengthCurriculumSampler(range(1000), range(1000), num_epochs=1e9, initial_fraction=0.5)
    order = list(sampler)
    assert sorted(order) == [index // 2 for index in range(1000)]
    assert order != sorted(order)


@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: RepeatedAugmentationSampler(range(40), **kw),
        lambda **kw: LengthCurriculumSampler(range(40), range(40), 0.1, **kw),
    ],
)
def test_epochs_and_seeds_have_orders_of_their_own_that_repeat(make, environ):
    orders = {(seed, epoch): read(make, 1, epoch, seed=seed) for seed in (0, 5) for epoch in (0, 1)}
    assert len(set(map(tuple, orders.values()))) == 4
    assert orders == {(seed, epoch): read(make, 1, epoch, seed=seed) for seed, epoch in orders}
    environ.update(RANK="1", WORLD_SIZE="2")
    assert list(make()) == orders[0, 0][1::2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RepeatedAugmentationSampler(range(4), 0), "num_repeats=0 must be at least 1"),
        (lambda: LengthCurriculumSampler(range(4), [1, 2]), "lengths has 2 entries, and the dataset 4 samples"),
        (lambda: LengthCurriculumSampler(range(2), [1, 2], -1), "num_epochs=-1 must be 0 or more"),
        (lambda: LengthCurriculumSampler(range(2), [1, 2], math.nan), "num_epochs=nan must be 0 or more"),
        (lambda: LengthCurriculumSampler(range(2), [1, 2], 1, 0), "initial_fraction=0 must be above 0"),
    ],
)
def test_settings_without_meaning_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_samples", [0, 1, 2, 3])
@pytest.mark.parametrize("is_curriculum", [True, False])
def test_ranks_of_a_dataset_smaller_than_they_are_many_have_as_many_samples(is_curriculum, num_samples, drop_last):
    def sampler(rank):
        settings = {"num_replicas": 4, "rank": rank, "drop_last": drop_last}
        if is_curriculum:
            return LengthCurriculumSampler(range(num_samples), [1.0] * num_samples, **settings)
        return RepeatedAugmentationSampler(range(num_samples), **settings)

    expected = 1 if num_samples and not drop_last else 0
    assert [len(list(sampler(rank))) for rank in range(4)] == [expected] * 4


@pytest.mark.parametrize("lengths", [[1.0, math.nan], [[1.0], [2.0]], [[1, 2], [3, 4]]], ids=str)
def test_lengths_are_one_number_for_each_sample(lengths):
    with pytest.raises(ValueError, match="lengths must be one number for each sample, and not NaN"):
        LengthCurriculumSampler(range(2), lengths, num_replicas=1, rank=0)
