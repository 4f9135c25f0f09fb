"""The guide to the algorithms."""

import copy
import functools
import hashlib
import io
import pickle
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from sklearn.datasets import load_digits
from torch import nn

import composer.algorithms
from composer import Algorithm, Callback, Event, State, Trainer
from composer import functional as cf
from composer.models import ComposerModel

GUIDE = "algorithms_guide"
NO_OPTIMIZER = pytest.mark.filterwarnings("ignore:No optimizer was specified:UserWarning")


def test_each_algorithm_has_its_class_and_its_function(text):
    for row in text(GUIDE, "All of them").splitlines():
        name, *functions = row.split()
        assert issubclass(getattr(composer.algorithms, name), Algorithm)
        assert all(callable(getattr(cf, function.removesuffix("()"))) for function in functions)


@pytest.fixture
def served(tmp_path):
    """Serve a folder on this machine, and return it and its address."""
    (tmp_path / "served").mkdir()
    handler = functools.partial(SilentHandler, directory=tmp_path / "served")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path / "served", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def cifar10(folder, served, monkeypatch):
    """Offer an archive in the format of CIFAR-10, of 64 handwritten digits, where torchvision downloads it."""
    digits = load_digits()
    images = np.pad(digits.images[:64].astype(np.uint8) * 15, ((0, 0), (12, 12), (12, 12)))  # as large as CIFAR's
    batch = {"data": np.repeat(images[:, None], 3, axis=1).reshape(64, -1), "labels": digits.target[:64].tolist()}
    contents = {"data_batch_1": batch, "batches.meta": {"label_names": [str(digit) for digit in range(10)]}}
    packed = {name: pickle.dumps(content) for name, content in contents.items()}
    with tarfile.open(served[0] / "cifar.tar.gz", "w:gz") as archive:
        for name, data in packed.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    where = {
        "url": f"{served[1]}/cifar.tar.gz",
        "tgz_md5": md5_of((served[0] / "cifar.tar.gz").read_bytes()),
        "train_list": [["data_batch_1", md5_of(packed["data_batch_1"])]],
        "test_list": [],
        "meta": {"filename": "batches.meta", "key": "label_names", "md5": md5_of(packed["batches.meta"])},
    }
    for name, value in where.items():
        monkeypatch.setattr(torchvision.datasets.CIFAR10, name, value)


def md5_of(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@pytest.mark.usefixtures("cifar10")
@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")  # torchvision on 3.12
@pytest.mark.filterwarnings(r"ignore:.*cutmix_batch:DeprecationWarning")
def test_a_network_is_trained_on_images_that_are_augmented_one_by_one_and_in_batches(run):
    network = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    before = copy.deepcopy(network.state_dict())
    seen = []
    network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    names = {"model": network, "optimizer": optimizer, "loss_fn": nn.CrossEntropyLoss()}
    blocks = ["Images are augmented by a transform", "A batch is augmented in a loop"]
    names = run(GUIDE, *blocks, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), **names)
    (mixed,) = seen
    assert mixed.shape == (64, 3, 32, 32)
    assert -2 <= mixed.min() < 0 < mixed.max() <= 2  # 0 and 1, less the mean, in standard deviations
    assert not torch.equal(before["1.weight"], network[1].weight)


def test_convolutions_and_pooling_are_blurred(run):
    model = run(GUIDE, "Blurred convolutions")["model"]
    blurred = [type(module).__name__ for module in model.modules() if type(module).__name__.startswith("Blur")]
    # The first one of stage 2, 3 and 4, each with that of its shortcut. The network's first has too few channels.
    assert sorted(blurred) == ["BlurConv2d"] * 6 + ["BlurMaxPool2d"]
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 1000)


@pytest.mark.filterwarnings("ignore:.*heads_per_layer:DeprecationWarning")
def test_gpt2_attends_by_distance(run, folder):
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=12)
    published = GPT2Model(config)
    published.save_pretrained(folder / "gpt2")  # a path of the name that is looked up; there is no network
    model = run(GUIDE, "ALiBi in GPT-2")["model"].eval()
    cf.apply_alibi(published, 8192)
    tokens = torch.arange(64)[None] % 50
    torch.testing.assert_close(model(tokens).last_hidden_state, published.eval()(tokens).last_hidden_state)
    assert not model.wpe.weight.any()
    assert len(model.wpe.weight) == 8192


