"""`freeze_layers` against its schedule, and `LayerFreezing` in training."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from composer_algorithms import LayerFreezing
from composer_algorithms.functional import freeze_layers
from composer_dist.testing import run_ranks
from composer_events import Event


def five_layers():
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1)]
    return nn.Sequential(nn.Sequential(*layers[:3]), *layers[3:])


def frozen(model):
    layers = [module for module in model.modules() if list(module.parameters(recurse=False))]
    return [not any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]


@given(current=st.floats(0, 1), start=st.floats(0, 1), level=st.floats(0, 1))
def test_the_frozen_part_grows_in_proportion_to_time_and_the_last_layer_trains(current, start, level):
    model = five_layers()
    depth, fraction = freeze_layers(model, torch.optim.SGD(model.parameters(), 0.1), current, start, level)
    expected = 0.0 if current <= start else level * (current - start) / (1 - start)
    assert fraction == expected
    assert depth == int(expected * 4)
    assert frozen(model) == [True] * depth + [False] * (5 - depth)


def test_the_cubic_schedule_freezes_each_layer_at_the_third_power_of_its_time():
    # FreezeOut, section 3: t_i = t_0 + (1 - t_0) * i / L, and its cube. Four of the layers freeze, so L is 4.
    for layer in range(1, 5):
        due = (0.2 + 0.8 * layer / 4) ** 3
        for current, depth in ((due - 1e-6, layer - 1), (min(due + 1e-6, 1.0), layer)):
            assert freeze_layers(five_layers(), [], current, 0.2, schedule="cubic")[0] == depth
    with pytest.raises(ValueError, match="schedule='square' is unknown"):
        LayerFreezing(schedule="square")


def test_frozen_weights_stand_still_even_with_momentum_and_weight_decay():
    model = five_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    def step():
        optimizer.zero_grad()
        model(torch.ones(3, 2)).square().mean().backward()
        optimizer.step()

    step()
    assert freeze_layers(model, optimizer, 0.75)[0] == 2
    assert [layer.weight.grad is None for layer in (*model[0][::2], *model[1:])] == [True, True, False, False, False]
    before = copy.deepcopy(model)
    step()
    step()
    changed = [
        not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True) if p.ndim > 1
    ]
    assert changed == [False, False, True, True]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_parameters_of_modules_with_children_are_frozen_too():
    attention = nn.MultiheadAttention(4, 2)
    model = nn.Sequential(attention, nn.Linear(4, 4))
    freeze_layers(model, [], 1.0)
    assert not any(parameter.requires_grad for parameter in attention.parameters())
    assert all(parameter.requires_grad for parameter in model[1].parameters())


def test_a_weight_that_a_later_layer_shares_trains_on():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    freeze_layers(model, [], 1.0)
    assert model[0].weight.requires_grad
    assert not model[1].weight.requires_grad


@pytest.mark.parametrize(("model", "level"), [(nn.Linear(2, 2), 1.0), (five_layers(), 0.2)], ids=["one", "too few"])
def test_a_model_of_which_nothing_will_ever_be_frozen_is_logged_once(model, level, caplog):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for elapsed in (0.0, 0.5, 1.0):
        assert freeze_layers(model, optimizer, elapsed, freeze_level=level)[0] == 0
    (record,) = caplog.records
    assert record.name == "composer.algorithms.layer_freezing"
    assert record.getMessage().startswith(f"LayerFreezing has no effect on this {type(model).__name__}: freeze_level=")


def test_a_model_that_has_layers_to_freeze_is_not_logged(caplog):
    model = five_layers()
    freeze_layers(model, torch.optim.SGD(model.parameters(), 0.1), 0.0, freeze_level=0.25)
    assert not caplog.records


@pytest.mark.parametrize("name", ["freeze_start", "freeze_level"])
def test_a_part_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}=1\.5 is not in \[0, 1\]"):
        LayerFreezing(**{name: 1.5})
    with pytest.raises(ValueError, match=rf"{name}=-0\.5 is not in \[0, 1\]"):
        freeze_layers(nn.Linear(1, 1), [], 0.5, **{name: -0.5})
    with pytest.raises(ValueError, match="current_duration=2"):
        freeze_layers(nn.Linear(1, 1), [], 2)


def test_training_freezes_layers_at_the_ends_of_epochs_and_logs_it(make_loop, make_model, recorder):
    algorithm = LayerFreezing(freeze_start=0.25)
    loop = make_loop([algorithm], [recorder], model=make_model(norm=False), max_duration="4ep")
    logged = []
    loop.engine.logger.log_metrics = lambda metrics, step=None: logged.append(metrics)
    loop.fit()
    # Of 2 layers one may be frozen, which the fraction of 1 at the end says.
    assert [metrics["layer_freezing/layers_frozen"] for metrics in logged] == [0, 0, 0, 1]
    fractions = [metrics["layer_freezing/percentage_frozen"] for metrics in logged]
    assert fractions == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert algorithm.find_unused_parameters


@pytest.mark.parametrize("interval", ["1ba", "0.5dur"])
@pytest.mark.parametrize("max_duration", ["1ep", "2ba"])
def test_training_of_one_epoch_freezes_layers_with_an_interval_within_it(make_loop, interval, max_duration):
    loop = make_loop([LayerFreezing(freeze_start=0.0, interval=interval)], max_duration=max_duration)
    depths = []
    loop.engine.logger.log_metrics = lambda metrics, step=None: depths.append(metrics["layer_freezing/layers_frozen"])
    loop.fit()
    assert depths[-2:] == [1, 2]  # the first of these before the end


@pytest.mark.parametrize(
    ("settings", "max_duration"),
    [({"freeze_start": 0.0}, "1ep"), ({}, "2ep"), ({"freeze_start": 0.0, "interval": "5ba"}, "4ba")],
)
def test_training_that_ends_before_a_layer_is_frozen_is_logged(make_loop, caplog, settings, max_duration):
    make_loop([LayerFreezing(**settings)], max_duration=max_duration).fit()
    assert "LayerFreezing has no effect" in caplog.text
    assert f"of the training of {max_duration}" in caplog.text


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="interval=0 is not in"):
        LayerFreezing(interval="0ba")


def test_frozen_layers_stand_still_in_training(make_loop, recorder):
    make_loop([LayerFreezing(freeze_start=0.0)], [recorder], max_duration="4ep").fit()
    weights = recorder.on(Event.EPOCH_END)
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])  # half of the two layers before the last, after half of the time
    assert torch.equal(weights[2], weights[3])


def test_training_resumed_from_a_checkpoint_ends_with_the_same_weights(make_loop, make_saver):
    def algorithms():
        return [LayerFreezing(freeze_start=0.0)]

    saver = make_saver("3ba")
    whole = make_loop(algorithms(), [saver], max_duration="4ep").fit()
    assert frozen(whole.model) == [True, True, False]
    for checkpoint in saver.checkpoints[:-1]:
        resumed = make_loop(algorithms(), max_duration="4ep").resume_from(checkpoint).fit()
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_state_is_frozen_again_on_the_first_event_after_it_was_loaded(state):
    algorithm = LayerFreezing()
    assert [event for event in Event if algorithm.match(event, state)] == [Event.FIT_START, Event.EPOCH_END]
    algorithm.load_state_dict({"freeze_depth": 1, "freeze_fraction": 0.5})
    assert algorithm.match(Event.AFTER_LOAD, state)
    algorithm.apply(Event.AFTER_LOAD, state, None)
    assert frozen(state.model) == [True, False]
    assert not algorithm.match(Event.AFTER_LOAD, state)


def test_a_state_of_composer_itself_which_is_empty_loads():
    algorithm = LayerFreezing()
    algorithm.load_state_dict({})
    assert algorithm.state_dict()["freeze_depth"] == 0


def train_on_ranks(wrap):
    model = five_layers()
    torch.manual_seed(1)
    if wrap == "ddp":
        spread = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    else:
        spread = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(spread.parameters(), lr=0.1, weight_decay=0.5)
    weights = []
    for step in range(4):
        if step == 2:
            freeze_layers(spread, optimizer, 0.75)
        optimizer.zero_grad()
        spread(torch.ones(3, 2)).square().mean().backward()
        optimizer.step()
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters() if p.ndim > 1]
        weights.append(whole)
    return weights


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_frozen_layers_stand_still_on_two_ranks(wrap, tmp_path):
    for weights in run_ranks(train_on_ranks, wrap, store=tmp_path / "store"):
        stands_still = [torch.equal(a, b) for a, b in zip(weights[1], weights[3], strict=True)]
        assert stands_still == [True, True, False, False]
        assert not any(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
