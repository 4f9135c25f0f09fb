"""Dropped blocks: how often, what is computed instead, and that ranks, seeds and checkpoints decide as they should."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from composer_algorithms import StochasticDepth
from composer_algorithms.functional import apply_stochastic_depth
from composer_algorithms.stochastic_depth import BlockStochasticModule
from composer_dist.testing import run_ranks
from composer_events import Event, State
from composer_time import Time, TimeUnit

NAMES = {"ResNetBottleneck": Bottleneck, "ResNetBasicBlock": BasicBlock}


def block(name="ResNetBottleneck", downsample=False):
    torch.manual_seed(0)
    width = 4 if name == "ResNetBottleneck" else 16
    module = NAMES[name](16, width, downsample=nn.Conv2d(16, 16, 1) if downsample else None)
    for norm in (one for one in module.modules() if isinstance(one, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight)
        norm.momentum = 0.0  # two passes over one input see the same
    return module


def stochastic(name="ResNetBottleneck", downsample=False, **settings):
    module = block(name, downsample)
    apply_stochastic_depth(module, name, **settings)
    return module


def main_branch(module, x):
    """Compute the plain block without its shortcut and last ReLU."""
    outputs = []
    last = module.bn3 if hasattr(module, "bn3") else module.bn2
    handle = last.register_forward_hook(lambda norm, args, output: outputs.append(output.clone()))
    module(x)
    handle.remove()
    return outputs[0]


def images():
    return torch.randn(6, 16, 5, 5, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("method", ["block", "sample"])
@pytest.mark.parametrize("downsample", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_without_drops_it_is_the_plain_block(name, downsample, method):
    plain = block(name, downsample)
    module = stochastic(name, downsample, stochastic_method=method, drop_rate=0)
    for mode in (True, False):
        assert torch.equal(module.train(mode)(images()), plain.train(mode)(images()))


@pytest.mark.parametrize("downsample", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_block_is_its_shortcut(name, downsample):
    module, x = stochastic(name, downsample, drop_rate=1), images()
    output = module(x)
    assert torch.equal(output, module.downsample(x).relu()) if downsample else output is x


@pytest.mark.parametrize("method", ["block", "sample"])
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_scales_the_main_branch_by_how_often_it_is_there(name, method):
    plain, x = block(name).eval(), images()
    module = stochastic(name, stochastic_method=method, drop_rate=0.3).eval()
    expected = (0.7 * main_branch(plain, x) + x).relu()
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_dropped_one_by_one(name):
    module, plain, x = stochastic(name, stochastic_method="sample", drop_rate=0.5), block(name), images()
    kept = (main_branch(plain, x) + x).relu()
    output = module(x)
    is_kept = [torch.allclose(output[i], kept[i], atol=1e-6) for i in range(len(x))]
    is_dropped = [torch.equal(output[i], x[i].relu()) for i in range(len(x))]
    assert [a != b for a, b in zip(is_kept, is_dropped, strict=True)] == [True] * len(x)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_blocks_are_dropped_as_often_as_the_rate_says(rate):
    module = BlockStochasticModule(nn.Identity(), drop_rate=rate)
    torch.manual_seed(1)
    dropped = sum(torch.equal(module(torch.ones(1)), torch.ones(1)) for _ in range(2000))
    deviation = (2000 * rate * (1 - rate)) ** 0.5
    assert abs(dropped - 2000 * rate) < 4 * deviation  # wrong once in 16000 seeds, and the seed is fixed


def test_examples_are_dropped_as_often_as_the_rate_says():
    module = stochastic(stochastic_method="sample", drop_rate=0.3).train()
    for norm in (one for one in module.modules() if isinstance(one, nn.BatchNorm2d)):
        norm.eval()
    x = torch.ones(3000, 16, 1, 1)
    torch.manual_seed(1)
    dropped = (module(x) == x).flatten(1).all(1).sum().item()
    assert abs(dropped - 900) < 4 * (3000 * 0.3 * 0.7) ** 0.5


def test_the_same_seed_drops_the_same_blocks():
    module, x = stochastic(drop_rate=0.5), images()

    def decisions():
        torch.manual_seed(4)
        return [module(x) is x for _ in range(20)]

    first = decisions()
    assert first == decisions()
    assert 2 < sum(first) < 18


def test_a_block_of_two_branches_scales_and_drops_the_main_one():
    main, residual, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.rand(2, 3)
    module = BlockStochasticModule(main, residual, drop_rate=0.25)
    torch.testing.assert_close(module.eval()(x), 0.75 * main(x) + residual(x))
    outputs = [module.train()(x) for _ in range(30)]
    is_dropped = [torch.equal(output, residual(x)) for output in outputs]
    assert all(
        dropped or torch.equal(output, main(x) + residual(x))
        for dropped, output in zip(is_dropped, outputs, strict=True)
    )
    assert 0 < sum(is_dropped) < 30


@pytest.mark.parametrize(("distribution", "expected"), [("linear", [0.1, 0.2, 0.3, 0.4]), ("uniform", [0.4] * 4)])
def test_rates_rise_linearly_or_are_all_the_same(distribution, expected):
    model = ResNet(Bottleneck, [1, 1, 1, 1])
    apply_stochastic_depth(model, "ResNetBottleneck", drop_rate=0.4, drop_distribution=distribution)
    rates = [one.drop_rate.item() for one in model.modules() if isinstance(one, Bottleneck)]
    assert rates == pytest.approx(expected)


def test_twice_is_once_and_copies_are_independent():
    module = stochastic(drop_rate=0.5)
    once = set(module.state_dict())
    apply_stochastic_depth(module, "ResNetBottleneck", drop_rate=0.5)
    assert set(module.state_dict()) == once == set(block().state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        nn.init.zeros_(other.bn3.weight)
        nn.init.zeros_(other.bn3.bias)
        assert torch.equal(other.eval()(images()), images().relu())
        assert not torch.equal(module.eval()(images()), images().relu())


class OwnBlock(Bottleneck):
    """A block of the user's, whose class stays its class."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("rescale", ["eval", "train"])
