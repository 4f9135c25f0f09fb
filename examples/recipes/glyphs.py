"""The ResNet recipe in small: letters and digits in typefaces that the network has never seen.

    python examples/recipes/glyphs.py --seeds 5

Progressive resizing, channels last and BlurPool, with the settings that were published for ResNet-50, against a
baseline that is tuned just as much. One thread; what is measured are the CPU-seconds of training.
"""

import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from arms import Arm, Comparison, Point, Task
from comparison import main
from cpu_clock import CpuClock
from glyph_data import CLASSES, SIDE, load_glyphs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Algorithm, Trainer
from composer.algorithms import BlurPool, ChannelsLast, LabelSmoothing, ProgressiveResizing
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledSGDW

BATCH_SIZE = 32
WIDTHS = (16, 32, 64)


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions make of the input."""
        return F.relu(self.residual(x) + self.shortcut(x))


def make_network() -> nn.Sequential:
    """Return a residual network of three stages, each but the first of which halves the sides."""
    first, second, third = WIDTHS
    return nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        ResidualBlock(first, first, stride=1),
        ResidualBlock(first, second, stride=2),
        ResidualBlock(second, third, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, len(CLASSES)),
    )


def make_loaders(seed: int, side: int = SIDE, batch_size: int = BATCH_SIZE) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a shuffled loader of the training images, and one of the test's, both with images of a size."""
    train, test = (_resized(dataset, side) for dataset in load_glyphs())
    generator = torch.Generator().manual_seed(seed)
    return (
        DataLoader(train, batch_size, shuffle=True, drop_last=True, generator=generator),
        DataLoader(test, batch_size=248),
    )


def make_trainer(arm: Arm, lr: float, seed: int, clock: CpuClock) -> Trainer:
    """Put together the training of one arm.

    Args:
        arm: May have the settings `batch_size`, `side` (train and test on images of this size throughout), and options
            of the Trainer.
        lr: The peak of the learning rate.
        seed: Of weights and batches.
        clock: Notes the accuracy on the test's images after each epoch.
    """
    torch.manual_seed(seed)
    of_loader, of_trainer = arm.split_settings("batch_size", "side")
    train_dataloader, test_dataloader = make_loaders(seed, **of_loader)
    model = ComposerClassifier(make_network(), num_classes=len(CLASSES))
    if arm.optimizer is None:
        optimizer = DecoupledSGDW(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-5, nesterov=True)
    else:
        optimizer = arm.optimizer(model, lr=lr)
    options: dict[str, Any] = {"schedulers": CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"), **of_trainer}
    return Trainer(
        model=model,
        train_dataloader=train_dataloader,
        eval_dataloader=test_dataloader,
        max_duration=arm.duration,
        optimizers=optimizer,
        algorithms=arm.algorithms(),
        callbacks=clock,
        device="cpu",
        seed=seed,
        progress_bar=False,
        **options,
    )


def train(arm: Arm, lr: float, seed: int) -> list[Point]:
    """Train once, and return CPU-seconds and accuracy after each epoch."""
    clock = CpuClock(lambda state: float(state.eval_metric_values["MulticlassAccuracy"]))
    with make_trainer(arm, lr, seed, clock) as trainer:
        trainer.fit()
    return clock.curve


def progressive_resizing() -> ProgressiveResizing:
    """The settings published for ResNet-50 (the mild and the medium recipe)."""
    return ProgressiveResizing(
        mode="resize", initial_scale=0.5, delay_fraction=0.4, finetune_fraction=0.2, size_increment=4
    )


def composed() -> list[Algorithm]:
    """The recipe."""
    return [
        progressive_resizing(),
        ChannelsLast(),
        BlurPool(),
    ]


TASK = Task(
    name="glyphs",
    setup=f"batches of {BATCH_SIZE}, stages of {WIDTHS} channels, images of {SIDE}x{SIDE}",
    train=train,
    target=0.898,
    quality="accuracy on unseen fonts",
    percent=True,
    is_better_higher=True,
)

# The durations were chosen so that the arms take about equally long; the last three, at most half of that.
GLYPHS = Comparison(
    name="glyphs",
    task=TASK,
    arms=(
        Arm(name="baseline", duration="8ep"),
        Arm(name="ChannelsLast", duration="9ep", algorithms=lambda: [ChannelsLast()]),
        Arm(name="ProgressiveResizing", duration="14ep", algorithms=lambda: [progressive_resizing()]),
        Arm(name="BlurPool", duration="7ep", algorithms=lambda: [BlurPool()]),
        Arm(name="LabelSmoothing", duration="8ep", algorithms=lambda: [LabelSmoothing(0.1)]),
        Arm(name="control: 24x24 throughout", duration="13ep", settings={"side": 24}),
        Arm(name="all three", duration="15ep", algorithms=composed),
        Arm(name="baseline, half the time", duration="4ep", like="baseline"),
        Arm(name="control, half the time", duration="6ep", settings={"side": 24}, like="control: 24x24 throughout"),
        Arm(name="all three, half the time", duration="7ep", algorithms=composed, like="all three"),
    ),
    baseline="baseline",
    composed="all three",
    learning_rates=(0.05, 0.1, 0.2),
)


@functools.cache
def _resized(dataset: TensorDataset, side: int) -> TensorDataset:
    """Return the images in another size, sampled as progressive resizing does."""
    images, labels = dataset.tensors
    return dataset if side == SIDE else TensorDataset(F.interpolate(images, size=(side, side)), labels)


if __name__ == "__main__":
    sys.exit(main(GLYPHS, __doc__))
