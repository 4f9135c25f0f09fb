"""Code as users of Composer wrote it, from its welcome tour, its guides and a blog post.

Each text below is what they published. What of it is changed is said at the test that runs it, line by line and with
the reason; everything else runs as it stands. The names that a text leaves to its reader are given to it.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIMPLE_LOOP = """
for epoch in range(NUM_EPOCHS):
    for inputs, targets in dataloader:
        outputs = model.forward(inputs)
        loss = model.loss(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

FUNCTIONAL_LOOP = """
from composer import functional as cf

for epoch in range(NUM_EPOCHS):
    for inputs, targets in dataloader:
        inputs, targets_perm, mixing = cf.mixup_batch(inputs, targets, alpha=0.2)
        outputs = model.forward(inputs)
        loss = (1 - mixing) * model.loss(outputs, targets) + mixing * model.loss(outputs, targets_perm)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

MIXUP_OF_THE_TOUR = '''
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
            state.loss *= (1 - self.mixing)
            state.loss += self.mixing * new_loss
'''

EVENT_LOOP = """
from composer import Time

state = State(
    model=your_model,  # ComposerModel
    max_duration=Time(10, 'epoch'),
    rank_zero_seed=0,
    dataloader=your_dataloader  # torch.utils.DataLoader,
)

engine = Engine(state=state, algorithms=[MixUp()])

engine.run_event("init")
engine.run_event("fit_start")
for epoch in range(NUM_EPOCHS):
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
"""

CUSTOM_ALGORITHM = """
from composer.core import Algoritm, Event

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

from composer import Trainer
from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast

channels_last = ChannelsLast()
blurpool = BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True)
custom_algorithm = MyAlgorithm(hparam1=1)

trainer = Trainer(model=model,
                train_dataloader=train_dataloader,
                eval_dataloader=test_dataloader,
                max_duration='90ep',
                device='gpu',
                algorithms=[channels_last, blurpool, custom_algorithm],
                eval_interval="0ep",
                seed=42)
"""

RESNET = """
import torchvision
import torch.nn.functional as F

from composer.models import ComposerModel

class ResNet18(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = torchvision.models.resnet18()

    def forward(self, batch):
        inputs, _ = batch
        return self.model(inputs)

    def loss(self, outputs, batch):
        _, targets = batch
        return F.cross_entropy(outputs, targets)

import torch

trainer = Trainer(
    model=ResNet18(),
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    optimizers=torch.optim.Adam(lr=0.01),
    max_duration=10,  # epochs
    device='gpu'
)

trainer.fit()
"""

TWO_ALGORITHMS = """
from composer import Trainer
from composer.algorithms import LayerFreezing, MixUp

trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='2ep',
    algorithms=[
        LayerFreezing(freeze_start=0.5, freeze_level=0.1),
        MixUp(alpha=0.1),
    ])

# the algorithms will automatically be applied during the appropriate
# points of the training loop
trainer.fit()
"""

TORCH_SCHEDULER = """
from composer import Trainer
from composer.models import composer_resnet
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR

model = composer_resnet(model_name="resnet50", num_classes=1000)
optimizer = SGD(model.parameters(), lr=0.1)
scheduler = LinearLR(optimizer)

trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='90ep',
    optimizers=optimizer,
    schedulers=scheduler
)
"""

COMPOSER_SCHEDULER = """
from composer import Trainer
from composer.optim.scheduler import MultiStepScheduler

trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    max_duration='90ep',
    schedulers=MultiStepScheduler(
        milestones=['0.3dur', '0.5dur', '0.9dur'],
        gamma=0.1
))
"""

REPRODUCIBLE = """
import torch.nn as nn
from composer.utils import reproducibility

reproducibility.configure_deterministic_mode()
reproducibility.seed_all(42)

model = MyModel()

def init_weights(m):
    if isinstance(m, torch.nn.Linear):
        nn.init.xavier_uniform(m.weight)

