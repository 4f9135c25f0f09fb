"""Train a small convolutional network on scikit-learn's handwritten digits, and say how well it reads unseen ones.

    composer -n 2 examples/train.py [--seeds 17 18 19] [--duration 8ep] [--folder runs/digits]

1,797 real images of 8x8 pixels: 1,297 to train on, 500 held out. Every seed draws its own split, weights and batches.
A batch holds 32 images, shared out among the processes: `python examples/train.py` trains on the same in one.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from composer import Trainer
from composer.algorithms import EMA, LabelSmoothing, MixUp
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from composer.report import RunRecorder, write_page
from composer.utils import dist

NUM_TRAIN, NUM_HELD_OUT = 1297, 500
BATCH_SIZE = 32
ENOUGH = 0.97


def make_loaders(seed: int) -> tuple[DataLoader, DataLoader]:
    """Return a shuffled loader of the training images and one of the held-out images."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    digits = TensorDataset(images, torch.as_tensor(labels))
    generator = torch.Generator().manual_seed(seed)
    train, held_out = random_split(digits, [NUM_TRAIN, NUM_HELD_OUT], generator)
    return (
        DataLoader(
            train, BATCH_SIZE // dist.get_world_size(), sampler=dist.get_sampler(train, shuffle=True, seed=seed)
        ),
        DataLoader(held_out, batch_size=250, sampler=dist.get_sampler(held_out)),
    )


def make_network() -> nn.Sequential:
    """Return three convolutions and a linear read-out."""

    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32),
        *block(32, 64),
        nn.MaxPool2d(2),
        *block(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train(seed: int, duration: str, folder: Path) -> float:
    """Train once, let rank 0 write weights and result into `folder`, and return the accuracy on the held-out images."""
    torch.manual_seed(seed)
    train_dataloader, held_out_dataloader = make_loaders(seed)
    model = ComposerClassifier(make_network(), num_classes=10)
    ema = EMA(half_life="20ba", update_interval="1ba")
    with Trainer(
        model=model,
        train_dataloader=train_dataloader,
        eval_dataloader=held_out_dataloader,
        max_duration=duration,
        optimizers=DecoupledAdamW(model.parameters(), lr=4e-3),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="1ep"),
        algorithms=[MixUp(alpha=0.2), LabelSmoothing(0.1), ema],
        loggers=RunRecorder(folder, overwrite=True, page=False),
        run_name=f"digits-{seed}",
        device="cpu",
        seed=seed,
    ) as trainer:
        trainer.fit()
        # Evaluations run on EMA's averaged weights, so these are the ones to keep.
        ema.get_ema_model(model)
        accuracy = float(trainer.state.eval_metric_values["MulticlassAccuracy"])
    if dist.get_global_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), folder / "weights.pt")
        result = {"seed": seed, "duration": duration, "held_out_accuracy": accuracy}
        (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return accuracy


def main() -> int:
    """Train once for each seed; the exit status is 1 if one of them reads too few digits."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19], help="one run for each")
    parser.add_argument("--duration", default="8ep", help="how long a run trains, such as 8ep or 300ba")
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"), help="where results go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # for so small a network, threads that wait for each other cost more than they compute
    accuracies = []
    for seed in arguments.seeds:
        folder = arguments.folder / f"seed-{seed}"
        accuracies.append(train(seed, arguments.duration, folder))
        if dist.get_global_rank() == 0:
            print(
                f"seed {seed}: {accuracies[-1]:.1%} of {NUM_HELD_OUT} held-out digits read right; results in {folder}"
            )
    if dist.get_global_rank() == 0:
        page = write_page(
            [arguments.folder / f"seed-{seed}" for seed in arguments.seeds], arguments.folder / "report.html"
        )
        print(f"Curves, timings and settings of all runs: {page}")
    return 0 if min(accuracies) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
