"""Each image is seen both ways in two epochs, whatever the form of the samples."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchvision.datasets import FakeData
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from composer_algorithms import AlternatingFlip, AugMix
from composer_algorithms.alternating_flip import AlternatingFlipDataset, alternating_flip_batch
from composer_events import Engine, Event, State

IMAGE = torch.tensor([[[0, 1, 2], [3, 4, 5]]], dtype=torch.uint8)
MIRRORED = torch.tensor([[[2, 1, 0], [5, 4, 3]]], dtype=torch.uint8)
SAMPLES = 24


def test_about_half_of_the_images_are_mirrored_independently_of_seed_and_neighbors():
    indices = torch.arange(4096)
    images = torch.tensor([0, 1]).expand(4096, 2)
    first, second, other = (alternating_flip_batch(images, indices, *each)[:, 0] for each in ((0, 0), (1, 0), (0, 1)))
    assert torch.equal(first, 1 - second)
    assert torch.equal(first, alternating_flip_batch(images, indices, 2)[:, 0])
    # Of 4096 fair coins, 2048 fall on one side, with a standard deviation of 32.
    for coins in (first, first ^ other, first[1:] ^ first[:-1], first[2:] ^ first[:-2]):
        assert abs(int(coins.sum()) - 2048) < 5 * 32


class Stored:
    """A dataset whose samples are the same objects in each epoch."""

    def __init__(self, sample):
        self.samples = [sample] * SAMPLES

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.samples[index]


@pytest.mark.parametrize(
    ("sample", "key"),
    [(IMAGE, 0), ((IMAGE, 1), 0), ([1, IMAGE], 1), ({"image": IMAGE}, "image"), ((to_pil_image(IMAGE),), 0)],
    ids=["image", "tuple", "list", "dict", "PIL"],
)
def test_samples_of_any_form_are_mirrored_as_batches_are_and_kept_as_they_were(sample, key):
    def pixels(sample):
        image = sample if isinstance(sample, torch.Tensor) else sample[key]
        return image if isinstance(image, torch.Tensor) else pil_to_tensor(image)

    dataset = AlternatingFlipDataset(Stored(sample), seed=7, input_key=key)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        seen = torch.stack([pixels(dataset[index]) for index in range(SAMPLES)])
        assert torch.equal(seen, torch.stack(list(map(pixels, dataset.__getitems__(list(range(SAMPLES)))))))
        expected = alternating_flip_batch(IMAGE.expand(SAMPLES, 1, 2, 3), torch.arange(SAMPLES), epoch, seed=7)
        assert torch.equal(seen, expected)
        assert {str(each) for each in seen.tolist()} == {str(IMAGE.tolist()), str(MIRRORED.tolist())}
    assert torch.equal(pixels(sample), IMAGE)


@pytest.mark.parametrize(
    "sample", [{"image": IMAGE, "label": 0}, ("image",), object()], ids=["dict", "tuple", "object"]
)
def test_a_sample_without_the_image_is_refused_with_what_to_do(sample):
    key = 3 if isinstance(sample, tuple) else "photo" if not isinstance(sample, dict) else 0
    dataset = AlternatingFlipDataset(Stored(sample), input_key=key)
    entries = r" with the entries \['image', 'label'\]" if isinstance(sample, dict) else ""
    message = f"input_key={key!r} selects nothing in a {type(sample).__name__}{entries}: pass"
    with pytest.raises(TypeError, match=message):
        [dataset[index] for index in range(SAMPLES)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def state_with(loader, *algorithms):
    state = State(torch.nn.Identity(), rank_zero_seed=7, max_duration="2ep", dataloader=loader)
    state.algorithms = [AlternatingFlip(), *algorithms]
    return state


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Stream())], ids=["list", "stream"])
def test_without_indices_it_is_refused(loader):
    with pytest.raises(TypeError, match=f"AlternatingFlip needs the index .* is a {type(loader).__name__}: use one"):
        Engine(state_with(loader)).run_event(Event.FIT_START)


def test_a_second_fit_wraps_the_dataset_once_and_transforms_find_it():
    dataset = FakeData(2)
    state = state_with(DataLoader(dataset), AugMix())
    for _ in range(2):
        Engine(state).run_event(Event.FIT_START)
    assert state.dataloader.dataset.dataset is dataset
    assert dataset.transform is not None
