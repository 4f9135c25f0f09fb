"""Algorithms that rebuild models hold together with each other, optimizers, microbatches, ranks and checkpoints."""

import copy
import io
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.resnet import BasicBlock

import composer_algorithms.functional as cf
from composer_algorithms import (
    BlurPool,
    ChannelsLast,
    Factorize,
    GhostBatchNorm,
    GyroDropout,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    SqueezeExcite,
    StochasticDepth,
    WeightStandardization,
)
from composer_dist.testing import run_ranks
from composer_events import Event, State

FACTORIZE = {"min_channels": 8, "latent_channels": 4, "min_features": 8, "latent_features": 4}
ALGORITHMS = {
    "BlurPool": partial(BlurPool, min_channels=8),
    "ChannelsLast": ChannelsLast,
    "Factorize": partial(Factorize, **FACTORIZE),
    "GhostBatchNorm": partial(GhostBatchNorm, ghost_batch_size=4),
    "GyroDropout": partial(GyroDropout, sigma=4, tau=2),
    "LowPrecisionGroupNorm": LowPrecisionGroupNorm,
    "LowPrecisionLayerNorm": LowPrecisionLayerNorm,
    "SqueezeExcite": partial(SqueezeExcite, latent_channels=4, min_channels=8),
    "StochasticDepth": partial(StochasticDepth, "ResNetBasicBlock", drop_rate=0.5, use_same_gpu_seed=True),
    "WeightStandardization": WeightStandardization,
}
FUNCTIONS = {
    "BlurPool": partial(cf.apply_blurpool, min_channels=8),
    "ChannelsLast": cf.apply_channels_last,
    "Factorize": partial(cf.apply_factorization, **FACTORIZE),
    "GhostBatchNorm": partial(cf.apply_ghost_batchnorm, ghost_batch_size=4),
    "SqueezeExcite": partial(cf.apply_squeeze_excite, latent_channels=4, min_channels=8),
    "StochasticDepth": partial(cf.apply_stochastic_depth, target_layer_name="ResNetBasicBlock", drop_rate=0.1),
    "WeightStandardization": cf.apply_weight_standardization,
    "LowPrecisionLayerNorm": partial(cf.apply_low_precision_layernorm, precision="amp_bf16"),
}
CHANGES_NAMES = ["BlurPool", "Factorize", "GhostBatchNorm", "SqueezeExcite", "WeightStandardization"]
each = pytest.mark.parametrize("name", ALGORITHMS)


SHARDING = SimpleNamespace(fsdp=None, fsdp2=SimpleNamespace(), tp=None)  # of a model that will be sharded


class Network(nn.Module):
    """Has something for each of them. Batches are those of the loop: four numbers an example, and three classes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = BasicBlock(8, 8)
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, batch):
        images = batch[0].view(-1, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
        return self.head(self.down(self.block(self.stem(images))).flatten(1))

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


def network(seed=0):
    torch.manual_seed(seed)
    return Network()


def batches(num=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(num)]


def applied(algorithm, model, optimizers=None, is_sharded=False):
    state = State(
        model,
        rank_zero_seed=0,
        max_duration="4ba",
        optimizers=optimizers,
        algorithms=algorithm,
        precision="amp_bf16",
        parallelism_config=SHARDING if is_sharded else None,
    )
    torch.manual_seed(1)
    algorithm.apply(Event.INIT, state, None)
    return state


def trained(model, optimizer):
    torch.manual_seed(2)
    for batch in batches():
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@each
def test_surgery_before_and_after_the_optimizer_exists_trains_the_same(name):
    results = []
    for optimizer_first in (True, False):
        model = network()
        make = partial(torch.optim.AdamW, lr=0.01)
        optimizer = make(model.named_parameters()) if optimizer_first else None
        applied(ALGORITHMS[name](), model, optimizer)
        optimizer = optimizer or make(model.named_parameters())
        group = optimizer.param_groups[0]
        assert dict(zip(group["param_names"], map(id, group["params"]), strict=True)) == {
            key: id(parameter) for key, parameter in model.named_parameters()
        }
        results.append(trained(model, optimizer))
    assert_equal(*results)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FUNCTIONS, 2)))
def test_two_rounds_of_any_two_of_them_are_one(first, second):
    once = network()
    FUNCTIONS[first](once)
    FUNCTIONS[second](once)
    twice = network()
    for _ in range(2):
        FUNCTIONS[first](twice)
        FUNCTIONS[second](twice)
    assert str(once) == str(twice)
    assert_equal(once.state_dict(), twice.state_dict())


@each
def test_a_checkpoint_applies_what_its_weights_need_and_gives_the_same_model(name):
    algorithm = ALGORITHMS[name]()
    saved = applied(algorithm, network())
    fresh = State(network(seed=5), rank_zero_seed=0, max_duration="4ba", precision="amp_bf16")
    if algorithm.required_on_load():
        with pytest.warns(UserWarning, match=f"Automatically adding required_on_load algorithm {name}"):
            fresh.load_state_dict(saved.state_dict(), strict=True)
        assert repr(fresh.algorithms[0]) == repr(algorithm)
        assert str(fresh.model) == str(saved.model)
    else:
        fresh.load_state_dict(saved.state_dict(), strict=True)
    batch = batches()[0]
    # Not bit by bit: in another memory format sums are in another order.
    torch.testing.assert_close(fresh.model.eval()(batch), saved.model.eval()(batch))


@pytest.mark.parametrize("name", CHANGES_NAMES)
def test_a_checkpoint_of_a_changed_model_does_not_load_without_its_algorithm(name):
    saved = applied(ALGORITHMS[name](), network())
    fresh = State(network(), rank_zero_seed=0, max_duration="4ba")
    with pytest.raises(RuntimeError, match=r"[Mm]issing"):
        fresh.load_state_dict(saved.state_dict(), strict=True, exclude_algorithms=[name])


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not name.startswith("LowPrecision")])  # needs autocast
def test_a_resumed_run_ends_as_the_run_without_a_break(name, make_loop, make_saver):
    def start(saver=None):
        callbacks = [saver] if saver else []
        model = Network()
        model.head[2].p = 0.0  # the generator of torch's own dropout is not in the loop's checkpoints
        return make_loop([ALGORITHMS[name]()], callbacks, model, max_duration="2ep", microbatch_size=4)

    saver = make_saver("3ba")
    whole = start(saver).fit()
    resumed = start().resume_from(saver.checkpoints[0]).fit()
    assert_equal(whole.state.model.state_dict(), resumed.state.model.state_dict())


@each
def test_training_works_in_mixed_precision_and_in_bfloat16(name):
    for model, x in ((network(), torch.float32), (network().bfloat16(), torch.bfloat16)):
        algorithm = ALGORITHMS[name]()
        state = applied(algorithm, model)
        inputs, targets = batches()[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=x == torch.float32):
            loss = model.loss(model((inputs.to(x), targets)), (inputs, targets))
        loss.backward()
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        assert gradients
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert {p.dtype for p in model.parameters()} == {x}


def without_randomness(model):
    """Batch statistics and dropout differ between one rank and two, whatever the algorithm."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.Dropout)):
            module.eval()
    return model


