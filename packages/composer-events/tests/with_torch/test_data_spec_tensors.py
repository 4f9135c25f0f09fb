from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from composer_events import DataSpec, Evaluator, default_split_batch
from composer_events.data_spec import split_batch_by_count

Pair = namedtuple("Pair", ["image", "label"])


def make_dataset(length=8):
    return TensorDataset(torch.zeros(length, 3))


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield 1


class WrongLength(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        raise NotImplementedError("of unknown length")


def rejoin(microbatches):
    return tuple(torch.cat(column) for column in zip(*microbatches, strict=True))


@settings(deadline=None)  # a busy machine is no failure
@given(length=st.integers(1, 20), data=st.data())
def test_joined_microbatches_are_the_batch(length, data):
    size = data.draw(st.integers(1, length))
    batch = (torch.arange(length), torch.rand(length, 2))
    microbatches = default_split_batch(batch, size)
    assert all(isinstance(microbatch, tuple) for microbatch in microbatches)
    assert [len(microbatch[0]) for microbatch in microbatches[:-1]] == [size] * (len(microbatches) - 1)
    for rejoined, original in zip(rejoin(microbatches), batch, strict=True):
        torch.testing.assert_close(rejoined, original)


@settings(deadline=None)  # a busy machine is no failure
@given(length=st.integers(1, 20), count=st.integers(1, 20))
def test_splitting_by_count_is_torch_chunk(length, count):
    tensor = torch.arange(length)
    if count > length:
        with pytest.warns(UserWarning, match="Cannot split"):
            microbatches = split_batch_by_count(tensor, count)
    else:
        microbatches = split_batch_by_count(tensor, count)
    torch.testing.assert_close(list(microbatches), list(tensor.chunk(count)))


def test_a_tensor_is_cut_with_a_shorter_tail():
    sizes = [len(microbatch) for microbatch in default_split_batch(torch.zeros(5, 2), 2)]
    assert sizes == [2, 2, 1]


def test_a_mapping_of_tensors_is_cut_into_dicts():
    batch = {"ids": torch.arange(5), "names": list("abcde"), "nested": {"mask": torch.ones(5, 2)}, "task": "qa"}
    microbatches = default_split_batch(batch, 2)
    assert [microbatch["ids"].tolist() for microbatch in microbatches] == [[0, 1], [2, 3], [4]]
    assert [microbatch["names"] for microbatch in microbatches] == [["a", "b"], ["c", "d"], ["e"]]
    assert [len(microbatch["nested"]["mask"]) for microbatch in microbatches] == [2, 2, 1]
    assert {microbatch["task"] for microbatch in microbatches} == {"qa"}


def test_a_tuple_may_hold_a_mapping_and_a_list():
    batch = (torch.arange(3), {"mask": torch.ones(3)}, ["a", "b", "c"])
    first, second = default_split_batch(batch, 2)
    assert (first[0].tolist(), len(first[1]["mask"]), first[2]) == ([0, 1], 2, ["a", "b"])
    assert (second[0].tolist(), len(second[1]["mask"]), second[2]) == ([2], 1, ["c"])


def test_a_namedtuple_keeps_the_names_of_its_fields():
    first, second = default_split_batch(Pair(torch.arange(3), torch.zeros(3)), 2)
    assert first.image.tolist() == [0, 1]
    assert second.label.tolist() == [0.0]


@pytest.mark.parametrize("lengths", [(4, 3), (0, 4), (4, 0)])
@pytest.mark.parametrize("size", [2, 4])
def test_tensors_of_unequal_length_are_refused_rather_than_cut_short(lengths, size):
    with pytest.raises(ValueError, match="differ in length"):
        default_split_batch(tuple(map(torch.zeros, lengths)), size)


def test_a_tensor_without_dimensions_is_refused():
    with pytest.raises(ValueError, match="without dimensions"):
        default_split_batch((torch.zeros(2), torch.tensor(1)), 2)


@pytest.mark.parametrize("batch", [torch.zeros(2), (torch.zeros(2), torch.ones(2)), {"a": torch.zeros(2)}])
def test_a_batch_shorter_than_a_microbatch_stays_whole_with_a_warning(batch):
    with pytest.warns(UserWarning, match="Cannot split tensor of length 2"):
        (whole,) = default_split_batch(batch, 3)
    assert type(whole) is type(batch)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 2),
        (torch.zeros(4, 2), torch.zeros(4)),
        {"input_ids": torch.zeros(4, 2), "labels": torch.zeros(4)},
        (torch.zeros(4), [torch.zeros(4), torch.zeros(4)], {"mask": torch.zeros(4)}),
    ],
)
def test_samples_are_counted_along_the_first_dimension(batch):
    count = DataSpec([]).get_num_samples_in_batch(batch)
    assert count == 4
    assert type(count) is int


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.arange(3), "y": torch.arange(3), "task": "qa", "temperature": 0.5},
        {"inputs": {"ids": torch.arange(3), "mode": "train"}, "labels": torch.arange(3)},
        (torch.arange(3), torch.arange(3), ["a", "b", "c"]),
        (torch.arange(3), (torch.arange(3), torch.arange(3))),
        (torch.arange(3), [torch.arange(2), torch.arange(4), torch.arange(2)]),
        (torch.arange(3).numpy(), torch.arange(3)),
    ],
)
def test_a_batch_that_can_be_counted_can_be_split_into_its_samples(batch):
    """Nested targets were counted as 3 samples and refused when split; with a task's name it was the other way."""
    assert DataSpec([]).get_num_samples_in_batch(batch) == 3
    microbatches = default_split_batch(batch, 2)
    assert [DataSpec([]).get_num_samples_in_batch(microbatch) for microbatch in microbatches] == [2, 1]


