"""ImageVisualizer: which images come into the log, and when."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.callbacks import ImageVisualizer
from composer.loggers import LoggerDestination
from composer.models import ComposerModel

CLASSES = 3


class Kept(LoggerDestination):
    def __init__(self):
        self.calls = []

    def log_images(
        self, images, name="Images", channels_last=False, step=None, masks=None, labels=None, use_table=True
    ):
        self.calls.append(
            {"images": images, "name": name, "channels_last": channels_last, "step": step, "masks": masks}
        )

    def of(self, name):
        return [call for call in self.calls if call["name"] == name]


class Segmenter(ComposerModel):
    """Gives each pixel the class of its own first channel."""

    def __init__(self, in_a_list=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.in_a_list = in_a_list

    def forward(self, batch):
        logits = nn.functional.one_hot(batch[0][:, 0].long(), CLASSES).movedim(-1, 1).float() * self.weight
        return list(logits) if self.in_a_list else logits

    def loss(self, outputs, batch):
        return 0 * self.weight  # it knows all that there is to know

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch)

    def get_metrics(self, is_train=False):
        return {}

    def update_metric(self, batch, outputs, metric):
        pass


@pytest.fixture
def images():
    return torch.randint(CLASSES, (12, 2, 4, 5), generator=torch.Generator().manual_seed(1)).float()


def loader(images, targets=None, batch_size=4):
    targets = torch.zeros(len(images), dtype=torch.long) if targets is None else targets
    return DataLoader(TensorDataset(images, targets), batch_size=batch_size)


def train(make_trainer, visualizer, data, model=None, **settings):
    kept = Kept()
    make_trainer(
        model=model or Segmenter(),
        train_dataloader=data,
        max_duration="1ep",
        callbacks=visualizer,
        loggers=kept,
        **settings,
    ).fit()
    return kept


def test_the_first_images_of_the_batches_that_are_due_are_logged(make_trainer, images):
    kept = train(make_trainer, ImageVisualizer(interval="2ba", num_images=3), loader(images))
    assert [call["step"] for call in kept.of("Images/Train")] == [0, 2]
    for call, start in zip(kept.calls, (0, 8), strict=True):
        assert isinstance(call["images"], np.ndarray)
        np.testing.assert_array_equal(call["images"], images[start : start + 3].numpy())


def test_a_batch_with_fewer_images_is_logged_whole_and_once_for_all_microbatches(make_trainer, images):
    kept = train(make_trainer, ImageVisualizer(num_images=8), loader(images), device_train_microbatch_size=2)
    assert [len(call["images"]) for call in kept.calls] == [2]


def test_the_first_batch_of_each_evaluation_is_logged(make_trainer, images):
    kept = train(
        make_trainer,
        ImageVisualizer(),
        loader(images),
        eval_dataloader=loader(images.flip(0), batch_size=6),
        eval_interval="1ba",
    )
    assert len(kept.of("Images/Eval")) == 3
    for call in kept.of("Images/Eval"):
        np.testing.assert_array_equal(call["images"], images.flip(0)[:6].numpy())


@pytest.mark.parametrize("in_a_list", [False, True])
@pytest.mark.parametrize("kind", ["indices", "one value for each class"])
def test_segmentation_logs_the_predicted_and_the_true_class_of_each_pixel(make_trainer, images, kind, in_a_list):
    true = images[:, 1].long()
    targets = true if kind == "indices" else nn.functional.one_hot(true, CLASSES).movedim(-1, 1).float()
    kept = train(
        make_trainer,
        ImageVisualizer(mode="Segmentation", num_images=3),
        loader(images, targets),
        Segmenter(in_a_list),
        eval_dataloader=loader(images, targets),
    )
    assert [call["name"] for call in kept.calls] == ["Images/Train", "Images/Eval"]
    for call in kept.calls:
        np.testing.assert_array_equal(call["masks"]["prediction"], images[:3, 0].numpy())
        np.testing.assert_array_equal(call["masks"]["ground_truth"], images[:3, 1].numpy())


def test_pixels_that_are_ignored_get_the_number_after_the_last_class(make_trainer, images):
    targets = torch.full((12, 4, 5), -1)
    kept = train(make_trainer, ImageVisualizer(mode="segmentation"), loader(images, targets))
    assert (kept.calls[0]["masks"]["ground_truth"] == CLASSES).all()


def test_what_is_no_image_is_not_logged(make_trainer, make_loader, make_model):
    kept = train(make_trainer, ImageVisualizer(), make_loader(4, 2), make_model())
    assert kept.calls == []


def test_images_are_found_by_the_key_and_told_where_their_channels_are(make_trainer, images):
    visualizer = ImageVisualizer(input_key=lambda batch: batch[0].movedim(1, -1), channels_last=True)
    kept = train(make_trainer, visualizer, loader(images))
    assert kept.calls[0]["images"].shape == (4, 4, 5, 2)
    assert kept.calls[0]["channels_last"]


def test_sixteen_bit_images_become_something_that_numpy_knows(make_trainer, images):
    class Half(Segmenter):
        def forward(self, batch):
            return super().forward((batch[0].float(), batch[1]))

    kept = train(make_trainer, ImageVisualizer(), loader(images.bfloat16()), Half())
    np.testing.assert_array_equal(kept.calls[0]["images"], images[:4].numpy())


@pytest.mark.parametrize(("settings", "said"), [({"mode": "boxes"}, "mode='boxes'"), ({"interval": "9sp"}, "'9sp'")])
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ImageVisualizer(**settings)
