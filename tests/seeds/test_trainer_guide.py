"""The guide to the Trainer."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from composer import Callback, Engine, State, Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerModel

GUIDE = "trainer_guide"
pytestmark = pytest.mark.filterwarnings("ignore:No optimizer was specified:UserWarning")


@pytest.fixture
def given(folder, model, dataset):
    """What the guide leaves to its reader, who runs it in a folder of its own."""
    whole = DataLoader(dataset, batch_size=12)
    return {"model": model, "train_dataloader": whole, "eval_dataloader": whole}


def test_the_resnet_trains_for_ten_epochs(run, given):
    names = run(GUIDE, "A ResNet-18", "Training the ResNet-18", Trainer=Trainer, **given)
    timestamp = names["trainer"].state.timestamp
    assert (timestamp.epoch, timestamp.batch) == (10, 10)


class ModelOfTheGuide(ComposerModel):
    """Has `forward` and `loss`, as the guide says that a model must."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, batch):
        return self.network(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


@pytest.fixture
def older_model(network):
    with pytest.warns(DeprecationWarning, match=r"validate\(batch\) and metrics\(train\)"):

        class OlderModel(ModelOfTheGuide):
            def validate(self, batch):
                inputs, targets = batch
                return self.network(inputs), targets

            def metrics(self, train=False):
                return torchmetrics.classification.MulticlassAccuracy(num_classes=10, average="micro")

    return OlderModel(network)


def test_the_loops_train_and_evaluate_as_the_trainer_does(run, given, older_model):
    in_the_trainer = copy.deepcopy(older_model)
    optimizer = torch.optim.SGD(older_model.parameters(), lr=0.1)
    metrics = older_model.metrics()
    _, target = next(iter(given["eval_dataloader"]))  # the guide's name for targets
    run(GUIDE, "The loops", **{**given, "model": older_model}, optimizer=optimizer, metrics=metrics, target=target)

    optimizers = torch.optim.SGD(in_the_trainer.parameters(), lr=0.1)
    loaders = {name: loader for name, loader in given.items() if name.endswith("dataloader")}
    with Trainer(model=in_the_trainer, optimizers=optimizers, max_duration=1, device="cpu", **loaders) as trainer:
        trainer.fit()
    torch.testing.assert_close(older_model.state_dict(), in_the_trainer.state_dict(), rtol=0, atol=0)
    assert trainer.state.eval_metric_values["MulticlassAccuracy"] == metrics.compute()


class Listener(Callback):
    """Keeps the names of the events."""

    def __init__(self):
        self.seen = []

    def run_event(self, event, state, logger):
        self.seen.append(event.name)


def test_events_run_before_and_after_a_line(run, given):
    listener = Listener()
    loader = given["train_dataloader"]
    state = State(given["model"], rank_zero_seed=0, max_duration="1ep", dataloader=loader, callbacks=[listener])
    batch = next(iter(loader))
    names = run(GUIDE, "Events around a line", model=given["model"], batch=batch, engine=Engine(state))
    assert listener.seen == ["BEFORE_FORWARD", "AFTER_FORWARD"]
    assert names["outputs"].shape == (12, 10)


class Watched(ModelOfTheGuide):
    """Keeps the shapes of the targets of which it tells the loss."""

    def __init__(self, network):
        super().__init__(network)
        self.shapes = []

    def loss(self, outputs, batch):
        self.shapes.append(batch[1].shape)
        return super().loss(outputs, batch)


def test_algorithms_are_applied_by_the_trainer(run, given, network):
    names = run(GUIDE, "Algorithms", **{**given, "model": Watched(network)})
    assert names["trainer"].state.timestamp.epoch == 2
    assert names["model"].shapes == [(12, 10), (12, 10)]  # targets that are mixed are shares of all classes


def test_a_scheduler_of_pytorch_is_stepped_each_epoch(run, given):
    names = run(GUIDE, "A scheduler of PyTorch's", **given)
    names["trainer"].fit(duration="2ep")
    # From a third of the rate to all of it in five steps, of which two are done.
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1 * (1 / 3 + 2 / 3 * 2 / 5))


class Rates(Callback):
    """Keeps the learning rate with which each epoch ends, as a share of the first one."""

    def __init__(self):
        self.by_epoch = {}

    def batch_start(self, state, logger):
        group = state.optimizers[0].param_groups[0]
        self.by_epoch[int(state.timestamp.epoch)] = group["lr"] / group["initial_lr"]


def test_a_scheduler_of_composer_is_told_of_shares_of_the_training(run, model, dataloader):
    trainer = run(GUIDE, "A scheduler of Composer's", model=model, train_dataloader=dataloader)["trainer"]
    rates = Rates()
    trainer.state.callbacks.append(rates)
    trainer.fit()
    assert list(rates.by_epoch.values()) == pytest.approx([1.0] * 27 + [0.1] * 18 + [0.01] * 36 + [0.001] * 9)


