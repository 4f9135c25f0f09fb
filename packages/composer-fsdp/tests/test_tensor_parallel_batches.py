"""Ranks that shard one tensor must read the same batches."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer_dist import dist, get_device, seed_all
from composer_dist.testing import run_ranks
from composer_fsdp import FSDP, FSDPConfig, ParallelismConfig, TPConfig, make_plan

CPU = get_device("cpu")
SPLIT = {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}


def make():
    seed_all(3)
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    config = ParallelismConfig(fsdp=FSDPConfig(), tp=TPConfig(tensor_parallel_degree=2, layer_plan=SPLIT))
    strategy = FSDP(CPU, make_plan(config, world_size=dist.get_world_size()))
    strategy.prepare(model, [])
    return strategy, model


def texts_of(read):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read()
    return [str(warning.message) for warning in caught if "first batches differ" in str(warning.message)]


def batches_of_rank():
    """Return a batch that only this rank has, and one that all have."""
    own = (torch.full((2, 2), float(dist.get_global_rank())), {"labels": torch.ones(2)})
    return own, (torch.full((2, 2), float("nan")), {"labels": torch.ones(2)})


def read_batches():
    warnings.simplefilter("ignore", FutureWarning)
    own, shared = batches_of_rank()

    def read(*batches):
        strategy, _ = make()
        for batch in batches:
            assert strategy.prepare_batch(batch) is batch
        return strategy.batch_rank

    return {
        "the same": texts_of(lambda: read(shared, own)),
        "others": texts_of(lambda: read(own, own)),
        "batch_rank": read(shared),
    }


def test_ranks_of_one_tensor_are_warned_if_their_first_batches_differ(tmp_path):
    for said in run_ranks(read_batches, store=tmp_path / "store"):
        assert said["the same"] == []
        (text,) = said["others"]
        assert "dist.get_sampler(dataset, num_replicas=1, rank=dist.get_global_rank() // 2)" in text
        assert said["batch_rank"] == 0


def read_batches_again():
    warnings.simplefilter("ignore", FutureWarning)
    own, shared = batches_of_rank()

    def attempt(first, second):
        strategy, model = make()
        for batch, fails in ((first, True), (second, False)):
            try:
                with strategy.attempt(lambda: None):
                    strategy.prepare_batch(batch)
                    model.net(batch[0])
                    if fails:
                        raise torch.OutOfMemoryError("injected")
            except torch.OutOfMemoryError:
                continue

    return len(texts_of(lambda: attempt(shared, own))), len(texts_of(lambda: attempt(own, shared)))


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch has no FSDPModule.reset_iter_state")
def test_of_attempts_only_the_one_that_counts_is_compared(tmp_path):
    assert run_ranks(read_batches_again, store=tmp_path / "store") == [(1, 0)] * 2