# model will now be deterministically initialized, since the seed is set.
init_weights(model)
trainer = Trainer(model=model, seed=42)
"""

# The post lost its indentation where it was published; that is put back.
CLASSIFIER_OF_THE_BLOG_POST = """
class ComposerClassifier(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = torchvision.models.resnet18()
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=1000, average='micro')
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=1000, average='micro')
    ...
    def eval_forward(self, batch, outputs):
        if outputs:
            return outputs
        inputs, _ = batch
        outputs = self.model(inputs)
        return outputs
    def update_metric(self, batch, outputs, metric):
        _, targets = batch
        metric.update(outputs, targets)
    def get_metrics(self, is_train=False):
        # defines which metrics to use in each phase of training
        return {'MulticlassAccuracy': self.train_accuracy} if train else {'MulticlassAccuracy': self.val_accuracy}
"""

SAMPLER = """
from composer.utils import dist
sampler = dist.get_sampler(dataset, shuffle=True)
dataloader = DataLoader(dataset, batch_size=32, sampler=sampler)
"""

RANKS = """
from composer.utils import dist
dist.get_world_size()  # torch.distributed.get_world_size()
dist.get_local_rank()
dist.get_global_rank()  # torch.distributed.get_rank()
"""

NO_GPU = ("device='gpu'", "device='cpu'", "tests have no GPU to count on")
ADAM = "the guide's Adam is given no parameters to train"
SMALL = "the network here has 10 classes"
TRAIN_10 = "self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10"
VAL_10 = "self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10"
REST_OF_THE_CLASS = """
    def forward(self, batch):
        inputs, _ = batch
        return self.model(inputs)

    def loss(self, outputs, batch):
        _, targets = batch
        return F.cross_entropy(outputs, targets)
"""
NO_OPTIMIZER = pytest.mark.filterwarnings("ignore:No optimizer was specified:UserWarning")
OLD_ENGINE = pytest.mark.filterwarnings("ignore:Engine.state, algorithms=:DeprecationWarning")


@pytest.fixture
def run():
    """Run a published text with what it leaves to its reader, and return all its names.

    A change is the text that is replaced, which must be there exactly once, what stands there instead, and why.
    """
    trainers = []

    def run(text, *changes, **names):
        for old, new, why in changes:
            assert text.count(old) == 1, f"{old!r}, which is changed since {why}, is not in the text"
            text = text.replace(old, new)
        exec(compile(text, "<published>", "exec"), names)
        trainers.extend([names["trainer"]] if "trainer" in names else [])
        return names

    yield run
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def dataloader():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(12, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(12) % 10), batch_size=4)


@pytest.fixture
def loaders(dataloader):
    return {"train_dataloader": dataloader, "eval_dataloader": dataloader}


@pytest.fixture
def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 10))


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


@pytest.fixture
def your_model(network):
    """Make the model that the welcome tour's loops leave to their reader; it keeps what it was called with."""
    from composer.models import ComposerModel

    class YourModel(ComposerModel):
        def __init__(self):
            super().__init__()
            self.network = network
            self.seen_inputs, self.seen_targets = [], []

        def forward(self, inputs):  # the loops hand it inputs
            self.seen_inputs.append(inputs)
            return self.network(inputs)

        def loss(self, outputs, targets):  # the loops hand it targets, the tour's MixUp a pair of inputs and targets
            if isinstance(targets, tuple):
                _, targets = targets
            self.seen_targets.append(targets)
            return F.cross_entropy(outputs, targets)

    return YourModel()


@pytest.fixture
def mixup_of_the_tour(run):
    from composer import Algorithm, Event, Logger, State
    from composer.functional import mixup_batch

    names = {"Algorithm": Algorithm, "Event": Event, "Logger": Logger, "State": State, "mixup_batch": mixup_batch}
    return run(MIXUP_OF_THE_TOUR, **names)["MixUp"]


