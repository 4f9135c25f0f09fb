"""A real model of timm trains, with a schedule and an average of its weights."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import EMA
from composer.models import composer_timm
from composer.optim import LinearScheduler

pytest.importorskip("timm")


def test_a_model_of_timm_trains_as_in_a_plain_loop():
    """`composer_timm`, which scripts for Composer call, was gone."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 2
    model = composer_timm("resnet10t", num_classes=2)
    expected, average = copy.deepcopy(model.module), copy.deepcopy(model.module)
    ema = EMA(smoothing=0.5, half_life=None, update_interval="1ba")
    with Trainer(
        model=model,
        algorithms=ema,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        schedulers=LinearScheduler(),
        train_dataloader=DataLoader(TensorDataset(images, labels), batch_size=2),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        averaged = ema.get_ema_model(copy.deepcopy(model)).module

    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for index, (part, target) in enumerate(zip(images.split(2), labels.split(2), strict=True)):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - index / 4)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(expected(part), target).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), expected.parameters(), strict=True):
                mean.lerp_(weight, 0.5 if index else 1)  # it begins after the first batch
    # A few float32 roundings in each of four steps.
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(model.module.get_parameter(name), weight, rtol=1e-4, atol=1e-6)
    for name, weight in average.named_parameters():
        torch.testing.assert_close(averaged.get_parameter(name), weight, rtol=1e-4, atol=1e-6)