def gradients_on_a_rank(name, kind):
    model = without_randomness(network())
    if name == "GhostBatchNorm":
        model.train()
        model.head[2].eval()
    applied(ALGORITHMS[name](), model, is_sharded=kind == "fsdp2")
    inputs, targets = batches()[0]
    rank = torch.distributed.get_rank()
    mine = (inputs[4 * rank : 4 * rank + 4], targets[4 * rank : 4 * rank + 4])
    if kind == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        model.loss(wrapped(mine), mine).backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.stem, model.block, model.down, model.head, model):
        fully_shard(part, mesh=mesh)
    model.loss(model(mine), mine).backward()
    return {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("GyroDropout", "StochasticDepth")])
def test_two_ranks_have_the_gradients_of_the_whole_batch(tmp_path, name, kind):
    first, second = run_ranks(gradients_on_a_rank, name, kind, store=tmp_path / "store")
    assert_equal(first, second)
    model = without_randomness(network())
    if name == "GhostBatchNorm":  # with ghost batches as large as a rank's batch even these are the same
        model.train()
        model.head[2].eval()
    applied(ALGORITHMS[name](), model)
    batch = batches()[0]
    model.loss(model(batch), batch).backward()
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert first.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(first[key], gradient, atol=1e-5, rtol=1e-3)  # the order of sums in float32


def sharded_training_on_a_rank(name):
    model = network()
    algorithm = ALGORITHMS[name]()
    state = applied(algorithm, model, is_sharded=True)
    if name == "GyroDropout":
        algorithm.apply(Event.FIT_START, state, None)
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.stem, model.block, model.down, model.head, model):
        fully_shard(part, mesh=mesh)
    losses = []
    for batch in batches(6):
        if algorithm.match(Event.BATCH_START, state):
            algorithm.apply(Event.BATCH_START, state, None)
        loss = model.loss(model(batch), batch)
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["GyroDropout", "StochasticDepth"])
def test_random_ones_work_on_a_sharded_model(tmp_path, name):
    first, second = run_ranks(sharded_training_on_a_rank, name, store=tmp_path / "store")
    assert len(first) == len(second) == 6


def test_all_of_them_together_are_put_in_order_and_train_and_load(make_loop):
    def start():
        return make_loop([make() for make in reversed(ALGORITHMS.values())], model=Network(), max_duration="1ep")

    with pytest.warns(Warning, match="Low Precision") as caught:
        loop = start()
    assert {str(warning.message)[:13] for warning in caught} == {"Low Precision"}  # the loop's precision is fp32
    model = loop.fit().state.model
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(hasattr(conv, "parametrizations") for conv in convs)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with pytest.warns(Warning, match="Low Precision"):
        other = start().state.model
    other.load_state_dict(torch.load(file, weights_only=True))
    batch = batches()[0]
    assert torch.equal(other.eval()(batch), model.eval()(batch))
    assert torch.equal(copy.deepcopy(model).eval()(batch), model.eval()(batch))
