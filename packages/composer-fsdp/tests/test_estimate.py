"""What an estimate promises beside its numbers, and numbers that follow from a formula."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer_fsdp import FSDPConfig, ParallelismConfig, TPConfig, Workload, estimate

WORLD = 4


class Block(nn.Module):
    def __init__(self, width, device="meta"):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False, device=device)
        self.down = nn.Linear(4 * width, width, bias=False, device=device)

    def forward(self, inputs):
        return inputs + self.down(self.up(inputs).relu())


class Net(nn.Sequential):
    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)


class Model(nn.Module):
    """Has a loss, as a ComposerModel; its child is what is sharded."""

    def __init__(self, width=64, depth=3, device="meta"):
        super().__init__()
        self.net = Net(nn.Linear(width, width, device=device), *(Block(width, device) for _ in range(depth)))
        for block in list(self.net)[1:]:
            block._activation_checkpointing = True

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1].to(outputs.dtype))

    def eval_forward(self, batch, outputs=None):
        return self(batch) if outputs is None else outputs


def batch_of(size, width=64):
    return torch.zeros((size, width), device="meta"), torch.zeros((size, width), device="meta")


def needs(settings=(), *, model=None, size=8, world_size=WORLD, precision="fp32", gpu_memory=None, **work):
    config = FSDPConfig(min_params=None, **dict(settings))
    return estimate(
        model or Model(),
        config,
        Workload(batch_of(size), **work),
        world_size=world_size,
        precision=precision,
        gpu_memory=gpu_memory,
    )


def parameters(width=64, depth=3):
    return width * width + width + depth * 8 * width * width


def test_shards_gradients_and_state_are_parts_of_the_model():
    # SGD with momentum keeps one number for each; of all tensors 4 ranks hold equal parts.
    needed = needs(optimizer=lambda params: torch.optim.SGD(params, momentum=0.9))
    shard = parameters() * 4 // WORLD
    assert needed.peak.kinds["parameters"] == shard
    assert needed.peak.kinds["optimizer state"] == shard


def test_a_tensor_with_fewer_rows_than_ranks_is_whole_on_rank_zero_row_by_row():
    model = nn.Linear(16, 3, bias=False, device="meta")
    work = Workload(torch.zeros((2, 16), device="meta"), optimizer=torch.optim.SGD)
    assert estimate(model, FSDPConfig(), work, world_size=64).peak.kinds["parameters"] == 16 * 4


def test_traffic_is_that_of_a_ring():
    needed = needs(precision="amp_bf16")
    sent = (WORLD - 1) / WORLD
    blocks, root = 3 * 8 * 64 * 64, 64 * 64 + 64
    # Blocks are gathered for the forward and for the backward pass, the outermost weights once.
    assert needed.sent == {"all_gather": sent * 2 * (2 * blocks + root), "reduce_scatter": sent * 4 * (blocks + root)}
    assert needed.calls == {"all_gather": 7, "reduce_scatter": 4}


def test_each_microbatch_is_reduced_by_itself():
    assert needs(microbatches=3).calls["reduce_scatter"] == 3 * 4


def test_replicas_add_an_all_reduce_of_shards():
    needed = needs({"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2})
    assert needed.calls["all_reduce"] == 4
    assert needed.sent["all_reduce"] == 2 * 1 / 2 * parameters() * 4 / 2  # 2 (n - 1) / n of a half, in float32


def test_a_hybrid_strategy_shards_inside_a_node():
    config = FSDPConfig(sharding_strategy="HYBRID_SHARD")
    needed = estimate(Model(), config, Workload(batch_of(8)), world_size=16, local_world_size=4)
    assert needed.peak.kinds["parameters"] == parameters() * 4 // 4


def test_tensor_parallel_splits_weights_over_more_ranks_and_reduces_activations():
    layer_plan = {"net.[123].up": ColwiseParallel(), "net.[123].down": RowwiseParallel()}
    config = ParallelismConfig(
        fsdp=FSDPConfig(min_params=None, data_parallel_shard_degree=2),
        tp=TPConfig(tensor_parallel_degree=2, layer_plan=layer_plan),
    )
    needed = estimate(Model(), config, Workload(batch_of(8)), world_size=4)
    blocks, root = 3 * 8 * 64 * 64, 64 * 64 + 64
    assert needed.peak.kinds["parameters"] == 4 * (blocks // 4 + root // 2)
    # The sum of a block's outputs in the forward pass, of float32, and that of its inputs' gradients in the backward.
    assert needed.calls["all_reduce"] == 3 * 2
    assert needed.sent["all_reduce"] == 3 * 2 * 8 * 64 * 4


def test_weights_that_two_modules_share_count_once():
    model = Model()
    model.net[2].up.weight = model.net[1].up.weight
    config = {"tie_policy": "group"}
    assert needs(config, model=model).peak.kinds["parameters"] == (parameters() - 4 * 64 * 64) * 4 // WORLD


def test_weights_without_shards_are_averaged_once():
    assert needs(model=Scaled()).calls["all_reduce"] == 1


class Scaled(Model):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device="meta"))

    def forward(self, batch):
        return super().forward(batch) * self.scale


def test_more_examples_need_more():
    assert needs(size=512, precision="amp_bf16").peak.bytes > needs(size=8, precision="amp_bf16").peak.bytes
    assert needs(size=8, batch_size=512).peak == needs(size=512).peak


def test_weights_that_are_freed_after_the_forward_pass_are_not_counted_until_the_backward_pass():
    settings = {"model": Model(depth=12), "size": 1, "optimizer": torch.optim.SGD}
    kept = needs({"sharding_strategy": "SHARD_GRAD_OP"}, **settings).peak.bytes
    freed = needs({"sharding_strategy": "FULL_SHARD"}, **settings).peak.bytes
    # Of the 12 blocks one is at work and one is gathered ahead, and gradients of two are on their way.
    assert kept - freed >= 6 * 8 * 64 * 64 * 4


def test_checkpointed_activations_need_less():
    settings = {"activation_checkpointing": True}
    assert needs(settings, size=4096).peak.bytes < needs(size=4096).peak.bytes


def test_what_is_offloaded_counts_as_the_host_s():
    needed = needs({"cpu_offload": True})
    assert not {"parameters", "gradients", "optimizer state"} & set(needed.peak.kinds)
    assert needed.host.kinds["parameters"] == parameters() * 4 // WORLD


def test_offloaded_activations_count_as_the_host_s():
    settings = {"activation_checkpointing": True, "activation_cpu_offload": True}
    # What a checkpointed block keeps is its input.
    assert needs(settings, size=4096).host.bytes == 3 * 4096 * 64 * 4
    assert needs(size=4096).host.bytes == 0


def test_a_model_beyond_any_memory_is_estimated():
    model = nn.Linear(2**20, 2**20, bias=False, device="meta")  # 4 TiB
    work = Workload(torch.zeros((1, 2**20), device="meta"), optimizer=torch.optim.SGD)
    assert estimate(model, FSDPConfig(), work, world_size=512).peak.kinds["parameters"] == 2**42 // 512


def test_the_model_stays_as_it_is():
    model = Model(device="cpu")
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    needs({"activation_checkpointing": True}, model=model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(id(after[name]) == number and after[name].equal(value) for name, (number, value) in before.items())
    assert not torch.distributed.is_initialized()


def test_a_verdict_names_memory_and_place():
    text = str(needs(gpu_memory=2**30))
    assert "needs " in text.splitlines()[0]
    assert " of 1.0 GiB at the peak, in " in text.splitlines()[0]


def test_what_does_not_fit_comes_with_what_would_need_less():
    needed = needs({"sharding_strategy": "SHARD_GRAD_OP"}, size=4096, gpu_memory=2**20)
    changes = {suggestion.change: suggestion.peak_bytes for suggestion in needed.suggestions}
    assert not needed.fits
    assert changes["activation_checkpointing=True"] < needed.peak.bytes
    assert changes["microbatches of 2048 examples in place of 4096"] < needed.peak.bytes
    assert "does not fit: " in str(needed)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ({"batch": "nothing"}, "batch='nothing' has no tensor"),
        ({"batch": torch.zeros(2, 3), "batch_size": 0}, "batch_size=0 is not"),
        ({"batch": torch.zeros(2, 3), "microbatches": True}, "microbatches=True is not"),
    ],
)
def test_impossible_work_is_refused(work, words):
    with pytest.raises(ValueError, match=words):
        Workload(**work)


def test_a_world_that_nodes_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="local_world_size=3 does not divide world_size=8"):
        estimate(Model(), FSDPConfig(), Workload(batch_of(2)), world_size=8, local_world_size=3)


def test_a_model_that_looks_at_values_is_refused():
    class Curious(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * (2 if inputs.sum().item() > 0 else 1)

    with pytest.raises(RuntimeError, match="asks for the values of a tensor"):
        estimate(Curious(2, 2), FSDPConfig(), Workload(torch.zeros(2, 2)), world_size=2)


def test_a_model_that_somebody_has_sharded_is_refused():
    with pytest.raises(ValueError, match="auto_wrap=False says that the model is sharded already"):
        estimate(Model(), FSDPConfig(auto_wrap=False), Workload(batch_of(2)), world_size=2)


def test_a_loss_without_gradients_is_refused():
    work = Workload(torch.zeros(2, 2), loss=lambda outputs, batch: batch.sum())
    with pytest.raises(ValueError, match="no tensor needs gradients"):
        estimate(nn.Linear(2, 2), FSDPConfig(), work, world_size=2)
