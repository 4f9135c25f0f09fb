"""The methods that change data, gradients and steps, in the Trainer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms
from torchvision.datasets import FakeData

from composer import Event, State, Trainer
from composer.algorithms import (
    SAM,
    SWA,
    AugMix,
    ColOut,
    CutMix,
    CutOut,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    ProgressiveResizing,
    RandAugment,
    SelectiveBackprop,
    SeqLengthWarmup,
)
from composer.core import Callback
from composer.models import ComposerClassifier, ComposerModel

METHODS = {
    "AugMix": lambda: AugMix(),
    "ColOut": lambda: ColOut(),
    "ColOut of samples": lambda: ColOut(batch=False),
    "CutMix": lambda: CutMix(),
    "CutMix of losses": lambda: CutMix(interpolate_loss=True),
    "CutOut": lambda: CutOut(),
    "GradientClipping": lambda: GradientClipping("norm", 0.1),
    "GradientClipping by value": lambda: GradientClipping("value", 0.01),
    "GradientClipping adaptive": lambda: GradientClipping("adaptive", 0.01),
    "LayerFreezing": lambda: LayerFreezing(freeze_start=0.0),
    "ProgressiveResizing": lambda: ProgressiveResizing(delay_fraction=0.2),
    "RandAugment": lambda: RandAugment(),
    "SAM": lambda: SAM(interval=2),
    "SelectiveBackprop": lambda: SelectiveBackprop(0.0, 0.9, interrupt=0),
    "SWA": lambda: SWA("1ep", "2ep", schedule_swa_lr=True),
}


class Losses(Callback):
    def __init__(self):
        self.seen = []

    def batch_end(self, state: State, logger):
        self.seen.append(float(state.loss.detach()))


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))


def train(algorithms, precision="fp32", microbatch_size=4, seed=5):
    dataset = FakeData(24, (3, 16, 16), num_classes=3, transform=transforms.ToTensor())
    model, losses = ComposerClassifier(network(), num_classes=3), Losses()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=8),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=algorithms,
        callbacks=losses,
        max_duration="3ep",
        device="cpu",
        precision=precision,
        device_train_microbatch_size=microbatch_size,
        progress_bar=False,
        seed=seed,
    ) as trainer:
        trainer.fit()
        return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}, losses.seen


@pytest.fixture(scope="module")
def plain():
    return train([])[0]


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_each_method_changes_training_and_the_seed_repeats_it(make, plain):
    weights, losses = train([make()])
    again, _ = train([make()])
    assert len(losses) == 9
    assert all(map(math.isfinite, losses))
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    assert any(not torch.equal(plain[name], value) for name, value in weights.items())


@pytest.mark.parametrize("name", ["CutMix of losses", "GradientClipping", "SAM", "SelectiveBackprop"])
def test_methods_that_compute_losses_or_gradients_train_in_low_precision(name):
    _, losses = train([METHODS[name]()], "amp_bf16")
    assert all(map(math.isfinite, losses))


def test_many_methods_train_together():
    algorithms = [
        *(RandAugment(depth=1), CutOut(length=0.25), ColOut(), ProgressiveResizing(delay_fraction=0.2)),
        *(SelectiveBackprop(0.0, 0.9), MixUp(), LabelSmoothing(), GradientClipping("norm", 1.0), SAM(interval=2)),
        *(LayerFreezing(freeze_start=0.4), SWA("1ep", "2ep")),
    ]
    weights, losses = train(algorithms)
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert len(losses) == 9


class LanguageModel(ComposerModel):
    """Holds its model as HuggingFaceModel does."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
        self.lengths = []

    def forward(self, batch):
        self.lengths.append(batch["input_ids"].shape[1])
        return self.model(batch["input_ids"])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def test_sequences_grow_in_the_trainer():
    ids = torch.randint(50, (4, 8))
    data = [{"input_ids": ids, "labels": ids}] * 4
    model = LanguageModel()
    with Trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=SeqLengthWarmup(duration=0.5, min_seq_length=2, max_seq_length=8, step_size=2),
        max_duration="8ba",
        device="cpu",
        device_train_microbatch_size=4,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert model.lengths == [8, 2, 2, 4, 6, 8, 8, 8, 8]  # the first one is the trial of the maximal length


def test_gradients_are_clipped_after_all_microbatches_and_before_the_step():
    class Norms(Callback):
        def run_event(self, event, state, logger):
            if event == Event.AFTER_TRAIN_BATCH:
                gradients = [parameter.grad.flatten() for parameter in state.model.parameters()]
                norms.append(torch.cat(gradients).norm().item())

    norms = []
    model = ComposerClassifier(network(), num_classes=3)
    data = DataLoader(TensorDataset(torch.rand(16, 3, 16, 16), torch.randint(3, (16,))), batch_size=8)
    with Trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=GradientClipping("norm", 0.01),
        callbacks=Norms(),
        max_duration="1ep",
        device="cpu",
        device_train_microbatch_size=2,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)
