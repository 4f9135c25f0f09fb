"""Where a transform goes among those of a dataset, and the algorithms that add one."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from composer_algorithms import AugMix, ColOut, RandAugment, add_vision_dataset_transform
from composer_events import Event

RESIZE, TENSOR, NORMALIZE = transforms.Resize(8), transforms.ToTensor(), transforms.Normalize([0.5], [0.5])
RESIZE_V2, IMAGE_V2, DTYPE_V2 = v2.Resize(8), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)


def new(image):
    return image


def steps(transform):
    return transform.transforms if isinstance(transform, (transforms.Compose, v2.Compose)) else transform


@pytest.mark.parametrize(
    ("current", "is_tensor_transform", "expected"),
    [
        (None, False, new),
        (None, True, new),
        (TENSOR, False, [new, TENSOR]),
        (TENSOR, True, [TENSOR, new]),
        (RESIZE, False, [RESIZE, new]),
        (transforms.Compose([RESIZE, TENSOR, NORMALIZE]), False, [RESIZE, new, TENSOR, NORMALIZE]),
        (transforms.Compose([RESIZE, TENSOR, NORMALIZE]), True, [RESIZE, TENSOR, new, NORMALIZE]),
        (transforms.Compose([RESIZE]), False, [RESIZE, new]),
        (v2.Compose([RESIZE_V2, IMAGE_V2, DTYPE_V2]), False, [RESIZE_V2, new, IMAGE_V2, DTYPE_V2]),
        (v2.Compose([RESIZE_V2, IMAGE_V2, DTYPE_V2]), True, [RESIZE_V2, IMAGE_V2, new, DTYPE_V2]),
        (IMAGE_V2, False, [new, IMAGE_V2]),
    ],
)
def test_a_transform_goes_before_or_after_what_makes_a_tensor_or_to_the_end(current, is_tensor_transform, expected):
    before = list(steps(current)) if isinstance(current, (transforms.Compose, v2.Compose)) else None
    dataset = FakeData(size=1, transform=current)
    add_vision_dataset_transform(dataset, new, is_tensor_transform)
    assert steps(dataset.transform) == expected
    assert steps(dataset.transforms.transform) == expected
    if before is not None:
        assert isinstance(dataset.transform, type(current))
        assert steps(current) == before


def test_where_it_went_is_logged_as_a_warning(caplog):
    add_vision_dataset_transform(FakeData(transform=TENSOR), new)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "FakeData has the transforms" in caplog.text


def test_the_datasets_inside_subsets_and_concatenations_get_it():
    first, second = FakeData(transform=TENSOR), FakeData(transform=TENSOR)
    add_vision_dataset_transform(ConcatDataset([Subset(first, [0, 1]), second]), new)
    assert steps(first.transform) == steps(second.transform) == [new, TENSOR]


def test_a_dataset_of_which_there_are_several_parts_gets_it_once():
    dataset = FakeData(transform=TENSOR)
    add_vision_dataset_transform(ConcatDataset([Subset(dataset, [0, 1]), Subset(dataset, [2])]), new)
    assert steps(dataset.transform) == [new, TENSOR]


def test_other_datasets_and_joint_transforms_are_refused():
    with pytest.raises(TypeError, match="dataset is a TensorDataset"):
        add_vision_dataset_transform(TensorDataset(torch.zeros(1)), new)
    dataset = FakeData()
    dataset.transforms = lambda image, target: (image, target)
    with pytest.raises(ValueError, match="image and target together"):
        add_vision_dataset_transform(dataset, new)


@pytest.mark.parametrize("make", [AugMix, RandAugment, lambda: ColOut(batch=False)])
def test_an_algorithm_adds_its_transform_once_to_each_dataset(state, make):
    dataset = FakeData(size=4, image_size=(3, 16, 16), transform=TENSOR)
    algorithm = make()
    state.set_dataloader(DataLoader(dataset, batch_size=2), "train")
    assert [event for event in Event if algorithm.match(event, state)] == [Event.FIT_START]
    algorithm.apply(Event.FIT_START, state, None)
    assert len(steps(dataset.transform)) == 2
    assert steps(dataset.transform)[1] is TENSOR
    assert not algorithm.match(Event.FIT_START, state)
    images, _ = next(iter(state.dataloader))
    assert images.shape[:2] == (2, 3)

    other = FakeData(transform=TENSOR)
    state.set_dataloader(DataLoader(other), "train")
    assert algorithm.match(Event.FIT_START, state)


def test_training_on_other_parts_of_a_dataset_adds_nothing_to_it(state):
    dataset, other = FakeData(transform=TENSOR), FakeData(transform=TENSOR)
    algorithm = RandAugment()
    state.set_dataloader(DataLoader(Subset(dataset, [0, 1])), "train")
    algorithm.apply(Event.FIT_START, state, None)
    state.set_dataloader(DataLoader(Subset(dataset, [2])), "train")
    assert not algorithm.match(Event.FIT_START, state)
    state.set_dataloader(DataLoader(ConcatDataset([Subset(dataset, [2]), other])), "train")
    assert algorithm.match(Event.FIT_START, state)
    algorithm.apply(Event.FIT_START, state, None)
    assert [len(steps(one.transform)) for one in (dataset, other)] == [2, 2]


@pytest.mark.parametrize("make", [AugMix, RandAugment, lambda: ColOut(batch=False)])
def test_an_algorithm_says_what_data_it_needs(state, make):
    state.set_dataloader([1, 2], "train")
    with pytest.raises(TypeError, match="torch DataLoader, and the dataloader is a list"):
        make().match(Event.FIT_START, state)
    state.set_dataloader(DataLoader(TensorDataset(torch.zeros(2))), "train")
    with pytest.raises(TypeError, match="dataset is a TensorDataset"):
        make().apply(Event.FIT_START, state, None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_seed_repeats_what_the_loading_processes_draw(state, num_workers):
    def epoch():
        dataset = FakeData(size=4, image_size=(3, 16, 16), transform=TENSOR)
        state.set_dataloader(DataLoader(dataset, batch_size=2, num_workers=num_workers), "train")
        RandAugment().apply(Event.FIT_START, state, None)
        torch.manual_seed(3)
        return torch.cat([images for images, _ in state.dataloader])

    assert torch.equal(epoch(), epoch())
