"""ActivationMonitor against statistics worked out number by number."""

import math
import re

import pytest
import torch
from torch import nn

from composer.callbacks import ActivationMonitor
from composer.callbacks.activation_monitor import compute_kurtosis
from composer.core import State
from composer.loggers import InMemoryLogger, Logger, LoggerDestination
from composer.models import ComposerModel

SELDOM = "100ba"


class WandBLogger(LoggerDestination):
    """Keeps what W&B would get."""

    shows_many_metrics = True

    def __init__(self):
        self.steps = []
        self.metrics = {}

    def log_metrics(self, metrics, step=None):
        self.steps.append(step)
        self.metrics |= metrics


class OwnWandBLogger(WandBLogger):
    """One that a user has derived."""


class Calls(ComposerModel):
    """Lets a function stand for the forward pass of a layer."""

    def __init__(self, function):
        super().__init__()

        class Layer(nn.Module):
            def forward(self, *inputs):
                return function(*inputs)

        self.layer = Layer()

    def forward(self, batch):
        self.layer(*batch)

    def loss(self, outputs, batch):
        return torch.zeros(())


def statistics_of(rows):
    """Work out each statistic of a list of rows of numbers, with nothing but sums."""
    found = {"l2_norm": 0.0, "average": 0.0, "max": 0.0, "kurtosis": 0.0}
    for row in rows:
        mean = sum(row) / len(row)
        second = sum((x - mean) ** 2 for x in row) / len(row)
        fourth = sum((x - mean) ** 4 for x in row) / len(row)
        found["l2_norm"] += math.sqrt(sum(x * x for x in row)) / len(rows)
        found["average"] += mean / len(rows)
        found["max"] += max(row) / len(rows)
        found["kurtosis"] += fourth / second**2 / len(rows)
    return found


class CallsAndDoubles(Calls):
    """Changes what the layer returned in place."""

    def forward(self, batch):
        return self.layer(*batch).mul_(2)


def seen(function, *batch, kind=Calls, **settings):
    """Return the values of one forward pass, by `<statistic>/<name>`."""
    model = kind(function)
    state = State(model, rank_zero_seed=0, run_name="run", device="cpu")
    kept = InMemoryLogger()
    kept.init(state, None)
    logger = Logger(state, kept)
    monitor = ActivationMonitor(SELDOM, ["ignored"], **settings)
    monitor.before_forward(state, logger)
    model(batch)
    monitor.after_forward(state, logger)
    return {name.removeprefix("activations/"): value for name, value in kept.most_recent_values.items()}


def names(values, statistic="max"):
    return {name.removeprefix(f"{statistic}/") for name in values if name.startswith(f"{statistic}/")}


def test_the_statistics_are_those_along_the_last_dim_averaged_over_the_others():
    inputs = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    values = seen(lambda inputs: inputs * 2, inputs, whole_outputs=True)
    for place, tensor in (("input", inputs), ("output", inputs * 2)):
        for statistic, expected in statistics_of(tensor.reshape(-1, 5).tolist()).items():
            assert float(values[f"{statistic}/layer_{place}.0"]) == pytest.approx(expected, rel=1e-4)


def test_a_lone_output_has_one_value_for_each_of_its_rows():
    inputs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2))
    values = seen(lambda inputs: inputs, inputs)
    assert names(values) >= {"layer_output.0", "layer_output.1", "layer_output.2"}
    for row in range(3):
        expected = statistics_of(inputs[row].tolist())
        assert float(values[f"kurtosis/layer_output.{row}"]) == pytest.approx(expected["kurtosis"], rel=1e-4)
        assert float(values[f"average/layer_output.{row}"]) == pytest.approx(expected["average"], rel=1e-4, abs=1e-6)


def test_what_is_changed_between_two_modules_is_measured_again():
    values = seen(lambda inputs: inputs + 1, torch.ones(2, 3), kind=CallsAndDoubles, whole_outputs=True)
    assert float(values["max/layer_output.0"]) == 2.0
    assert float(values["max/_output.0"]) == 4.0


def test_only_numbers_with_a_point_are_measured_wherever_they_are():
    def forward(*_):
        return {"logits": torch.ones(2, 2), "hidden": [torch.ones(2), (torch.ones(2),)], "inner": {"x": torch.ones(2)}}

    values = seen(
        forward, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.long), torch.ones(2, dtype=torch.bool), None, "text"
    )
    assert names(values) == {
        *("layer_output.0", "layer_output.1_0", "layer_output.1_1_0", "layer_input.0"),
        "_input.0_0",  # the root's input is the batch
    }


@pytest.mark.parametrize("output", [torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([[3.0]])])
def test_a_single_number_is_its_own_maximum(output):
    values = seen(lambda: output)
    assert float(values["max/layer_output.0"]) == 3.0


@pytest.mark.parametrize("output", [torch.empty(0, 3), None, 7, torch.empty(2, 0)])
def test_where_there_are_no_numbers_nothing_is_logged(output):
    assert seen(lambda: output) == {}


def test_of_complex_numbers_the_absolute_values_are_measured():
    values = seen(lambda: (torch.tensor([[3 + 4j, 0j]]),))
    assert float(values["max/layer_output.0"]) == 5.0


def test_sixteen_bits_are_enough_for_the_values_if_not_for_their_powers():
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) * 100
    values = seen(lambda inputs: (inputs,), inputs.half())
    expected = statistics_of(inputs.half().tolist())
    assert float(values["kurtosis/layer_output.0"]) == pytest.approx(expected["kurtosis"], rel=1e-4)


