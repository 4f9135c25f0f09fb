"""A Trainer whose model is sharded trains, saves and goes on as one whose model is not."""

import math
import os
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from composer import Trainer
from composer.algorithms import GradientClipping
from composer.models import ComposerGPT, ComposerModel
from composer.utils import FSDP2Config, FSDPConfig
from composer_dist import dist
from composer_dist.devices import Device
from composer_dist.testing import run_ranks

# Two ranks add up the same numbers in another order.
TOLERANCE = 64 * torch.finfo(torch.float32).eps


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs):
        return inputs + self.down(F.gelu(self.up(inputs)))


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 6), Block(6), Block(6), nn.Linear(6, 3))

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)

    activation_checkpointing_fn = fsdp_wrap_fn


def make(**arguments):
    warnings.simplefilter("ignore")
    torch.manual_seed(11)
    model = ComposerModel.from_module(Network(), F.cross_entropy)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(32, 5, generator=generator), torch.randint(0, 3, (32,), generator=generator)
    )
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=False))
    settings = {
        "train_dataloader": loader,
        "eval_dataloader": loader,
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.01),
        "algorithms": GradientClipping("norm", 0.5),
        "max_duration": "4ba",
        "device_train_microbatch_size": 2,
        "device": "cpu",
        "progress_bar": False,
        "seed": 5,
    }
    return Trainer(model=model, **{**settings, **arguments})


def train(arguments):
    with make(**arguments) as trainer:
        trainer.fit()
        state = trainer.state
        weights = {name: value.clone() for name, value in trainer.strategy.model_state_dict(state.model).items()}
        config = state.fsdp_config
        seen = {
            "enabled": state.fsdp_enabled,
            "version": state.fsdp_config_version,
            "type": state.fsdp_state_dict_type,
            "mesh": None if state.device_mesh is None else state.device_mesh.mesh_dim_names,
            "mesh of the settings": None if config is None else config.device_mesh is not None,
            "samples": int(state.timestamp.sample),
        }
    return weights, seen


def train_each(several):
    return [train(arguments) for arguments in several]


def run(folder, *several, world_size=2):
    """Train with each of some arguments, in the same processes one after the other, and return what rank 0 saw."""
    name = f"store{len(os.listdir(folder))}"
    return run_ranks(train_each, several, store=folder / name, world_size=world_size, timeout_s=120)[0]


