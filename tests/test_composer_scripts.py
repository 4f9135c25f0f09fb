"""Code as users of Composer wrote it, from its welcome tour and guides: it runs as it was written."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture
def dataloader():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(12, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(12) % 10), batch_size=4)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


@pytest.fixture
def model(network):
    from composer.models import ComposerModel

    class Net(ComposerModel):
        def __init__(self):
            super().__init__()
            self.model = network

        def forward(self, batch):
            inputs, _ = batch
            return self.model(inputs)

        def loss(self, outputs, batch):
            _, targets = batch
            return F.cross_entropy(outputs, targets)

    return Net()


def welcome_tour_mixup():
    """Make the class MixUp of the welcome tour."""
    from composer import Algorithm, Event, Logger, State
    from composer.functional import mixup_batch

    class MixUp(Algorithm):
        def match(self, event: Event, state: State) -> bool:
            """Determines whether the algorithm should run on a given event."""
            return event in [Event.AFTER_DATALOADER, Event.AFTER_LOSS]

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            """Run the algorithm by modifying the State."""
            input, target = state.batch

            if event == Event.AFTER_DATALOADER:
                new_input, self.permuted_target, self.mixing = mixup_batch(input, target, alpha=0.2)
                state.batch = (new_input, target)

            if event == Event.AFTER_LOSS:
                modified_batch = (input, self.permuted_target)
                new_loss = state.model.loss(state.outputs, modified_batch)
                state.loss *= 1 - self.mixing
                state.loss += self.mixing * new_loss

    return MixUp


def test_the_functional_loop_of_the_welcome_tour(network, dataloader):
    from composer import functional as cf

    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    for _ in range(2):
        for inputs, targets in dataloader:
            inputs, targets_perm, mixing = cf.mixup_batch(inputs, targets, alpha=0.2)
            outputs = network.forward(inputs)
            loss = (1 - mixing) * F.cross_entropy(outputs, targets) + mixing * F.cross_entropy(outputs, targets_perm)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(before[0], next(network.parameters()))


@pytest.fixture
def your_model(network):
    """Make the model that the welcome tour's loop leaves to its reader; it keeps what it was called with."""
    from composer.models import ComposerModel

    class YourModel(ComposerModel):
        def __init__(self):
            super().__init__()
            self.network = network
            self.seen_inputs, self.seen_targets = [], []

        def forward(self, inputs):  # the loop hands it inputs
            self.seen_inputs.append(inputs)
            return self.network(inputs)

        def loss(self, outputs, targets):  # the loop hands it targets, the tour's MixUp a pair of inputs and targets
            if isinstance(targets, tuple):
                _, targets = targets
            self.seen_targets.append(targets)
            return F.cross_entropy(outputs, targets)

    return YourModel()


def train_by_events(your_model, your_dataloader, MixUp):
    """Run the hand-written loop of the welcome tour; optimizers and schedulers are what it leaves to its reader."""
    from composer import Engine, State

    dataloader = your_dataloader
    NUM_EPOCHS = 2

    # fmt: off
    from composer import Time

    state = State(
        model=your_model,  # ComposerModel
        max_duration=Time(10, 'epoch'),
        rank_zero_seed=0,
        dataloader=your_dataloader  # torch.utils.DataLoader,
    )
    state.optimizers = torch.optim.SGD(your_model.parameters(), lr=0.1)
    state.schedulers = torch.optim.lr_scheduler.ExponentialLR(state.optimizers[0], 0.9)

    engine = Engine(state=state, algorithms=[MixUp()])

    engine.run_event("init")
    engine.run_event("fit_start")
    for epoch in range(NUM_EPOCHS):  # noqa: B007
        engine.run_event("epoch_start")
        for state.inputs, state.targets in dataloader:
            engine.run_event("after_dataloader")

            engine.run_event("batch_start")

            engine.run_event("before_forward")
            state.outputs = state.model.forward(state.inputs)
            engine.run_event("after_forward")

            engine.run_event("before_loss")
            state.loss = state.model.loss(state.outputs, state.targets)
            engine.run_event("after_loss")

            engine.run_event("before_backward")
            state.loss.backward()
            engine.run_event("after_backward")

            state.optimizers.step()
            state.schedulers.step()

            engine.run_event("batch_end")
        engine.run_event("epoch_end")
    # fmt: on
    engine.close()