@pytest.mark.parametrize("loop", [SIMPLE_LOOP, FUNCTIONAL_LOOP])
def test_the_first_loops_of_the_welcome_tour(run, loop, your_model, dataloader):
    before = copy.deepcopy(your_model.state_dict())
    optimizer = torch.optim.SGD(your_model.parameters(), lr=0.1)
    run(loop, NUM_EPOCHS=2, dataloader=dataloader, model=your_model, optimizer=optimizer)
    assert not any(map(torch.equal, before.values(), your_model.state_dict().values()))
    is_plain = all(map(torch.equal, your_model.seen_inputs, [inputs for inputs, _ in dataloader] * 2))
    assert is_plain == (loop is SIMPLE_LOOP)


@pytest.fixture
def train_by_events(run, your_model, dataloader):
    """Run the hand-written loop of the welcome tour."""

    def train(MixUp):
        from composer import Engine, State

        given = {"Engine": Engine, "State": State, "torch": torch, "NUM_EPOCHS": 2}
        given |= {"your_model": your_model, "your_dataloader": dataloader, "dataloader": dataloader}
        run(
            EVENT_LOOP,
            (
                "\nengine = Engine(",
                "\nstate.optimizers = torch.optim.SGD(your_model.parameters(), lr=0.1)"
                "\nstate.schedulers = torch.optim.lr_scheduler.ExponentialLR(state.optimizers[0], 0.9)"
                "\nengine = Engine(",
                "the loop steps optimizers and schedulers, and nothing in it says which",
            ),
            **given,
            MixUp=MixUp,
        )["engine"].close()

    return train


@OLD_ENGINE
def test_the_event_loop_of_the_welcome_tour_trains_as_its_functional_loop_does(
    run, train_by_events, mixup_of_the_tour, your_model, dataloader
):
    model = copy.deepcopy(your_model)
    torch.manual_seed(1)
    train_by_events(mixup_of_the_tour)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)
    zero_grad = ("optimizer.zero_grad()", "scheduler.step()", "the event loop steps a scheduler and drops no gradients")
    names = {"NUM_EPOCHS": 2, "dataloader": dataloader, "model": model}
    run(FUNCTIONAL_LOOP, zero_grad, **names, optimizer=optimizer, scheduler=scheduler)
    torch.testing.assert_close(your_model.state_dict(), model.state_dict())


@OLD_ENGINE
def test_the_event_loop_of_the_welcome_tour_does_not_pretend_to_train_without_an_optimizer(
    run, mixup_of_the_tour, your_model, dataloader
):
    from composer import Engine, State

    names = {"Engine": Engine, "State": State, "MixUp": mixup_of_the_tour, "NUM_EPOCHS": 2}
    with pytest.raises(RuntimeError, match=r"state\.optimizers=\[\] has nothing to step.*Set one before training"):
        run(EVENT_LOOP, **names, your_model=your_model, your_dataloader=dataloader, dataloader=dataloader)


@OLD_ENGINE
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_the_event_loop_of_the_welcome_tour_trains_with_the_mixup_of_the_library(
    train_by_events, your_model, dataloader, interpolate_loss
):
    from composer.algorithms import MixUp

    train_by_events(lambda: MixUp(alpha=1.0, interpolate_loss=interpolate_loss))
    plain_inputs, plain_targets = map(list, zip(*[*dataloader, *dataloader], strict=True))
    assert not any(map(torch.equal, your_model.seen_inputs, plain_inputs))
    if interpolate_loss:  # the loss of the batch's own targets, then that of the others'
        assert all(map(torch.equal, your_model.seen_targets[::2], plain_targets))
    else:
        assert all(targets.shape == (4, 10) for targets in your_model.seen_targets)


def test_the_welcome_tours_mixup_in_the_trainer(model, dataloader, mixup_of_the_tour):
    from composer import Trainer

    with Trainer(
        model=model,
        train_dataloader=dataloader,
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=[mixup_of_the_tour()],
        device="cpu",
        progress_bar=False,
        seed=42,
    ) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == 6