def farthest(weights, others):
    assert list(weights) == list(others)
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights that data parallelism gives."""
    return run(tmp_path_factory.mktemp("plain"), {})[0][0]


SPELLINGS = [
    {"parallelism_config": {"fsdp": {"sharding_strategy": "FULL_SHARD"}}},
    {"parallelism_config": {"fsdp": FSDPConfig(activation_checkpointing=True)}},
    {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP", "min_params": 1e8}},
]


@pytest.mark.slow
def test_a_sharded_model_is_trained_to_the_same_weights_in_any_spelling(plain, tmp_path):
    for weights, seen in run(tmp_path, *SPELLINGS):
        assert farthest(weights, plain) < TOLERANCE
        assert seen == {
            "enabled": True,
            "version": 1,
            "type": "full",
            "mesh": ("data_parallel_shard",),
            "mesh of the settings": True,
            "samples": 32,
        }


# In the spelling of Composer's documentation, each with the file that is there after two batches.
KINDS = {
    "full": ("ba{batch}.pt", "ba2.pt"),
    "sharded": ("ba{batch}.pt", "ep0-ba2"),
    "local": ("ba{batch}_rank{rank}.pt", "ba2_rank{rank}.pt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_checkpoint_of_each_type(kind, plain, tmp_path):
    filename, saved = KINDS[kind]
    folder = tmp_path / "checkpoints"
    sharding = {"parallelism_config": {"fsdp": {"state_dict_type": kind}}}
    saving = {"save_folder": str(folder), "save_filename": filename, "save_interval": "2ba"}
    loading = {"load_path": str(folder / saved)}
    runs = [{**sharding, **saving}, {**sharding, **loading}]
    if kind == "full":
        on_rank_zero = {"load_monolith_rank0_only": True, "sync_module_states": True}
        runs += [loading, {"parallelism_config": {"fsdp": on_rank_zero}, **loading}]
    (weights, _), (resumed, seen), *others = run(tmp_path, *runs)
    assert farthest(weights, plain) < TOLERANCE
    assert (farthest(resumed, weights), seen["samples"]) == (0.0, 32)
    if kind == "local":
        assert {"ba2_rank0.pt", "ba2_rank1.pt", "ba4_rank0.pt", "ba4_rank1.pt"} <= set(os.listdir(folder))
        return
    # One rank has batches of half the size, so it goes on with the next epoch, which ends after eight of them.
    ((_, seen),) = run(tmp_path, {**sharding, **loading, "max_duration": "4ba"}, world_size=1)
    assert (seen["samples"], seen["enabled"]) == (16 + 2 * 4, True)
    if kind == "full":
        (unsharded, _), (handed_on, _) = others
        assert farthest(unsharded, plain) < TOLERANCE
        assert farthest(handed_on, weights) == 0.0


def train_a_model_without_weights():
    with torch.device("meta"):
        model = ComposerGPT({"d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 16, "max_seq_len": 4})
    tokens = torch.arange(32).remainder(16).view(8, 4)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=dist.get_sampler(data))
    settings = {"device": "cpu", "progress_bar": False, "max_duration": "1ba"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaders = {"train_dataloader": loader, "eval_dataloader": loader}
    with Trainer(model=model, optimizers=optimizer, fsdp_config={}, **loaders, **settings) as trainer:
        trainer.fit()
        return {name: metric.compute().item() for name, metric in trainer.state.eval_metrics["eval"].items()}


def test_a_model_made_on_the_meta_device_is_filled_and_measured(tmp_path):
    first, second = run_ranks(train_a_model_without_weights, store=tmp_path / "store")
    assert first == second
    # Small weights say little about the next of 16 tokens.
    assert first["LanguageCrossEntropy"] == pytest.approx(math.log(16), rel=0.05)


def test_metrics_made_on_the_meta_device_are_refused_by_name():
    with torch.device("meta"):
        model = ComposerModel.from_module(nn.Linear(5, 3), F.cross_entropy, metrics=MeanMetric())
    with pytest.raises(ValueError, match="'MeanMetric' of the model, a MeanMetric, is on the meta device"):
        Trainer(model=model, eval_dataloader=[(torch.ones(4, 5), torch.zeros(4))], device="cpu")


class Collectives(TorchDispatchMode):
    """Counts what the ranks send. (Torch's own `CommDebugMode` fails on sharded modules in torch 2.11.)"""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # what it does with its parts is seen
        if func.namespace == "c10d":
            self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(run):
    """Return what a run of four steps more has needed."""
    counts = []
    for num_steps in (4, 8):
        with Collectives() as mode:
            run(num_steps)
        counts.append(mode.counts)
    return {name: count / 4 for name, count in (counts[1] - counts[0]).items()}


def count_collectives():
    def by_hand(num_steps):
        torch.manual_seed(11)
        model = Network()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in [model[1], model[2], model]:
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(num_steps):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.ones(4, 5)), torch.zeros(4, dtype=torch.long)).backward()
            optimizer.step()

    def with_trainer(num_steps, on_divergence="raise", algorithms=()):
        sharding = {"parallelism_config": {"fsdp": {}}, "max_duration": f"{num_steps}ba"}
        alone = {"algorithms": list(algorithms), "eval_dataloader": None, "device_train_microbatch_size": 4}
        with make(**sharding, **alone, on_divergence=on_divergence) as trainer:
            trainer.fit()

    return [
        collectives_of_a_step(by_hand),
        collectives_of_a_step(partial(with_trainer, on_divergence=None)),
        collectives_of_a_step(with_trainer),
        collectives_of_a_step(partial(with_trainer, algorithms=[GradientClipping("value", 1.0)])),
    ]


