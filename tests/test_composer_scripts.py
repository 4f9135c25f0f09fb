"""Code as users of Composer wrote it, from its welcome tour, its guides and a blog post.

Each text below is what they published. What of it is changed is said at the test that runs it, line by line and with
the reason; everything else runs as it stands. The names that a text leaves to its reader are given to it.
"""

import copy
import re
import subprocess
import sys
from pathlib import Path

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

SPEED_MONITOR = """
from composer import Trainer
from composer.callbacks import SpeedMonitor

# include a callback for tracking throughput/step during training
trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='160ep',
    device='gpu',
    callbacks=[SpeedMonitor(window_size=100)]
)
"""

MIXED_PRECISION = """
from composer import Trainer

# use mixed precision during training
trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='160ep',
    device='gpu',
    precision='amp'
)
"""

SAVE = """
from composer import Trainer

### Saving checkpoints
trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='160ep',
    device='gpu',
    # Checkpointing params
    save_folder: 'checkpoints',
    save_interval: '1ep'
)

# will save checkpoints to the 'checkpoints' folder every epoch
trainer.fit()
"""

LOAD = """
from composer import Trainer

### Loading checkpoints
trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='160ep',
    device='gpu',
    # Checkpointing params
    load_path='path/to/checkpoint/mosaic_states.pt'
)

# will load the trainer state (including model weights) from the
# load_path before resuming training
trainer.fit()
"""

GRAD_ACCUM = """
from composer import Trainer

trainer = Trainer(
    ...,
    grad_accum=2,
)
"""

SEED = """
from composer import Trainer

trainer = Trainer(
    ...,
    seed=42,
)
"""

ON_CPU = """
from composer import Trainer

trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='2ep',
    device='cpu'
)
"""

RUN_TRAINER = """
# run_trainer.py

from composer import Trainer

trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='160ep',
    device='gpu'
)
trainer.fit()
"""

WITH_DEEPSPEED = RUN_TRAINER.replace(
    """
    device='gpu'
)
trainer.fit()
""",
    """
    device='gpu',
    deepspeed_config={
        "train_batch_size": 2048,
        "fp16": {"enabled": True},
})
""",
)

LAUNCH = "composer -n 8 --stdout stdout_{rank}.log --stderr stderr_{rank}.log script.py"