def test_tokens_are_counted_from_input_ids():
    assert DataSpec([]).get_num_tokens_in_batch({"input_ids": torch.zeros(4, 16)}) == 64


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [(make_dataset(8), 8), (Endless(), None), (WrongLength(), None)],
    ids=["map", "endless", "odd"],
)
def test_the_number_of_samples_is_that_of_the_dataset(dataset, expected):
    sampler = None if not isinstance(dataset, WrongLength) else [0, 1]
    assert DataSpec(DataLoader(dataset, sampler=sampler)).num_samples == expected


def test_a_number_of_samples_that_is_given_stays():
    assert DataSpec(DataLoader(make_dataset(8)), num_samples=5).num_samples == 5


def test_a_dataloader_whose_workers_read_already_is_refused():
    dataloader = DataLoader(make_dataset(8))
    dataloader._iterator = iter([])  # as persistent workers leave it
    with pytest.raises(ValueError, match="active iterator"):
        DataSpec(dataloader)


class Sharding(torch.utils.data.Sampler):
    """One of torchvision's kind, which is no DistributedSampler."""

    def __init__(self):
        self.num_replicas, self.rank = 2, 0


class Mute(torch.utils.data.Sampler):
    """One that shards, and does not say so."""

    def __init__(self, *_):
        pass


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: SimpleNamespace(sampler=each)])
def test_a_sampler_that_shards_by_itself_says_so_by_its_attributes(monkeypatch, wrap):
    """Seen before: "The dataloader's sampler is a 'SequentialSampler'", which nobody had made."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = make_dataset()

    def loaders(sampler):
        batches = torch.utils.data.BatchSampler(wrap(sampler), 2, drop_last=False)
        return DataLoader(dataset, sampler=sampler), DataLoader(dataset, batch_sampler=batches)

    for loader in loaders(Sharding()):
        DataSpec(loader)
    mute = Mute()
    for loader, name in zip(loaders(mute), ("Mute", "BatchSampler over a .*Mute"), strict=True):
        with pytest.raises(
            ValueError,
            match=rf"sampler is .*{name}, which does not say which rank.*same dataset.*of its own, .*by num_",
        ):
            DataSpec(loader)
    mute.num_replicas, mute.rank = 2, 0
    for loader in loaders(mute):
        DataSpec(loader)


def test_several_ranks_need_a_distributed_sampler(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="each of the 2 ranks"):
        DataSpec(DataLoader(dataset))
    DataSpec(DataLoader(dataset, sampler=sampler))
    DataSpec(DataLoader(dataset, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, drop_last=False)))
    DataSpec(DataLoader(Endless()))
    DataSpec([1, 2])


def test_an_evaluator_takes_the_batch_size_of_the_loader_or_of_its_batch_sampler():
    dataset = make_dataset()
    batches = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(dataset), 3, drop_last=False)
    assert Evaluator(label="a", dataloader=DataLoader(dataset, batch_size=5)).device_eval_microbatch_size == 5
    assert Evaluator(label="a", dataloader=DataLoader(dataset, batch_sampler=batches)).device_eval_microbatch_size == 3
