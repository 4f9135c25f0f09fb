import math
from types import SimpleNamespace

import torch

from composer.callbacks import OptimizerMonitor
from composer.loggers import InMemoryLogger, Logger
from composer_time import Timestamp


def test_the_norm_of_all_gradients_hides_no_nan_behind_an_infinity():
    model = torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.full((1, 2), math.inf), torch.full((1,), math.nan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = SimpleNamespace(model=model, optimizers=[optimizer], timestamp=Timestamp())
    memory = InMemoryLogger()
    OptimizerMonitor().batch_end(state, Logger(state, memory))
    latest = memory.most_recent_values
    assert latest["l2_norm/grad/weight"] == math.inf
    assert math.isnan(latest["l2_norm/grad/bias"])
    assert math.isnan(latest["l2_norm/grad/global"])


def test_parameters_that_take_the_place_of_others_are_the_ones_logged():
    model, monitor = torch.nn.Sequential(torch.nn.Linear(2, 1)), OptimizerMonitor()
    state = SimpleNamespace(model=model, optimizers=[], timestamp=Timestamp())
    for bias in (True, False):
        model[0] = torch.nn.Linear(2, 1, bias=bias)
        state.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        model(torch.ones(1, 2)).sum().backward()
        memory = InMemoryLogger()
        monitor.batch_end(state, Logger(state, memory))
    assert memory.most_recent_values["l2_norm/grad/0.weight"] == model[0].weight.grad.norm().item()
    assert "l2_norm/grad/0.bias" not in memory.most_recent_values


def test_the_norm_of_a_half_precision_gradient_may_exceed_its_range():
    model = torch.nn.Linear(4, 1, bias=False).half()
    model.weight.grad = torch.full((1, 4), 64000.0, dtype=torch.half)
    state = SimpleNamespace(model=model, optimizers=[torch.optim.SGD(model.parameters())], timestamp=Timestamp())
    memory = InMemoryLogger()
    OptimizerMonitor().batch_end(state, Logger(state, memory))
    assert memory.most_recent_values["l2_norm/grad/weight"] == 128000.0
