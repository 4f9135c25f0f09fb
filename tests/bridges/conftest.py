"""A small network, images, and what our own Trainer makes of them with each algorithm."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.resnet import BasicBlock

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer_algorithms import (
    EMA,
    SAM,
    SWA,
    BlurPool,
    CutMix,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    ProgressiveResizing,
    SelectiveBackprop,
    StochasticDepth,
)
from composer_events import Algorithm, Event

SEED = 17
NUM_IMAGES, NUM_EPOCHS = 16, 2


class Images(Dataset):
    """Images as tuples, or as dicts with the two keys."""

    def __init__(self, keys: tuple[str, str] | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.images = torch.rand(NUM_IMAGES, 3, 16, 16, generator=generator)
        self.labels = torch.randint(0, 4, (NUM_IMAGES,), generator=generator)
        self.keys = keys

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> Any:
        item = self.images[index], self.labels[index]
        return item if self.keys is None else dict(zip(self.keys, item, strict=True))


class Network(nn.Module):
    """Two residual blocks; the same weights in every run."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2))
            down = nn.Sequential(nn.Conv2d(16, 32, 1, stride=2), nn.BatchNorm2d(32))
            self.blocks = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 32, stride=2, downsample=down))
            self.head = nn.Linear(32, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Reseed(Algorithm):
    """Let draws from PyTorch's generator be the same however many the libraries make between two batches."""

    def match(self, event: Event, state: Any) -> bool:
        return event is Event.BATCH_START

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        torch.manual_seed(100 + int(state.timestamp.batch))


@dataclass
class Run:
    """What is compared: the loss of each backward pass, and the weights at the end, by the names of a `Network`."""

    losses: list[float]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor] = field(default_factory=dict)

    def assert_same(self, expected: "Run") -> None:
        assert len(self.losses) == len(expected.losses)
        torch.testing.assert_close(
            torch.tensor(self.losses), torch.tensor(expected.losses), rtol=0, atol=1e-6
        )  # float32, and the order of sums may differ
        assert self.weights.keys() == expected.weights.keys()
        for name, weight in self.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=1e-6, msg=name)


class Losses(Callback):
    """Keep the loss of each backward pass."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def before_backward(self, state: Any, logger: Any) -> None:
        self.values.append(state.loss.item())


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


Keys = dict[str, Any]
CASES: dict[str, Callable[[Keys, Any], list[Algorithm]]] = {
    "nothing": lambda keys, key: [],
    "MixUp": lambda keys, key: [MixUp(alpha=0.5, **keys)],
    "MixUp of losses": lambda keys, key: [MixUp(alpha=0.5, interpolate_loss=True, **keys)],
    "MixUp of batches": lambda keys, key: [MixUp(alpha=0.5, draw_per="batch", **keys)],
    "CutMix": lambda keys, key: [CutMix(alpha=1.0, **keys)],
    "LabelSmoothing": lambda keys, key: [LabelSmoothing(0.2, target_key=key)],
    "LabelSmoothing and MixUp": lambda keys, key: [LabelSmoothing(0.2, target_key=key), MixUp(alpha=0.5, **keys)],
    "EMA": lambda keys, key: [EMA(half_life="2ba")],
    "SWA": lambda keys, key: [SWA("0.25dur", "0.75dur", "1ba")],
    "GradientClipping": lambda keys, key: [GradientClipping("norm", 0.05)],
    "SAM": lambda keys, key: [SAM(rho=0.1)],
    "SAM and MixUp": lambda keys, key: [SAM(rho=0.1, interval=2), MixUp(alpha=0.5, **keys)],
    "SAM and StochasticDepth": lambda keys, key: [SAM(rho=0.1), StochasticDepth("ResNetBasicBlock", drop_rate=0.6)],
    "SelectiveBackprop": lambda keys, key: [SelectiveBackprop(start=0.0, end=1.0, keep=0.5, **keys)],
    "StochasticDepth": lambda keys, key: [
        StochasticDepth("ResNetBasicBlock", drop_rate=0.8, drop_warmup="4ba", drop_distribution="uniform")
    ],
    "BlurPool": lambda keys, key: [BlurPool()],
    "LayerFreezing": lambda keys, key: [LayerFreezing(freeze_start=0.0)],
    "ProgressiveResizing": lambda keys, key: [
        ProgressiveResizing(mode="crop", initial_scale=0.5, delay_fraction=0.4, finetune_fraction=0.2, **keys)
    ],
}


@pytest.fixture(autouse=True)
def quiet():
    levels = {log: log.level for log in map(logging.getLogger, ("lightning.pytorch", "composer"))}
    for log in levels:
        log.setLevel(logging.ERROR)
    yield
    for log, level in levels.items():
        log.setLevel(level)


@pytest.fixture
def images():
    return Images


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def new_network():
    return Network


@pytest.fixture
def run_of():
    """Make what is compared of losses and a network."""
    return lambda losses, network, averages=None: Run(list(losses), snapshot(network), averages or {})


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "_"))
def case(request):
    """The name of an algorithm, or of some."""
    return request.param


@pytest.fixture
def algorithms_of():
    """Make the algorithms of a case for batches with such keys."""

    def make(case: str, input_key: Any = 0, target_key: Any = 1) -> list[Algorithm]:
        keys = {"input_key": input_key, "target_key": target_key}
        return [Reseed(), *CASES[case](keys, target_key)]

    return make


@pytest.fixture(scope="session")
def by_our_trainer():
    """What the Trainer of composer-suite makes of a case: run once for each."""
    runs: dict[Any, Run] = {}

    def run(case: str, batch_size: int = 4, microbatch_size: int | None = None, precision: str = "fp32") -> Run:
        key = (case, batch_size, microbatch_size, precision)
        if key not in runs:
            runs[key] = train(case, batch_size, microbatch_size, precision)
        return runs[key]

    return run


def train(case: str, batch_size: int, microbatch_size: int | None, precision: str) -> Run:
    network, losses = Network(), Losses()
    algorithms = [Reseed(), *CASES[case]({"input_key": 0, "target_key": 1}, 1)]
    trainer = Trainer(
        ComposerModel.from_module(network, F.cross_entropy),
        train_dataloader=DataLoader(Images(), batch_size=batch_size),
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
        max_duration="2ep",
        precision=precision,
        algorithms=algorithms,
        callbacks=losses,
        device_train_microbatch_size=microbatch_size,
        seed=SEED,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    averages = {}
    for algorithm in algorithms:
        if isinstance(algorithm, EMA):
            copy = ComposerModel.from_module(Network(), F.cross_entropy)
            averages = snapshot(algorithm.get_ema_model(copy).module)
    trainer.close()
    return Run(losses.values, snapshot(network), averages)


@pytest.fixture(scope="session")
def eval_loss_of():
    """Compute the loss of all images with some weights."""

    def compute(weights: dict[str, Tensor]) -> float:
        network, data = Network(), Images()
        network.load_state_dict(weights)
        with torch.no_grad():
            return F.cross_entropy(network.eval()(data.images), data.labels).item()

    return compute


@pytest.fixture(scope="session")
def assert_weights():
    """Compare weights by name, within the rounding of float32."""

    def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)

    return check