def test_a_step_needs_the_collectives_of_a_loop_by_hand(tmp_path):
    for by_hand, unguarded, guarded, clipped in run_ranks(count_collectives, store=tmp_path / "store", timeout_s=120):
        # Three units, of which the root's weights stay gathered until its backward pass.
        assert by_hand == {"c10d._allgather_base_": 5, "c10d._reduce_scatter_base_": 3}
        assert unguarded == by_hand
        # Whether the gradients of all ranks are finite, the reductions themselves say.
        assert guarded == by_hand
        # What an algorithm has made of them takes one more.
        assert clipped == {**by_hand, "c10d.allreduce_": 1}


BAD = [
    (
        {"parallelism_config": {"fsdp": {"shardng_strategy": "FULL_SHARD"}}},
        TypeError,
        "Did you mean 'sharding_strategy'",
    ),
    (
        {"parallelism_config": {"fsdp": {"sharding_strategy": "ALL"}}},
        ValueError,
        "sharding_strategy='ALL' is not a valid value",
    ),
    ({"parallelism_config": {"fsdp": {}}, "fsdp_config": {}}, ValueError, "were both given"),
    (
        {"parallelism_config": {"fsdp": {}}, "deepspeed_config": {}},
        ValueError,
        "deepspeed_config and parallelism_config",
    ),
    ({"parallelism_config": {"fsdp": {}}, "ddp_sync_strategy": "forced_sync"}, ValueError, "cannot be combined with"),
    ({"parallelism_config": {"tp": {"tensor_parallel_degree": 2}}}, ValueError, "currently requires FSDP"),
    (
        {"parallelism_config": {"fsdp": {"data_parallel_shard_degree": 3}}},
        ValueError,
        "World size 2 is less than the product",
    ),
]


def refuse_all(cases):
    said = []
    for arguments, kind, text in cases:
        with pytest.raises(kind, match=text) as refusal:
            make(**arguments)
        said.append(str(refusal.value))
    # Nobody has waited for anybody: the group that the test made is the only one, and it still works.
    return said, dist.all_gather_object(len(said))


def test_bad_settings_are_found_on_every_rank_before_any_waits_for_another(tmp_path):
    first, second = run_ranks(refuse_all, BAD, store=tmp_path / "store", timeout_s=120)
    assert first == second == (first[0], [len(BAD)] * 2)


def differ():
    strategy = "FULL_SHARD" if dist.get_global_rank() == 0 else "SHARD_GRAD_OP"
    with pytest.raises(ValueError, match="the ranks do not agree") as refusal:
        make(parallelism_config={"fsdp": {"sharding_strategy": strategy}})
    return str(refusal.value)


def test_ranks_with_other_settings_are_told_what_differs(tmp_path):
    for said in run_ranks(differ, store=tmp_path / "store", timeout_s=120):
        assert "parallelism_config.sharding_strategy: 'FULL_SHARD' on rank 0, 'SHARD_GRAD_OP' on rank 1" in said


@pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
def test_the_size_of_a_microbatch_is_found_out_with_the_broad_settings_only():
    from composer.trainer._strategies import plan_sharding  # a GPU is needed to get as far by way of the Trainer
    from composer_dist import Precision
    from composer_fsdp import ParallelismConfig

    with pytest.raises(ValueError, match="Auto microbatching is not supported outside of FSDP1"):
        plan_sharding(ParallelismConfig(fsdp2=FSDP2Config()), Precision.FP32, is_auto=True)


class TakenForGPU(Device):
    """The CPU; memory runs out on a GPU only."""

    name = "gpu"
    dist_backend = "gloo"
    torch_device = torch.device("cpu")

    def module_to_device(self, module):
        return module

    def tensor_to_device(self, tensor):
        return tensor


def test_the_size_is_not_found_out_with_a_torch_that_cannot_repeat_a_step(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)  # torch 2.11 has none
    with pytest.raises(ValueError, match=r"FSDPModule\.reset_iter_state"):
        make(device=TakenForGPU(), device_train_microbatch_size="auto", parallelism_config={"fsdp": {}})