@pytest.mark.filterwarnings("ignore:Engine.state, algorithms=:DeprecationWarning")
def test_the_event_loop_of_the_welcome_tour_trains_as_its_functional_loop_does(your_model, dataloader):
    from composer import functional as cf

    network = copy.deepcopy(your_model.network)
    torch.manual_seed(1)
    train_by_events(your_model, dataloader, welcome_tour_mixup())

    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)
    for _ in range(2):
        for inputs, targets in dataloader:
            inputs, targets_perm, mixing = cf.mixup_batch(inputs, targets, alpha=0.2)
            outputs = network.forward(inputs)
            loss = (1 - mixing) * F.cross_entropy(outputs, targets) + mixing * F.cross_entropy(outputs, targets_perm)
            loss.backward()
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(your_model.network.state_dict(), network.state_dict())


@pytest.mark.filterwarnings("ignore:Engine.state, algorithms=:DeprecationWarning")
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_the_event_loop_of_the_welcome_tour_trains_with_the_mixup_of_the_library(
    your_model, dataloader, interpolate_loss
):
    from composer.algorithms import MixUp

    train_by_events(your_model, dataloader, lambda: MixUp(alpha=1.0, interpolate_loss=interpolate_loss))
    plain_inputs, plain_targets = map(list, zip(*[*dataloader, *dataloader], strict=True))
    assert not any(map(torch.equal, your_model.seen_inputs, plain_inputs))
    if interpolate_loss:  # the loss of the batch's own targets, then that of the others'
        assert all(map(torch.equal, your_model.seen_targets[::2], plain_targets))
    else:
        assert all(targets.shape == (4, 10) for targets in your_model.seen_targets)


def test_the_welcome_tours_mixup_in_the_trainer(model, dataloader):
    from composer import Trainer

    with Trainer(
        model=model,
        train_dataloader=dataloader,
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=[welcome_tour_mixup()()],
        device="cpu",
        progress_bar=False,
        seed=42,
    ) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == 6


def test_the_custom_algorithm_of_the_algorithms_guide(model, dataloader):
    from composer import Trainer
    from composer.core import Algorithm, Event

    seen = []

    def process_inputs(batch, hparam):
        seen.append("inputs")
        return (batch[0] * hparam, batch[1])

    def process_outputs(outputs):
        seen.append("outputs")
        return outputs * 2

    class MyAlgorithm(Algorithm):
        def __init__(self, hparam1=1):
            self.hparam1 = hparam1

        def match(self, event, state):
            return event in [Event.AFTER_DATALOADER, Event.AFTER_FORWARD]

        def apply(self, event, state, logger):
            if event == Event.AFTER_DATALOADER:
                state.batch = process_inputs(state.batch, self.hparam1)
            if event == Event.AFTER_FORWARD:
                state.output = process_outputs(state.outputs)

    trainer = Trainer(
        model=model,
        train_dataloader=dataloader,
        eval_dataloader=dataloader,
        max_duration="1ep",
        device="cpu",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=[MyAlgorithm(hparam1=1)],
        eval_interval="0ep",
        progress_bar=False,
        seed=42,
    )
    trainer.fit()
    trainer.close()
    assert seen == ["inputs", "outputs"] * 3
    assert torch.equal(trainer.state.output, trainer.state.outputs * 2)