@NO_OPTIMIZER
def test_the_custom_algorithm_of_the_algorithms_guide(run, model, dataloader):
    seen = []

    def process_inputs(batch, hparam):
        seen.append("inputs")
        return (batch[0] * hparam, batch[1])

    def process_outputs(outputs):
        seen.append("outputs")
        return outputs * 2

    trainer = run(
        CUSTOM_ALGORITHM,
        ("import Algoritm, Event", "import Algorithm, Event", "the guide misspells the class that it derives from"),
        ("'90ep'", "'1ep'", "a test takes no 90 epochs"),
        NO_GPU,
        process_inputs=process_inputs,
        process_outputs=process_outputs,
        model=model,
        train_dataloader=dataloader,
        test_dataloader=dataloader,
    )["trainer"]
    trainer.fit()
    assert seen == ["inputs", "outputs"] * 3
    assert torch.equal(trainer.state.output, trainer.state.outputs * 2)
    assert any("Blur" in type(part).__name__ for part in model.modules())


def test_the_resnet_of_the_trainer_guide(run, loaders):
    from composer import Trainer

    state = run(
        RESNET,
        ("trainer = Trainer(\n    model=ResNet18(),", "model = ResNet18()\ntrainer = Trainer(\n    model=model,", ADAM),
        ("torch.optim.Adam(lr=0.01)", "torch.optim.Adam(model.parameters(), lr=0.01)", ADAM),
        ("max_duration=10,", "max_duration=1,", "a test takes no ten epochs"),
        NO_GPU,
        **loaders,
        Trainer=Trainer,
    )["trainer"].state
    assert state.timestamp.batch == 3


@NO_OPTIMIZER
def test_two_algorithms_of_the_trainer_guide(run, model, loaders):
    trainer = run(TWO_ALGORITHMS, **loaders, model=model)["trainer"]
    assert trainer.state.timestamp.batch == 6


def test_a_scheduler_of_pytorchs_of_the_trainer_guide(run, loaders):
    names = run(
        TORCH_SCHEDULER,
        ('model_name="resnet50", num_classes=1000', 'model_name="resnet18", num_classes=10', "it takes less time"),
        ("'90ep'", "'2ep'", "a test takes no 90 epochs"),
        **loaders,
    )
    names["trainer"].fit()
    assert names["scheduler"].last_epoch == 2


@NO_OPTIMIZER
def test_a_scheduler_of_composers_of_the_trainer_guide(run, model, dataloader):
    short = ("'90ep'", "'4ep'", "a test takes no 90 epochs")
    trainer = run(COMPOSER_SCHEDULER, short, model=model, train_dataloader=dataloader)["trainer"]
    trainer.fit()
    group = trainer.state.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(1e-3 * group["initial_lr"])


@NO_OPTIMIZER
def test_reproducibility_of_the_trainer_guide(run):
    from composer import Trainer
    from composer.models import ComposerClassifier

    def make_model():
        return ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), num_classes=10)

    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        names = {"torch": torch, "Trainer": Trainer, "MyModel": make_model}
        first, second = (run(REPRODUCIBLE, **names)["model"].state_dict() for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(deterministic)


def test_composer_model_with_metrics_of_the_blog_post(run, network, dataloader):
    import torchmetrics

    from composer import Trainer
    from composer.models import ComposerModel

    Classifier = run(
        CLASSIFIER_OF_THE_BLOG_POST,
        ("torchvision.models.resnet18()", "network", "it takes less time"),
        ("self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=1000", TRAIN_10, SMALL),
        ("self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=1000", VAL_10, SMALL),
        ("    ...\n", REST_OF_THE_CLASS, "the post leaves out forward and loss, which it shows before"),
        ("if outputs:", "if outputs is not None:", "a tensor of several numbers is neither true nor false"),
        ("if train else", "if is_train else", "the parameter is called is_train, and nothing is called train"),
        network=network,
        torchmetrics=torchmetrics,
        ComposerModel=ComposerModel,
        F=F,
    )["ComposerClassifier"]
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


def test_ranks_outside_of_a_launcher_are_those_of_a_single_process(run):
    dist = run(RANKS)["dist"]
    assert (dist.get_world_size(), dist.get_local_rank(), dist.get_global_rank()) == (1, 0, 0)


def test_a_sampler_for_a_dataset(run, dataloader):
    loader = run(SAMPLER, dataset=dataloader.dataset, DataLoader=DataLoader)["dataloader"]
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
