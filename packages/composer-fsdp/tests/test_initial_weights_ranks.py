"""Initial weights of a sharded model, whichever rank had them before."""

import warnings

import pytest
import torch
from torch import nn

from composer_dist import dist, get_device, seed_all
from composer_dist.testing import run_ranks
from composer_fsdp import FSDP, FSDP2Config, FSDPConfig, make_plan

CPU = get_device("cpu")


class Layer(nn.Linear):
    """Counts how often it is filled, and has a cache that checkpoints leave out."""

    def __init__(self, *shape):
        self.num_fills = 0
        super().__init__(*shape)
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def reset_parameters(self):
        self.num_fills += 1
        super().reset_parameters()
        if hasattr(self, "cache"):
            self.cache = torch.arange(4.0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Layer(5, 7), Layer(7, 7), nn.LayerNorm(7), Layer(7, 3))

    def forward(self, inputs):
        return self.net(inputs)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        self.net[1].weight = self.net[0].weight


def shard(model, config=None, seed=5):
    config = config or FSDPConfig(min_params=30)
    strategy = FSDP(CPU, make_plan(config, world_size=dist.get_world_size()), seed=seed)
    strategy.prepare(model, [])
    return {name: value.clone() for name, value in strategy.model_state_dict(model).items()}


def begin_on_meta():
    with torch.device("meta"):
        model, tied = Model(), Tied()
    before = [layer.num_fills for layer in model.modules() if isinstance(layer, Layer)]
    weights = shard(model)
    fills = [layer.num_fills for layer in model.modules() if isinstance(layer, Layer)]
    caches = [layer.cache.tolist() for layer in model.modules() if isinstance(layer, Layer)]
    shard(tied)
    is_tied = tied.net[0].weight is tied.net[1].weight
    return weights, [after - b for after, b in zip(fills, before, strict=True)], caches, is_tied


def test_weights_drawn_from_one_seed_are_the_same_however_many_ranks_share_them(tmp_path):
    results = [
        result
        for size in (1, 2, 4)
        for result in run_ranks(begin_on_meta, store=tmp_path / f"store{size}", world_size=size)
    ]
    first = results[0][0]
    assert all(value.std() > 0 for name, value in first.items() if name.endswith("0.weight"))
    for weights, fills, caches, is_tied in results:
        assert all(torch.equal(weights[name], first[name]) for name in first)
        assert fills == [1, 1, 1]
        assert caches == [[0.0, 1.0, 2.0, 3.0]] * 3
        assert is_tied


def begin_with_rank_zero(kind):
    warnings.simplefilter("ignore")
    seed_all(1 + dist.get_global_rank())
    on_meta = dist.get_global_rank() > 0 and kind != "real"
    with torch.device("meta" if on_meta else "cpu"):
        model = Model()
        tied = Tied()
    config = FSDP2Config() if kind == "narrow" else FSDPConfig(min_params=30, sync_module_states=True)
    weights = shard(model, config)
    shard(tied, config)
    caches = [layer.cache.tolist() for layer in model.modules() if isinstance(layer, Layer)]
    return weights, caches, tied.net[0].weight is tied.net[1].weight


@pytest.mark.parametrize("kind", ["real", "meta", "narrow"])
def test_ranks_receive_the_weights_of_rank_zero(kind, tmp_path):
    seed_all(1)
    expected = Model().state_dict()
    for weights, caches, is_tied in run_ranks(begin_with_rank_zero, kind, store=tmp_path / "store"):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert caches == [[0.0, 1.0, 2.0, 3.0]] * 3
        assert is_tied


def refusals():
    """Return what is said on this rank about beginnings that cannot be made good."""
    is_first = dist.get_global_rank() == 0
    said = []

    def refuse(match, model, config=None):
        with pytest.raises(ValueError, match=match) as refusal:
            shard(model, config)
        said.append(str(refusal.value))

    with torch.device("meta" if is_first else "cpu"):
        model = Model()
    refuse("Invalid FSDP2 model initialization detected", model, FSDPConfig(sync_module_states=True))
    with torch.device("cpu" if is_first else "meta"):
        model = Model()
    refuse("Detected mixed initialization", model)
    with torch.device("meta"):
        model = nn.Module()
        model.net = nn.Module()
        model.net.weight = nn.Parameter(torch.empty(3, 3))
    refuse("neither param_init_fn and reset_parameters", model)
    with torch.device("meta"):
        model = Model()
        model.left_alone = nn.Linear(2, 2)
        model.left_alone._fsdp_wrap = False
    with pytest.raises(AssertionError, match=r"'left_alone\.weight', .* are not sharded") as refusal:
        shard(model)
    said.append(str(refusal.value))
    shared = nn.Linear(2, 2)
    model = nn.Module()
    model.net = nn.Sequential(shared, shared)
    refuse("duplicate module references", model, FSDPConfig(sync_module_states=True))
    seed_all(1 + dist.get_global_rank())
    with pytest.warns(UserWarning, match="The ranks begin with different weights, for example 'net.0.weight'"):
        shard(Model())
    return said


def test_a_beginning_that_cannot_be_made_good_is_refused_alike_on_every_rank(tmp_path):
    first, second = run_ranks(refusals, store=tmp_path / "store")
    assert first == second