def test_schedulers_and_optimizers_of_the_trainer_guide(dataloader):
    from torch.optim import SGD
    from torch.optim.lr_scheduler import LinearLR

    from composer import Trainer
    from composer.models import composer_resnet
    from composer.optim.scheduler import MultiStepScheduler

    model = composer_resnet(model_name="resnet18", num_classes=10)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = LinearLR(optimizer)
    settings = {
        "model": model,
        "train_dataloader": dataloader,
        "optimizers": optimizer,
        "device": "cpu",
        "progress_bar": False,
        "train_subset_num_batches": 1,
    }
    with Trainer(max_duration="2ep", schedulers=scheduler, **settings) as trainer:
        trainer.fit()
        assert scheduler.last_epoch == 2
    milestones = MultiStepScheduler(milestones=["0.3dur", "0.5dur", "0.9dur"], gamma=0.1)
    with Trainer(max_duration="4ep", schedulers=milestones, **settings) as trainer:
        trainer.fit()
        assert trainer.state.schedulers[0].get_last_lr()[0] == pytest.approx(
            1e-3 * optimizer.param_groups[0]["initial_lr"]
        )


def test_reproducibility_of_the_trainer_guide():
    from composer.utils import reproducibility

    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        reproducibility.configure_deterministic_mode()
        weights = []
        for _ in range(2):
            reproducibility.seed_all(42)
            weights.append(nn.Linear(3, 3).weight.detach())
        assert torch.equal(*weights)
    finally:
        torch.use_deterministic_algorithms(deterministic)


def test_composer_model_with_metrics_of_the_blog_post(network, dataloader):
    import torchmetrics

    from composer import Trainer
    from composer.models import ComposerModel

    class Classifier(ComposerModel):
        def __init__(self):
            super().__init__()
            self.model = network
            self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10, average="micro")
            self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10, average="micro")

        def forward(self, batch):
            inputs, _ = batch
            return self.model(inputs)

        def loss(self, outputs, batch):
            _, targets = batch
            return F.cross_entropy(outputs, targets)

        def eval_forward(self, batch, outputs):
            if outputs is not None:
                return outputs
            inputs, _ = batch
            return self.model(inputs)

        def update_metric(self, batch, outputs, metric):
            _, targets = batch
            metric.update(outputs, targets)

        def get_metrics(self, is_train=False):
            return {"MulticlassAccuracy": self.train_accuracy if is_train else self.val_accuracy}

    model = Classifier()
    with Trainer(
        model=model,
        train_dataloader=dataloader,
        eval_dataloader=dataloader,
        max_duration=1,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert 0 <= float(trainer.state.eval_metric_values["MulticlassAccuracy"]) <= 1


def test_ranks_outside_of_a_launcher_are_those_of_a_single_process():
    from composer.utils import dist

    assert dist.get_world_size() == 1
    assert dist.get_local_rank() == 0
    assert dist.get_global_rank() == 0


def test_a_sampler_for_a_dataset(dataloader):
    from composer.utils import dist

    sampler = dist.get_sampler(dataloader.dataset, shuffle=True)
    loader = DataLoader(dataloader.dataset, batch_size=32, sampler=sampler)
    assert len(next(iter(loader))[0]) == 12


def test_validate_and_metrics_of_older_models_still_evaluate(network, dataloader):
    import torchmetrics

    from composer import Trainer
    from composer.models import ComposerModel

    def validate(self, batch):
        inputs, targets = batch
        return self.model(inputs), targets

    def metrics(self, train=False):
        return torchmetrics.classification.MulticlassAccuracy(num_classes=10, average="micro")

    methods = {
        "forward": lambda self, batch: self.model(batch[0]),
        "loss": lambda self, outputs, batch: F.cross_entropy(outputs, batch[1]),
        "validate": validate,
        "metrics": metrics,
    }
    with pytest.warns(DeprecationWarning, match=r"validate\(batch\) and metrics\(train\)"):
        older = type("Older", (ComposerModel,), methods)

    model = older()
    model.model = network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"device": "cpu", "progress_bar": False, "optimizers": optimizer}
    with Trainer(model=model, eval_dataloader=dataloader, **settings) as trainer:
        trainer.eval()
    assert "MulticlassAccuracy" in trainer.state.eval_metric_values