def test_the_kurtosis_of_many_draws_is_that_of_their_distribution():
    draws = torch.randn(4, 100_000, generator=torch.Generator().manual_seed(4))
    assert float(compute_kurtosis(draws)) == pytest.approx(3.0, rel=0.02)  # normal
    assert float(compute_kurtosis(draws.sign())) == pytest.approx(1.0, rel=1e-3)  # a coin


def test_a_value_is_logged_for_each_batch_and_each_layer(make_trainer, make_loader):
    with pytest.warns(UserWarning, match="slows training down"):
        monitor = ActivationMonitor(interval="1ba")
    kept = InMemoryLogger()
    make_trainer(
        train_dataloader=make_loader(6, 2),
        max_duration="1ep",
        callbacks=monitor,
        loggers=kept,
        device_train_microbatch_size=1,
    ).fit()
    assert len(kept.data["activations/max/_output.0"]) == 3  # one for each batch, not for each microbatch
    layers = [name for name in kept.data if name.startswith("activations/l2_norm/module.0_")]
    assert sorted(layers) == ["activations/l2_norm/module.0_input.0", "activations/l2_norm/module.0_output.0"]


def test_between_intervals_no_layer_is_watched(make_trainer, make_loader):
    kept = InMemoryLogger()
    trainer = make_trainer(
        train_dataloader=make_loader(30, 2), max_duration="1ep", callbacks=ActivationMonitor("10ba"), loggers=kept
    )
    trainer.fit()
    assert [int(stamp.batch) for stamp, _ in kept.data["activations/max/_output.0"]] == [0, 10]
    before = dict(kept.most_recent_values)
    trainer.state.model((torch.ones(2, 2), torch.zeros(2)))
    assert kept.most_recent_values == before


def test_a_compiled_model_is_watched_as_it_was_written(make_trainer, make_model):
    def logged(**settings):
        kept = InMemoryLogger()
        monitor = ActivationMonitor("10ba", whole_outputs=True)
        make_trainer(model=make_model(), max_duration="11ba", callbacks=monitor, loggers=kept, **settings).fit()
        return {name: [value for _, value in kept.data[name]] for name in kept.data if name.startswith("activations/")}

    as_written, compiled = logged(), logged(compile_config={"backend": "eager"})
    assert compiled.keys() == as_written.keys()
    for name, values in as_written.items():
        torch.testing.assert_close(compiled[name], values, equal_nan=True)


def test_layers_are_left_out_by_a_part_of_their_name(make_trainer):
    kept = InMemoryLogger()
    monitor = ActivationMonitor(SELDOM, ignore_module_types=["module.1", "module.2"])
    make_trainer(max_duration="1ba", callbacks=monitor, loggers=kept).fit()
    logged = {re.split("_(input|output)", name)[0] for name in kept.data if name.startswith("activations/max/")}
    assert {name.removeprefix("activations/max/") for name in logged} == {"", "module", "module.0"}


@pytest.mark.parametrize("kind", [WandBLogger, OwnWandBLogger])
def test_where_wandb_is_it_alone_gets_the_values(make_trainer, kind):
    wandb, kept = kind(), InMemoryLogger()
    make_trainer(max_duration="1ba", callbacks=ActivationMonitor(SELDOM), loggers=[kept, wandb]).fit()
    assert "activations/max/_output.0" in wandb.metrics
    assert "activations/max/_output.0" not in kept.data
    assert 0 in wandb.steps  # the batch that was seen


def test_all_loggers_get_the_values_when_asked_for(make_trainer):
    wandb, kept = WandBLogger(), InMemoryLogger()
    monitor = ActivationMonitor(SELDOM, only_log_wandb=False)
    make_trainer(max_duration="1ba", callbacks=monitor, loggers=[kept, wandb]).fit()
    assert "activations/max/_output.0" in wandb.metrics
    assert "activations/max/_output.0" in kept.data


@pytest.mark.parametrize("interval", ["3sp", "0.5dur", 0])
def test_an_interval_in_another_unit_is_refused(interval):
    with pytest.raises(ValueError, match="must be batches or epochs"):
        ActivationMonitor(interval)


def test_a_forward_pass_that_failed_leaves_nothing_behind_for_an_evaluation():
    def fail(*inputs):
        raise ValueError("no")

    model, monitor = Calls(fail), ActivationMonitor(SELDOM)
    state = State(model=model, rank_zero_seed=0, run_name="run", device="cpu")
    logger = Logger(state, InMemoryLogger())
    monitor.before_forward(state, logger)
    assert model.layer._forward_hooks
    monitor.eval_start(state, logger)
    assert not model.layer._forward_hooks


@pytest.mark.parametrize(
    "output",
    [torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)],
)
def test_tensors_without_rows_are_left_out(output):
    memory = InMemoryLogger()
    model, monitor = Calls(lambda inputs: output), ActivationMonitor(SELDOM)
    state = State(model=model, rank_zero_seed=0, run_name="run", device="cpu")
    logger = Logger(state, memory)
    monitor.before_forward(state, logger)
    model.layer(torch.ones(2, 3))
    monitor.after_forward(state, logger)
    assert "activations/max/layer_input.0" in memory.data
    assert not any("output" in name for name in memory.data)


def test_what_can_be_read_once_is_left_to_the_model():
    model, monitor = Calls(lambda inputs: (row for row in inputs)), ActivationMonitor(SELDOM)
    state = State(model=model, rank_zero_seed=0, run_name="run", device="cpu")
    logger = Logger(state, InMemoryLogger())
    monitor.before_forward(state, logger)
    assert len(list(model.layer(torch.ones(2, 3)))) == 2
    monitor.close(state, logger)  # what is compiled would run as it was written
