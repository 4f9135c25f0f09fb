"""The dicts that are saved of a model, an optimizer and a run."""

import json
import platform

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_checkpoint.modular import (
    get_metadata_state_dict,
    get_model_state_dict,
    get_optim_state_dict,
    get_resumption_state_dict,
)
from composer_dist.testing import run_ranks
from composer_events import Callback, State


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def stepped(model, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_the_weights_have_the_names_and_values_of_the_model():
    model = network()
    found = get_model_state_dict(model)
    assert list(found) == list(model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_names_are_without_what_torch_compile_puts_before_them():
    model = network()
    assert list(get_model_state_dict(torch.compile(model))) == list(model.state_dict())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("fp16", torch.float16), ("amp_bf16", torch.bfloat16), (torch.float64, torch.float64)],
)
def test_floating_point_values_get_the_precision_and_counts_stay_whole_numbers(precision, dtype):
    found = get_model_state_dict(network(), precision=precision)
    assert {name: value.dtype for name, value in found.items() if value.dtype != dtype} == {
        "1.num_batches_tracked": torch.int64
    }


def test_an_unknown_precision_is_refused_by_name():
    with pytest.raises(ValueError, match=r"precision='fp12' is not a floating point format.*fp32, fp16, bf16"):
        get_model_state_dict(network(), precision="fp12")
    with pytest.raises(ValueError, match=r"precision=torch.int8 is not a floating point format"):
        get_model_state_dict(network(), precision=torch.int8)


def test_patterns_choose_weights_or_leave_them_out():
    model = network()
    assert list(get_model_state_dict(model, include_keys="0.*")) == ["0.weight", "0.bias"]
    assert list(get_model_state_dict(model, include_keys=["0.b*", "2.b*"])) == ["0.bias", "2.bias"]
    assert list(get_model_state_dict(model, ignore_keys=["1.*", "*bias"])) == ["0.weight", "2.weight"]
    with pytest.raises(ValueError, match="Only one of include_keys or ignore_keys can be specified"):
        get_model_state_dict(model, include_keys="0.*", ignore_keys="1.*")


def test_tied_weights_stay_one_memory_also_when_they_are_converted():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    found = get_model_state_dict(model, precision="bf16")
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()


def test_an_optimizers_parameters_have_names_and_its_values_are_its_own():
    model = network()
    optimizer = stepped(model)
    found = get_optim_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    assert found["param_groups"][0]["params"] == names
    assert found["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(found["state"][name][key], value)


def test_an_optimizer_that_has_not_stepped_is_left_as_it_is():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    assert get_optim_state_dict(model, optimizer)["state"] == {}
    assert not optimizer.state


def test_an_optimizers_state_gets_the_precision_but_a_count_that_would_be_lost():
    model = network()
    optimizer = stepped(model)
    counts = [state["step"] for state in optimizer.state.values()]
    assert get_optim_state_dict(model, optimizer, precision="bf16")["state"]["0.bias"]["step"].dtype == torch.bfloat16
    for count in counts:
        count.fill_(257)  # bfloat16 has 256 and 258
    found = get_optim_state_dict(model, optimizer, precision="bf16")
    assert found["state"]["0.bias"]["step"] == 257
    assert found["state"]["0.bias"]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[model[0].bias]["exp_avg"].dtype == torch.float32


def test_patterns_are_not_for_optimizers():
    model = network()
    with pytest.raises(NotImplementedError, match=r"include_keys='0\.\*'.* are for weights"):
        get_optim_state_dict(model, stepped(model), include_keys="0.*")


def test_metadata_goes_into_json_and_names_the_innermost_model():
    found = get_metadata_state_dict(torch.compile(network()), sharded_state_dict=False, device="cpu")
    assert json.loads(json.dumps(found)) == found
    assert found["model_name"] == "Sequential"
    assert found["precision"] == "fp32"
    assert found["dist_backend"] == "gloo"
    assert found["sharded_state_dict"] is False
    assert found["python_version"] == platform.python_version()
    assert "device_train_microbatch_size" not in found
    assert {"composer_version", "composer_commit_hash", "cpu_model", "cpu_count", "num_nodes", "gpu_model"} < set(found)
    assert {"num_gpus_per_node", "num_gpus", "cuda_device_count", "torch_version"} < set(found)


def test_metadata_has_the_settings_that_are_given():
    found = get_metadata_state_dict(precision=torch.bfloat16, device_train_microbatch_size=4)
    assert found["precision"] == "bfloat16"
    assert found["device_train_microbatch_size"] == 4


class Counter(Callback):
    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Numbered(TensorDataset):
    def state_dict(self, num_samples, from_beginning):
        return {"num_samples": num_samples, "from_beginning": from_beginning}


def test_the_resumption_state_has_what_a_run_needs_besides_the_weights():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(
        model,
        7,
        "blue-fox",
        optimizers=optimizer,
        callbacks=[Counter(1), Counter(2)],
        train_dataloader=DataLoader(Numbered(torch.zeros(4, 3)), batch_size=2),
    )
    state.schedulers = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state.timestamp = state.timestamp.to_next_batch(2)
    found = get_resumption_state_dict(state)
    assert found["dataset_state"] == {"train": {"num_samples": 2, "from_beginning": True}}
    assert found["timestamp"] == state.timestamp.state_dict()
    assert found["callbacks"] == [("Counter", {"count": 1}), ("Counter", {"count": 2})]
    assert found["schedulers"] == {"StepLR": state.schedulers[0].state_dict()}
    assert (found["rank_zero_seed"], found["run_name"], len(found["rng"])) == (7, "blue-fox", 1)


def test_empty_parts_of_the_resumption_state_are_left_out():
    assert set(get_resumption_state_dict(State(network(), 7))) == {"timestamp", "rank_zero_seed", "run_name", "rng"}


def names_on_this_rank(sharded):
    model = network()
    optimizer = stepped(model)
    weights = get_model_state_dict(nn.parallel.DistributedDataParallel(model), sharded_state_dict=sharded)
    return list(weights), list(get_optim_state_dict(model, optimizer, sharded_state_dict=sharded))


def test_rank_zero_alone_gets_whole_state_and_each_rank_gets_sharded_state(tmp_path):
    names = list(network().state_dict()), ["state", "param_groups"]
    assert run_ranks(names_on_this_rank, False, store=tmp_path / "full") == [names, ([], [])]
    assert run_ranks(names_on_this_rank, True, store=tmp_path / "sharded") == [names, names]