USAGE = """
usage: composer [-h] [--version] [-n NPROC] [--stdout STDOUT]
                [--stderr STDERR] [-v] [-m] [-c] [--world_size WORLD_SIZE]
                [--base_rank BASE_RANK] [--node_rank NODE_RANK]
                [--master_addr MASTER_ADDR] [--master_port MASTER_PORT]
                training_script ...
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


@pytest.fixture
def for_the_guide(model, loaders, tmp_path, monkeypatch):
    """Give the Trainer guide what it leaves to its reader, and a folder to write to."""
    monkeypatch.chdir(tmp_path)
    return {"model": model, **loaders}


@NO_OPTIMIZER
def test_the_speed_monitor_of_the_trainer_guide(run, for_the_guide):
    two_epochs = ("'160ep'", "'2ep'", "a test takes no 160 epochs")
    trainer = run(SPEED_MONITOR, two_epochs, NO_GPU, **for_the_guide)["trainer"]
    trainer.fit()
    assert trainer.state.timestamp.batch == 6


@NO_OPTIMIZER
@pytest.mark.filterwarnings("ignore:precision='amp':DeprecationWarning")
def test_mixed_precision_of_the_trainer_guide_is_refused_without_a_gpu(run, for_the_guide):
    with pytest.raises(ValueError, match="not supported for CPU training"):
        run(MIXED_PRECISION, NO_GPU, **for_the_guide)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@NO_OPTIMIZER
@pytest.mark.filterwarnings("ignore:precision='amp':DeprecationWarning")
def test_mixed_precision_of_the_trainer_guide(run, for_the_guide):
    two_epochs = ("'160ep'", "'2ep'", "a test takes no 160 epochs")
    trainer = run(MIXED_PRECISION, two_epochs, **for_the_guide)["trainer"]
    trainer.fit()
    assert trainer.state.precision == "amp_fp16"


@NO_OPTIMIZER
def test_saving_of_the_trainer_guide(run, for_the_guide):
    trainer = run(
        SAVE,
        ("'160ep'", "'2ep'", "a test takes no 160 epochs"),
        NO_GPU,
        ("save_folder: ", "save_folder=", "the guide writes a colon, which is no Python, where it means ="),
        ("save_interval: ", "save_interval=", "of the same"),
        **for_the_guide,
    )["trainer"]
    assert trainer.state.timestamp.epoch == 2
    saved = sorted(path.name for path in Path("checkpoints").glob("ep*.pt"))
    assert saved == ["ep1-ba3-rank0.pt", "ep2-ba6-rank0.pt"]


@NO_OPTIMIZER
def test_loading_of_the_trainer_guide(run, for_the_guide, dataloader, network):
    from composer import Trainer

    model = for_the_guide["model"]
    with Trainer(model=model, train_dataloader=dataloader, device="cpu", max_duration="1ep") as trainer:
        trainer.fit()
        trainer.save_checkpoint("path/to/checkpoint/mosaic_states.pt")
    two_epochs = ("'160ep'", "'2ep'", "a test takes no 160 epochs")
    loaded = []
    with torch.no_grad():
        network[-1].weight.zero_()  # which loading undoes
    seen = (
        "trainer.fit()",
        "loaded.append(trainer.state.timestamp.batch.value)\ntrainer.fit()",
        "the test looks where the trainer is before it goes on",
    )
    trainer = run(LOAD, two_epochs, NO_GPU, seen, loaded=loaded, **for_the_guide)["trainer"]
    assert (loaded, int(trainer.state.timestamp.batch)) == ([3], 6)
    assert bool(network[-1].weight.any())


LEFT_OUT = """model=model,
    train_dataloader=train_dataloader,
    device='cpu',
    max_duration='1ep',"""


@NO_OPTIMIZER
@pytest.mark.filterwarnings("ignore:grad_accum=:DeprecationWarning")
def test_gradient_accumulation_of_the_trainer_guide(run, for_the_guide):
    trainer = run(GRAD_ACCUM, ("...,", LEFT_OUT, "the guide leaves these out"), **for_the_guide)["trainer"]
    trainer.fit()
    assert trainer.state.timestamp.batch == 3
    assert trainer.state.device_train_microbatch_size == 2


@pytest.mark.filterwarnings("ignore:grad_accum=:DeprecationWarning")
def test_automatic_gradient_accumulation_of_the_trainer_guide_is_refused_without_a_gpu(run, for_the_guide):
    automatic = ("grad_accum=2", "grad_accum='auto'", "the guide says so in the text below")
    with pytest.raises(ValueError, match="on GPU"):
        run(GRAD_ACCUM, ("...,", LEFT_OUT, "the guide leaves these out"), automatic, **for_the_guide)


@NO_OPTIMIZER
def test_the_seed_of_the_trainer_guide(run, for_the_guide):
    trainer = run(SEED, ("...,", LEFT_OUT, "the guide leaves these out"), **for_the_guide)["trainer"]
    assert trainer.state.rank_zero_seed == 42


@NO_OPTIMIZER
def test_the_device_of_the_trainer_guide(run, for_the_guide):
    trainer = run(ON_CPU, **for_the_guide)["trainer"]
    trainer.fit()
    assert trainer.state.timestamp.batch == 6


@pytest.mark.parametrize(
    ("batch_size", "said"), [(2048, "train_batch_size.*2048"), (4, "not supported for CPU training|fp16")]
)
def test_deepspeed_of_the_guides_is_read_and_refused_without_a_gpu(run, for_the_guide, batch_size, said):
    pytest.importorskip("deepspeed")
    of_the_loader = ('"train_batch_size": 2048', f'"train_batch_size": {batch_size}', "a batch here has 4 samples")
    optimizer = ("device=", "optimizers=optimizer, device=", "DeepSpeed's engine takes one, and the guides name none")
    names = {**for_the_guide, "optimizer": torch.optim.SGD(for_the_guide["model"].parameters(), lr=0.1)}
    with pytest.raises(ValueError, match=said):
        run(WITH_DEEPSPEED, NO_GPU, of_the_loader, optimizer, **names)


# What the guide's script and the sampler's text leave to their reader.
READY = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from composer.models import ComposerClassifier

dataset = TensorDataset(torch.rand(40, 4), torch.arange(40) % 3)
{sampler}
train_dataloader = eval_dataloader = dataloader
model = ComposerClassifier(torch.nn.Linear(4, 3), num_classes=3)
"""


@pytest.mark.slow
def test_the_launched_script_of_the_guides(tmp_path):
    one_epoch = RUN_TRAINER.replace("'160ep'", "'1ep'")  # a test takes no 160 epochs
    on_cpu = one_epoch.replace("device='gpu'", "device='cpu'")  # tests have no GPU to count on
    told = "\nprint('rank', dist.get_global_rank(), 'of', dist.get_world_size(), 'at', trainer.state.timestamp.batch)\n"
    (tmp_path / "script.py").write_text(READY.format(sampler=SAMPLER) + RANKS + on_cpu + told)
    command = LAUNCH.replace("-n 8", "-n 2").split()  # two ranks are many enough
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "rank 0 of 2 at" in run.stdout
    assert "rank 1 of 2 at" not in run.stdout
    assert "rank 1 of 2 at" in (tmp_path / "stdout_1.log").read_text()
    assert (tmp_path / "stderr_1.log").exists()


def test_the_launcher_has_every_option_of_the_guide():
    run = subprocess.run([sys.executable, "-m", "composer", "--help"], capture_output=True, text=True, check=True)
    options = re.findall(r"\[(--?\w+)", USAGE)
    assert len(options) == 13
    assert all(re.search(rf"(?<![\w-]){option}\b", run.stdout) for option in options)
