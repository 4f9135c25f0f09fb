import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as tdist
from torch.testing import assert_close

from composer_optim import DecoupledAdamW, DecoupledSGDW


@pytest.fixture
def process_group(tmp_path):
    """Be the only rank of a process group."""
    tdist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    tdist.destroy_process_group()


def step_once(param, **options):
    optimizer = DecoupledAdamW([param], lr=0.1, weight_decay=5e-4, **options)
    param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"cautious_updates": True}, {"clip_updates": True}], ids=str
)
def test_each_parameter_gets_four_norms(options):
    before = torch.tensor([3.0, 4.0, 12.0], dtype=torch.float64)
    param = before.clone().requires_grad_()
    optimizer = step_once(param, **options)
    metrics = optimizer.report_per_parameter_metrics(param, "layer.weight", {"already": torch.tensor(1.0)})
    assert set(metrics) == {
        "already",
        *(f"l2_norm/{what}/layer.weight" for what in ("moment", "param", "update", "grad")),
    }
    assert not any(value.requires_grad for value in metrics.values())
    del metrics["already"]
    expected = {
        "l2_norm/moment/layer.weight": 0.1 * 0.5 * math.sqrt(3),
        "l2_norm/param/layer.weight": param.detach().norm().item(),
        "l2_norm/update/layer.weight": (before - param.detach()).norm().item(),
        "l2_norm/grad/layer.weight": 0.5 * math.sqrt(3),
    }
    # PyTorch counts the steps in float32, so 1 - 0.95 is known to one part in ten million.
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected, rel=1e-6)


def test_the_metrics_are_added_to_what_was_given():
    param = torch.ones(2, requires_grad=True)
    optimizer = step_once(param)
    metrics = {}
    assert optimizer.report_per_parameter_metrics(param, "weight", metrics) is metrics
    assert optimizer.pre_reduce_metrics(metrics) is metrics
    assert optimizer.dist_reduce_metrics(metrics) is metrics


class CountedList(list):
    """A list that counts how often it is gone through."""

    rounds = 0

    def __iter__(self):
        self.rounds += 1
        return super().__iter__()


def test_the_groups_are_searched_once_for_all_parameters():
    params = [torch.ones(2, requires_grad=True) for _ in range(20)]
    optimizer = DecoupledAdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    counted = optimizer.param_groups[0]["params"] = CountedList(params)
    for param in params:
        optimizer.report_per_parameter_metrics(param, "weight", {})
    assert counted.rounds <= 1


def test_the_metrics_follow_a_parameter_into_its_present_group():
    params = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    optimizer = DecoupledAdamW([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}], weight_decay=0.0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()

    def reported():
        metrics = {}
        for index, param in enumerate(params):
            optimizer.report_per_parameter_metrics(param, str(index), metrics)
        return [metrics[f"l2_norm/update/{index}"].item() / math.sqrt(2) for index in range(3)]

    # The first step of Adam goes by the learning rate.
    assert reported() == pytest.approx([0.1, 0.1, 0.2], rel=1e-6)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.3
    optimizer.load_state_dict(state)
    assert reported() == pytest.approx([0.3, 0.3, 0.2], rel=1e-6)
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop(0))
    assert reported() == pytest.approx([0.2, 0.3, 0.2], rel=1e-6)


def test_a_parameter_that_was_never_stepped_adds_nothing():
    param = torch.ones(2, requires_grad=True)
    optimizer = DecoupledAdamW([param])
    assert optimizer.report_per_parameter_metrics(param, "weight", {}) == {}
    param.grad = torch.ones_like(param)
    assert optimizer.report_per_parameter_metrics(param, "weight", {}) == {}
    assert not optimizer.state, "asking must not make state"
    optimizer.step()
    param.grad = None
    assert optimizer.report_per_parameter_metrics(param, "weight", {}) == {}


def test_the_names_of_the_metrics_can_be_listed():
    assert list(DecoupledAdamW.metric_functions) == [
        "l2_norm/moment",
        "l2_norm/param",
        "l2_norm/update",
        "l2_norm/grad",
    ]


def test_one_rank_reduces_to_what_it_had():
    metrics = {"l2_norm/grad/weight": torch.tensor(3.0), "loss": torch.tensor(2.0)}
    squared = DecoupledAdamW.pre_reduce_metrics(metrics)
    assert squared == {"l2_norm/grad/weight": 9.0, "loss": 2.0}
    assert DecoupledAdamW.dist_reduce_metrics(squared) == {"l2_norm/grad/weight": 3.0, "loss": 2.0}


def test_a_process_group_of_one_rank_reduces_to_what_it_had(process_group):
    metrics = {"l2_norm/grad/weight": torch.tensor(9.0), "loss": torch.tensor(2.0)}
    assert DecoupledAdamW.dist_reduce_metrics(metrics) == {"l2_norm/grad/weight": 3.0, "loss": 2.0}
    assert DecoupledAdamW.dist_reduce_metrics({}) == {}


RANK = """
import json, sys
import torch
import torch.distributed as tdist
from composer_optim import DecoupledAdamW

torch.set_num_threads(1)
rank, path = int(sys.argv[1]), sys.argv[2]
tdist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
metrics = [
    {"l2_norm/grad/a": torch.tensor(3.0), "mean/a": torch.tensor(2.0), "mean/only_0": torch.tensor(5.0)},
    {"l2_norm/grad/a": torch.tensor(4.0), "mean/a": torch.tensor(4.0), "l2_norm/grad/only_1": torch.tensor(7.0)},
][rank]
reduced = DecoupledAdamW.dist_reduce_metrics(DecoupledAdamW.pre_reduce_metrics(metrics))
reduced_from_nothing = DecoupledAdamW.dist_reduce_metrics({} if rank else {"l2_norm/b": torch.tensor(4.0)})
results = [{name: value.item() for name, value in each.items()} for each in (reduced, reduced_from_nothing)]
json.dump(results, sys.stdout)
tdist.destroy_process_group()
"""


def test_two_ranks_add_their_shards_and_average_the_rest(tmp_path):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "ranks")], stdout=subprocess.PIPE) for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    whole = {"l2_norm/grad/a": 5.0, "l2_norm/grad/only_1": 7.0, "mean/a": 3.0, "mean/only_0": 5.0}
    for output in outputs:
        assert json.loads(output) == [whole, {"l2_norm/b": 2.0}]


@pytest.mark.parametrize("make", [DecoupledAdamW, DecoupledSGDW])
@pytest.mark.parametrize("foreach", [False, True])
def test_sharded_parameters_are_trained_as_their_parts(process_group, make, foreach):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    whole = torch.arange(6.0).reshape(3, 2)
    sharded = torch.nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)]))
    twin = torch.nn.Parameter(whole.clone())
    for param in (sharded, twin):
        optimizer = make([param], lr=0.1, weight_decay=5e-4, foreach=foreach)
        (param * param).sum().backward()
        optimizer.step()
        if make is DecoupledAdamW:
            norms = optimizer.report_per_parameter_metrics(param, "weight", {})
            assert not any(isinstance(norm, DTensor) for norm in norms.values())
    assert_close(sharded.full_tensor(), twin, rtol=0, atol=0)