def test_the_device_is_the_one_that_is_named(run, given):
    trainer = run(GUIDE, "The device", **given)["trainer"]
    trainer.fit()
    assert trainer.state.timestamp.epoch == 2
    assert {parameter.device.type for parameter in trainer.state.model.parameters()} == {"cpu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused_before_anything_runs(run, given):
    with pytest.raises(ValueError, match=r"device='gpu'"):
        run(GUIDE, "run_trainer.py", as_printed=True, **given)


def test_the_script_trains_in_one_process(run, given):
    assert run(GUIDE, "run_trainer.py", **given)["trainer"].state.timestamp.epoch == 160


# What the script leaves to its reader, before and after the sampler of the distributed guide.
DATASET = """
import torch
from torch.utils.data import DataLoader, TensorDataset
dataset = TensorDataset(torch.rand(16, 4), torch.arange(16) % 3)
"""
MODEL = """
from composer.models import ComposerClassifier
train_dataloader = eval_dataloader = dataloader
model = ComposerClassifier(torch.nn.Linear(4, 3), num_classes=3)
"""
TOLD = """
print("rank", dist.get_global_rank(), "of", dist.get_world_size(), "at epoch", int(trainer.state.timestamp.epoch))
"""


@pytest.mark.slow
def test_the_launcher_trains_the_script_on_all_ranks(text, shell, folder):
    sampler = text("distributed_guide", "A sampler")
    script = text(GUIDE, "run_trainer.py").replace("'160ep'", "'3ep'")  # all of them are trained in one process above
    (folder / "run_trainer.py").write_text(DATASET + sampler + MODEL + script + TOLD)
    assert shell(text(GUIDE, "The launcher")).splitlines() == ["rank 0 of 2 at epoch 3"]


def test_a_callback_logs_the_throughput(run, given):
    trainer = run(GUIDE, "A callback", **given)["trainer"]
    logger = InMemoryLogger()
    logger.init(trainer.state, trainer.logger)
    trainer.logger.destinations = [*trainer.logger.destinations, logger]
    trainer.fit()
    # From the batch on with which the window of 100 is full, and as many have been timed before it.
    assert len(logger.data["throughput/batches_per_sec"]) == 60


AMP = pytest.mark.filterwarnings("ignore:precision='amp':DeprecationWarning")


@AMP
def test_mixed_precision_is_that_of_the_device(run, given):
    trainer = run(GUIDE, "Mixed precision", **given)["trainer"]
    trainer.fit(duration="2ep")
    assert trainer.state.precision.value == ("amp_fp16" if torch.cuda.is_available() else "fp32")


@AMP
def test_mixed_precision_is_refused_on_a_cpu(text, given):
    on_cpu = text(GUIDE, "Mixed precision", as_printed=True).replace("device='gpu'", "device='cpu'")
    with pytest.raises(ValueError, match="not supported for CPU training"):
        exec(on_cpu, given)


class StoppedByHand(DataLoader):
    """Is interrupted after two epochs, as whoever sits before it may do with Ctrl-C."""

    epochs = 0

    def __iter__(self):
        self.epochs += 1
        if self.epochs > 2:
            raise KeyboardInterrupt
        return super().__iter__()


def test_checkpoints_are_saved_every_epoch(run, given, dataset):
    loader = StoppedByHand(dataset, batch_size=12)
    with pytest.raises(KeyboardInterrupt):
        run(GUIDE, "Saving checkpoints", **{**given, "train_dataloader": loader})
    saved = sorted(path.name for path in Path("checkpoints").glob("ep*.pt"))
    assert saved == ["ep1-ba1-rank0.pt", "ep2-ba2-rank0.pt"]


def test_training_goes_on_from_a_checkpoint(run, given, network):
    loader = given["train_dataloader"]
    with Trainer(model=given["model"], train_dataloader=loader, device="cpu", max_duration="159ep") as trainer:
        trainer.fit()
        trainer.save_checkpoint("path/to/checkpoint/mosaic_states.pt")
    with torch.no_grad():
        network[-1].weight.zero_()  # which loading undoes
    passes = []
    network.register_forward_hook(lambda module, *_: passes.append(module.training))
    trainer = run(GUIDE, "Loading checkpoints", **given)["trainer"]
    assert trainer.state.timestamp.epoch == 160
    assert passes.count(True) == 1  # the epoch that was left
    assert network[-1].weight.any()


@pytest.mark.filterwarnings("ignore:grad_accum=:DeprecationWarning")
def test_gradients_are_accumulated_over_microbatches(run, given, network):
    sizes = []
    network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    run(GUIDE, "Gradient accumulation", **given)["trainer"].fit()
    assert sizes == [6, 6]


@pytest.mark.filterwarnings("ignore:grad_accum=:DeprecationWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_automatic_accumulation_is_refused_without_a_gpu(text, given):
    automatic = text(GUIDE, "Gradient accumulation").replace("grad_accum=2", "grad_accum='auto'")  # as the guide says
    with pytest.raises(ValueError, match="on GPU"):
        exec(automatic, given)


def test_the_seed_is_the_one_that_is_given(run, given):
    assert run(GUIDE, "The seed", **given)["trainer"].state.rank_zero_seed == 42


@pytest.fixture
def nondeterministic(monkeypatch):
    """Put back what the guide's deterministic mode sets for the whole process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.usefixtures("nondeterministic")
def test_the_same_seed_makes_the_same_model(run):
    def make_model():
        return ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), num_classes=10)

    names = {"torch": torch, "Trainer": Trainer, "MyModel": make_model}
    first, second = (run(GUIDE, "Reproducibility", **names)["model"].state_dict() for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
