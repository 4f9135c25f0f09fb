"""The calls of Composer's documentation that rebuild models, through its import paths and its Trainer."""

import re
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models

from composer import Trainer
from composer import functional as cf
from composer.algorithms import BlurPool, ChannelsLast, SqueezeExcite, WeightStandardization
from composer.algorithms.blurpool import BlurConv2d, BlurMaxPool2d
from composer.models import ComposerClassifier
from composer.utils import module_surgery


def images():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 3, 32, 32, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(3, (8,), generator=generator)), batch_size=4)


def classifier():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 3),
    )
    return ComposerClassifier(module, num_classes=3)


def test_the_functional_form_of_the_documentation_changes_a_resnet():
    model = models.resnet18()
    cf.apply_blurpool(model)
    assert module_surgery.count_module_instances(model, BlurMaxPool2d) == 1
    assert module_surgery.count_module_instances(model, BlurConv2d) == 6
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 1000)


def test_the_trainer_applies_channels_last_after_what_makes_convolutions():
    model = classifier()
    trainer = Trainer(
        model=model,
        algorithms=[ChannelsLast(), BlurPool()],
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=images(),
        max_duration="1ep",
        progress_bar=False,
    )
    convs = [module for module in trainer.state.model.modules() if isinstance(module, nn.Conv2d)]
    assert all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in convs)
    before = [conv.weight.clone() for conv in convs]
    trainer.fit()
    assert not any(torch.equal(conv.weight, old) for conv, old in zip(convs, before, strict=True))


def test_a_trainer_without_the_algorithms_loads_what_one_with_them_saved():
    def trainer(*algorithms):
        model = classifier()
        return Trainer(
            model=model,
            algorithms=list(algorithms),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            train_dataloader=images(),
            max_duration="1ep",
            progress_bar=False,
        )

    saved = trainer(WeightStandardization(), SqueezeExcite(latent_channels=4, min_channels=16), BlurPool())
    saved.fit()
    fresh = trainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fresh.state.load_state_dict(saved.state.state_dict(), strict=True)
    (added,) = [str(one.message) for one in caught if "Automatically" in str(one.message)]
    assert re.search(r"algorithms BlurPool\(.*, SqueezeExcite\(.*, WeightStandardization\(", added)
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(fresh.state.model.eval()((x, None)), saved.state.model.eval()((x, None)))
    for mine, theirs in zip(
        fresh.state.optimizers[0].param_groups, saved.state.optimizers[0].param_groups, strict=True
    ):
        assert len(mine["params"]) == len(theirs["params"])