@pytest.mark.parametrize("method", ["block", "sample"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(Bottleneck, "ResNetBottleneck"), (OwnBlock, "ResNetBottleneck"), (BasicBlock, "ResNetBasicBlock")],
)
def test_torch_script_takes_a_model_with_it(kind, name, method, rescale):
    """Seen before: "'functools.partial' object has no attribute '__globals__'"."""
    torch.manual_seed(0)
    model, x = ResNet(kind, [1, 1, 1, 1], num_classes=2), torch.rand(2, 3, 32, 32)
    apply_stochastic_depth(model, name, method, drop_rate=0.5, drop_distribution="uniform", rescale=rescale)
    model(x)
    scripted = torch.jit.script(pickle.loads(pickle.dumps(model)))
    torch.testing.assert_close(scripted.eval()(x), model.eval()(x))
    assert all(isinstance(each, kind) for each in (model.layer1[0], copy.deepcopy(model).layer1[0]))
    # A block whose main branch is always dropped is its other branch, with gradients for nothing else.
    for one in (each for each in model.modules() if isinstance(each, kind)):
        one.drop_rate.fill_(1.0)
    scripted = torch.jit.script(model).train()
    scripted(x).sum().backward()
    changed = scripted.layer4[0].conv1.weight.grad
    assert changed is None or changed.count_nonzero() == 0
    module = torch.jit.script(BlockStochasticModule(nn.Linear(3, 3), drop_rate=1.0))
    assert torch.equal(module.train()(x[0, 0, :2, :3]), x[0, 0, :2, :3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_layer_name": "VGG"}, "target_layer_name='VGG' is unknown: choose one of 'ResNetBottleneck'"),
        ({"stochastic_method": "half"}, "stochastic_method='half' is unknown: choose one of 'block', 'sample'"),
        ({"drop_distribution": "flat"}, "drop_distribution='flat' is unknown"),
        ({"drop_rate": 1.2}, r"drop_rate=1.2 is not in \[0, 1\]"),
        ({"drop_rate": -0.2}, r"drop_rate=-0.2 is not in \[0, 1\]"),
        (
            {"stochastic_method": "sample", "drop_warmup": "5ba"},
            "drop_warmup='5ba' requires stochastic_method='block'",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        StochasticDepth(**{"target_layer_name": "ResNetBottleneck", **settings})


def test_a_model_without_such_blocks_is_logged(caplog):
    apply_stochastic_depth(nn.Linear(1, 1), "ResNetBottleneck")
    assert "StochasticDepth has no effect on this Linear: it has no Bottleneck" in caplog.text


def state_of(model, **settings):
    return State(model, rank_zero_seed=5, max_duration="10ba", **settings)


@pytest.mark.parametrize(("warmup", "num_batches"), [("4ba", 4), (0.5, 5), (Time(0.5, TimeUnit.DURATION), 5)])
def test_rates_rise_from_zero_in_the_warm_up_and_stay_then(warmup, num_batches):
    module, algorithm = block(), StochasticDepth("ResNetBottleneck", "block", 0.4, "linear", warmup)
    state = state_of(module)
    algorithm.apply(Event.INIT, state, None)
    assert module.drop_rate == 0
    rates = []
    for _ in range(8):
        assert algorithm.match(Event.BATCH_START, state)
        algorithm.apply(Event.BATCH_START, state, None)
        rates.append(module.drop_rate.item())
        state.timestamp = state.timestamp.to_next_batch(1)
    assert rates == pytest.approx([0.4 * min(1, i / num_batches) for i in range(8)])


def test_a_warm_up_that_is_a_part_of_an_unknown_length_is_refused():
    state, algorithm = state_of(block()), StochasticDepth("ResNetBottleneck", drop_warmup=0.5)
    algorithm.apply(Event.INIT, state, None)
    state.max_duration = None
    with pytest.raises(
        RuntimeError, match=r"drop_warmup='0\.5dur' depends on the completed fraction of training, whose length"
    ):
        algorithm.apply(Event.BATCH_START, state, None)


def test_a_resumed_warm_up_goes_on_at_once():
    first, second = (StochasticDepth("ResNetBottleneck", drop_rate=0.4, drop_warmup="4ba") for _ in range(2))
    state, resumed = state_of(block()), state_of(block())
    for algorithm, one in ((first, state), (second, resumed)):
        algorithm.apply(Event.INIT, one, None)
    state.timestamp = state.timestamp.to_next_batch(1).to_next_batch(1)
    first.apply(Event.BATCH_START, state, None)
    second.load_state_dict(first.state_dict())
    assert resumed.model.drop_rate == state.model.drop_rate == pytest.approx(0.2)


def test_a_seed_for_all_ranks_decides_anew_each_time_and_goes_on_after_a_checkpoint():
    def start():
        algorithm = StochasticDepth("ResNetBottleneck", drop_rate=0.5, use_same_gpu_seed=True)
        state = state_of(block())
        algorithm.apply(Event.INIT, state, None)
        return algorithm, state.model

    x = images()
    _, model = start()
    decisions = [model(x) is x for _ in range(30)]
    assert 5 < sum(decisions) < 25
    again, other = start()
    for _ in range(12):
        other(x)
    third, resumed = start()
    third.load_state_dict(again.state_dict())
    assert [resumed(x) is x for _ in range(18)] == decisions[12:]


def decisions_on_a_rank(use_same_gpu_seed, fsdp_config):
    torch.manual_seed(100 + torch.distributed.get_rank())
    algorithm = StochasticDepth("ResNetBottleneck", drop_rate=0.5, use_same_gpu_seed=use_same_gpu_seed)
    sharding = SimpleNamespace(fsdp=None, fsdp2=SimpleNamespace(), tp=None) if fsdp_config else None
    state = state_of(block(), parallelism_config=sharding)
    torch.manual_seed(100 + torch.distributed.get_rank())
    algorithm.apply(Event.INIT, state, None)
    torch.manual_seed(100 + torch.distributed.get_rank())
    x = images()
    return [state.model(x) is x for _ in range(30)]


@pytest.mark.parametrize(
    ("same_seed", "sharded", "alike"), [(None, False, False), (True, False, True), (None, True, True)]
)
def test_ranks_drop_different_blocks_unless_asked_or_sharded(tmp_path, same_seed, sharded, alike):
    first, second = run_ranks(decisions_on_a_rank, same_seed, sharded, store=tmp_path / "store")
    assert (first == second) == alike


@pytest.mark.parametrize("drop_rate", [0.0, 0.5])
def test_blocks_that_drop_examples_are_compiled_as_one_graph(drop_rate):
    module = stochastic(stochastic_method="sample", drop_rate=drop_rate)
    torch.manual_seed(0)
    expected = module(images())
    torch.manual_seed(0)
    compiled = torch.compile(module, backend="eager", fullgraph=True)(images())
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)


def test_only_whole_blocks_leave_parameters_without_gradients():
    assert StochasticDepth("ResNetBottleneck", "block").find_unused_parameters
    assert not StochasticDepth("ResNetBottleneck", "sample").find_unused_parameters


def test_the_algorithm_logs_how_many_blocks_there_are():
    class Log:
        def log_metrics(self, metrics):
            self.metrics = metrics

    log = Log()
    StochasticDepth("ResNetBottleneck", drop_rate=0.2).apply(Event.INIT, state_of(nn.Sequential(block(), block())), log)
    assert log.metrics == {"stochastic_depth/num_stochastic_layers": 2, "stochastic_depth/drop_rate": 0.2}


@pytest.mark.parametrize("method", ["block", "sample"])
def test_scaled_in_training_the_mean_output_is_that_of_the_unchanged_block(method):
    torch.manual_seed(0)
    plain = block().eval()
    stochastic = copy.deepcopy(plain)
    apply_stochastic_depth(stochastic, "ResNetBottleneck", method, 0.25, "uniform", rescale="train")
    x = torch.rand(1, 16, 4, 4) + 5  # large enough that no rectification makes the mean another one
    assert torch.equal(stochastic(x), plain(x))
    stochastic.training = True  # the norms stay in evaluation, so only what is dropped is random
    outputs = torch.cat([stochastic(x) for _ in range(400)])
    main = plain(x) - x
    kept = (outputs - x).abs().amax(dim=(1, 2, 3)) > 1e-4
    torch.testing.assert_close(outputs[kept] - x, (main / 0.75).expand(int(kept.sum()), -1, -1, -1), atol=1e-4, rtol=0)
    assert 0.68 < kept.float().mean() < 0.82  # 400 draws of 0.75: three standard deviations


def test_a_block_that_is_never_kept_is_not_scaled_in_training():
    block = BlockStochasticModule(nn.Linear(4, 4), drop_rate=1.0, rescale="train")
    x = torch.rand(2, 4)
    assert torch.equal(block(x), x)
    assert torch.equal(block.eval()(x), block.main(x) + x)