@NO_OPTIMIZER
def test_algorithms_of_the_trainer(run, model, network, dataloader):
    given = {"model": model, "train_dataloader": dataloader, "test_dataloader": dataloader}
    trainer = run(GUIDE, "Two algorithms in the Trainer", **given)["trainer"]
    trainer.fit()
    assert trainer.state.timestamp.epoch == 10
    # The one convolution has too few channels to be blurred.
    assert [type(layer).__name__ for layer in network[:3]] == ["Conv2d", "ReLU", "BlurMaxPool2d"]
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)


class Order(Callback):
    """Keeps the name of every event, and the steps of an optimizer between them."""

    def __init__(self, optimizer):
        self.seen = []
        optimizer.register_step_post_hook(lambda *_: self.seen.append("a step"))

    def run_event(self, event, state, logger):
        self.seen.append(event.name)


class Events:
    """What the guide calls EVENT, and does no more with than to name each one."""

    def __init__(self):
        self.named = []

    def __getattr__(self, name):
        self.named.append(name)


class Optimizers:
    """What the guide calls optimizers: it makes them by a call, and steps them later on."""

    def __init__(self, make, named):
        self.make, self.named = make, named

    def __call__(self):
        self.made = self.make()
        return self.made

    def step(self):
        self.named.append("a step")
        self.made.step()


# The functions whose names tell the guide's reader what they do.
FUNCTIONS = """
def prepare_batch_for_training():
    state.optimizers.zero_grad()
def forward_pass():
    state.outputs = state.model(batch)
def compute_loss():
    state.loss = state.model.loss(state.outputs, batch)
def backward_pass():
    state.loss.backward()
"""


def test_the_order_of_events_is_the_one_of_the_trainer(text, network, dataloader):
    def model():
        return ComposerModel.from_module(copy.deepcopy(network), F.cross_entropy)

    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    state, events = SimpleNamespace(), Events()
    optimizers = Optimizers(lambda: optimizer_of(state.model), events.named)
    given = {"model": model, "train_dataloader": lambda: dataloader, "optimizers": optimizers, "epochs": range(2)}
    given |= {"EVENT": events, "state": state, "load_checkpoint": lambda: None}
    exec(FUNCTIONS + text(GUIDE, "The order of events"), given)

    trained = model()
    optimizer = optimizer_of(trained)
    order = Order(optimizer)
    loop = {"train_dataloader": dataloader, "optimizers": optimizer, "max_duration": "2ep", "callbacks": order}
    with Trainer(model=trained, device="cpu", progress_bar=False, **loop) as trainer:
        trainer.fit()
    assert events.named == [name for name in order.seen if name in events.named]
    torch.testing.assert_close(state.model.state_dict(), trained.state_dict(), rtol=0, atol=0)


def test_match_says_on_which_events_an_algorithm_acts(run):
    match = run(GUIDE, "When an algorithm acts", Event=Event)["match"]
    assert [event.name for event in Event if match(None, event, None)] == ["AFTER_DATALOADER", "AFTER_FORWARD"]


def test_apply_changes_the_state_as_the_event_asks(run):
    names = {"Event": Event, "process_inputs": lambda batch: batch + 1, "process_outputs": lambda outputs: outputs * 2}
    apply = run(GUIDE, "What an algorithm does", **names)["apply"]
    state = State(nn.Linear(1, 1), rank_zero_seed=0, max_duration="1ep")
    state.batch, state.outputs = torch.tensor(1), torch.tensor(3)
    for event in (Event.AFTER_DATALOADER, Event.AFTER_FORWARD, Event.BATCH_END):
        apply(None, event, state, None)
    assert (state.batch, state.output, state.outputs) == (2, 6, 3)


@NO_OPTIMIZER
def test_an_algorithm_of_ones_own_acts_beside_those_of_the_library(run, model, dataloader):
    seen = []

    def process_inputs(batch, hparam):
        seen.append("inputs")
        return (batch[0] * hparam, batch[1])

    def process_outputs(outputs):
        seen.append("outputs")
        return outputs * 2

    trainer = run(
        GUIDE,
        "An algorithm of one's own",
        "An algorithm of one's own in the Trainer",
        process_inputs=process_inputs,
        process_outputs=process_outputs,
        model=model,
        train_dataloader=dataloader,
        test_dataloader=dataloader,
    )["trainer"]
    trainer.fit()
    assert trainer.state.timestamp.epoch == 90
    assert seen == ["inputs", "outputs"] * 3 * 90
    assert torch.equal(trainer.state.output, trainer.state.outputs * 2)
    assert not trainer.state.eval_metric_values  # eval_interval="0ep"
    assert any("Blur" in type(part).__name__ for part in model.modules())
