"""Activations that are computed again in the backward pass of a model that is not sharded."""

import re

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.callbacks import OptimizerMonitor
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 2))

    def activation_checkpointing_fn(self, module):
        return module is self[1]


class Model(ComposerModel):
    def __init__(self, network):
        super().__init__()
        self.net = network
        self.num_calls = 0
        network[1].register_forward_pre_hook(self._count)

    def _count(self, *_):
        self.num_calls += 1

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def make(model=None, **arguments):
    if model is None:
        torch.manual_seed(3)
        model = Model(Net())
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 4, generator=generator), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    settings = {
        "train_dataloader": batches,
        "device_train_microbatch_size": 4,
        "max_duration": "1ep",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": "cpu",
        "progress_bar": False,
        "seed": 1,
    }
    return Trainer(model=model, **{**settings, **arguments})


def weights_after_training(setting):
    with make(activation_checkpointing=setting) as trainer:
        trainer.fit()
        return trainer.state.state_dict()["model"], trainer.state.model.num_calls


@pytest.mark.parametrize("setting", [True, "selective"])
def test_a_chosen_module_runs_twice_and_learns_the_same(setting):
    expected, num_calls = weights_after_training(False)
    weights, num_calls_again = weights_after_training(setting)
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert num_calls_again == 2 * num_calls


def test_metrics_of_parameters_have_the_names_of_the_model():
    memory = InMemoryLogger()
    with make(activation_checkpointing=True, loggers=memory, callbacks=OptimizerMonitor(batch_log_interval=1)) as it:
        it.fit()
    names = {name.removeprefix("l2_norm/grad/") for name in memory.data if name.startswith("l2_norm/grad/")}
    assert names == {"global", *Model(Net()).state_dict()}


def test_a_second_trainer_wraps_no_module_twice():
    model = Model(Net())
    for _ in range(2):
        with make(model, activation_checkpointing=True) as trainer:
            trainer.fit()
    wrapped = [name for name, _ in model.named_modules() if name.endswith("_checkpoint_wrapped_module")]
    assert wrapped == ["net.1._checkpoint_wrapped_module"]


def test_a_model_that_chooses_no_module_is_warned_of():
    with pytest.warns(UserWarning, match="no module is chosen for it, so that it does nothing"):
        make(Model(nn.Sequential(*Net())), activation_checkpointing=True).close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"activation_checkpointing": "some"}, "activation_checkpointing='some' is unknown"),
        (
            {"activation_checkpointing": True, "parallelism_config": {"fsdp": {}}},
            "parallelism_config={'fsdp': {'activation_checkpointing': True}}",
        ),
    ],
)
def test_a_setting_that_is_none_or_belongs_elsewhere_is_refused(arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**arguments)
