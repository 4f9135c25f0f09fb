"""Loading each part of a run from files of its own."""

import os
import pickle
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from composer_checkpoint import save_file
from composer_checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NoCheckpointError,
    UnsafeCheckpointError,
)
from composer_checkpoint.modular import (
    CheckpointLoadOptions,
    CheckpointSaveOptions,
    load_checkpoint,
    load_model_checkpoint,
    load_optim_checkpoint,
    load_resumption_checkpoint,
    save_checkpoint_to_disk,
    save_model_to_disk,
    save_optim_to_disk,
    save_resumption_state_to_disk,
)
from composer_checkpoint.remote.publish import publish_checkpoint
from composer_checkpoint.stores import FsspecObjectStore
from composer_events import Callback, State


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model, optimizer, seed=0):
    model(torch.rand(5, 3, generator=torch.Generator().manual_seed(seed))).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(seed=0):
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, seed)
    return model, optimizer


def assert_same_state(found, expected):
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.fixture
def saved(tmp_path):
    model, optimizer = trained()
    save_model_to_disk(model, tmp_path / "whole")
    save_optim_to_disk(model, optimizer, tmp_path / "whole")
    save_model_to_disk(model, tmp_path / "sharded", sharded_checkpoint=True)
    save_optim_to_disk(model, optimizer, tmp_path / "sharded", sharded_checkpoint=True)
    return tmp_path, model, optimizer


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_a_new_model_and_optimizer_go_on_as_the_saved_ones(kind, saved):
    folder, model, optimizer = saved
    other = network(1)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    options = CheckpointLoadOptions(load_optimizer=True, sharded_checkpoint=None)
    load_checkpoint(folder / kind, options, other, other_optimizer)
    assert other_optimizer.param_groups[0]["lr"] == 0.01
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    step(model, optimizer, seed=1)
    step(other, other_optimizer, seed=1)
    assert_same_state(other, model)


def test_options_are_given_as_a_dict_too(saved):
    folder, model, _ = saved
    other = network(1)
    load_checkpoint(folder / "whole", {"load_model": True}, model=other)
    assert_same_state(other, model)


@pytest.mark.parametrize("path", ["whole/model/model.pt", "whole/model", "sharded/model"])
def test_the_path_of_a_model_is_a_file_or_a_folder(path, saved):
    folder, model, _ = saved
    other = network(1)
    load_model_checkpoint(other, folder / path, CheckpointLoadOptions(sharded_checkpoint=None))
    assert_same_state(other, model)


def test_parts_may_have_other_names(saved):
    folder, model, _ = saved
    os.rename(folder / "whole/model/model.pt", folder / "whole/best.pt")
    other = network(1)
    load_checkpoint(folder / "whole", model=other, model_child_path="best.pt")
    assert_same_state(other, model)


def test_the_model_of_a_whole_training_state_is_loaded(tmp_path):
    model, optimizer = trained()
    state = State(model, 0, optimizers=optimizer)
    save_file({"state": state.state_dict()}, tmp_path / "ep1-rank0.pt")
    other = network(1)
    other_optimizer = torch.optim.AdamW(other.parameters())
    load_model_checkpoint(other, tmp_path / "ep1-rank0.pt")
    load_optim_checkpoint(other, other_optimizer, tmp_path / "ep1-rank0.pt")
    assert_same_state(other, model)
    assert torch.equal(other_optimizer.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_nothing_to_load_into_is_told_before_any_file_is_looked_for():
    with pytest.raises(ValueError, match="Model or state must be provided if loading model checkpoint"):
        load_checkpoint("nowhere", CheckpointLoadOptions())
    with pytest.raises(ValueError, match="Optimizer or state must be provided"):
        load_checkpoint("nowhere", CheckpointLoadOptions(load_optimizer=True), model=network(0))
    with pytest.raises(ValueError, match="State must be provided if loading resumption state"):
        load_checkpoint("nowhere", CheckpointLoadOptions(load_resumption_state=True), model=network(0))
    optimizer = torch.optim.SGD(network(0).parameters())
    with pytest.raises(ValueError, match="the model owns the parameters' names"):
        load_checkpoint("nowhere", CheckpointLoadOptions(load_model=False, load_optimizer=True), optim=optimizer)


def test_only_one_kind_of_patterns_is_taken_and_it_turns_strictness_off():
    with pytest.raises(ValueError, match="Only one of include_keys or ignore_keys can be specified"):
        CheckpointLoadOptions(include_keys="a", ignore_keys="b")
    assert not CheckpointLoadOptions(include_keys="a").strict
    assert not CheckpointLoadOptions(ignore_keys="a").strict


@pytest.mark.parametrize("kind", ["whole", "sharded"])
@pytest.mark.parametrize("keys", [{"include_keys": "0.*"}, {"ignore_keys": ["1.*", "2.*"]}])
def test_patterns_choose_which_weights_are_loaded(kind, keys, saved):
    folder, model, _ = saved
    other, untouched = network(1), network(1)
    load_checkpoint(folder / kind, CheckpointLoadOptions(sharded_checkpoint=None, **keys), other)
    assert_same_state(other[0], model[0])
    assert_same_state(other[2], untouched[2])


@pytest.mark.parametrize(
    ("options", "path", "error", "told"),
    [
        ({"sharded_checkpoint": True}, "sharded/model", ValueError, "the model is not sharded"),
        ({"sharded_checkpoint": True}, "whole/model/model.pt", ValueError, "is a file, and sharded_checkpoint=True"),
        ({"sharded_checkpoint": True}, "nowhere", FileNotFoundError, "there is no checkpoint at"),
        (
            {"sharded_checkpoint": False},
            "sharded/model",
            ValueError,
            "is a sharded checkpoint, and sharded",
        ),
        ({"sharded_checkpoint": False}, "nowhere", NoCheckpointError, "neither this file nor a folder with"),
        ({"sharded_checkpoint": None}, "whole", NoCheckpointError, "neither this file nor a folder with"),
    ],
)
def test_a_checkpoint_of_the_other_kind_is_refused_where_one_is_asked_for(options, path, error, told, saved):
    folder, *_ = saved
    with pytest.raises(error, match=told):
        load_model_checkpoint(network(1), folder / path, CheckpointLoadOptions(**options))


def test_an_optimizer_is_not_sharded_without_its_model(saved):
    folder, *_ = saved
    model, optimizer = trained(1)
    with pytest.raises(ValueError, match="the model of the optimizer is not sharded"):
        load_optim_checkpoint(model, optimizer, folder / "sharded/optim", {"sharded_checkpoint": True})
    with pytest.raises(ValueError, match="an optimizer is not sharded by itself"):
        load_optim_checkpoint(model, optimizer, folder / "whole/optim", {"shard_as_needed_during_load": True})


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_the_weights_of_another_model_are_refused_and_change_nothing(kind, saved):
    folder, *_ = saved
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises((RuntimeError, CheckpointError), match=r"2\.weight"):
        load_checkpoint(folder / kind, CheckpointLoadOptions(sharded_checkpoint=None), other)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())
    load_checkpoint(folder / kind, CheckpointLoadOptions(sharded_checkpoint=None, strict=False), other)
    assert not torch.equal(other[0].weight, before["0.weight"])


def test_an_optimizer_of_other_parameters_is_refused_unless_one_says_so(saved):
    folder, model, optimizer = saved
    other = network(1)
    part = torch.optim.AdamW(other[0].parameters(), lr=1.0)
    with pytest.raises(IncompatibleCheckpointError, match=r"4 are not optimized here: 1\.bias, 1\.weight"):
        load_optim_checkpoint(other, part, folder / "whole/optim")
    load_optim_checkpoint(other, part, folder / "whole/optim", CheckpointLoadOptions(strict=False))
    assert torch.equal(part.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_parameters_find_their_settings_in_groups_that_are_cut_otherwise(tmp_path):
    model = network(0)
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    step(model, optimizer)
    save_optim_to_disk(model, optimizer, tmp_path)
    other = network(1)
    turned = torch.optim.SGD([{"params": other[2].parameters()}, {"params": other[0].parameters()}], lr=1.0)
    load_optim_checkpoint(other, turned, tmp_path / "optim")
    assert [group["lr"] for group in turned.param_groups] == [0.5, 0.25]
    name = "momentum_buffer"
    assert torch.equal(turned.state[other[2].bias][name], optimizer.state[model[2].bias][name])


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_values_pass_through_the_precision_and_the_model_keeps_its_dtype(kind, saved):
    folder, model, optimizer = saved
    other = network(1)
    other_optimizer = torch.optim.AdamW(other.parameters())
    options = CheckpointLoadOptions(load_optimizer=True, precision="bf16", sharded_checkpoint=None)
    load_checkpoint(folder / kind, options, other, other_optimizer)
    assert torch.equal(other[0].weight, model[0].weight.bfloat16().float())
    found, expected = other_optimizer.state[other[0].weight], optimizer.state[model[0].weight]
    assert torch.equal(found["exp_avg"], expected["exp_avg"].bfloat16().float())
    assert found["step"].dtype == torch.float32


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_in_bfloat16_goes_into_a_model_in_float32(sharded, tmp_path):
    model, optimizer = trained()
    for state in optimizer.state.values():
        state["step"].fill_(256)
    save_model_to_disk(model, tmp_path, sharded, precision="bf16")
    save_optim_to_disk(model, optimizer, tmp_path, sharded, precision="bf16")
    other = network(1)
    other_optimizer = torch.optim.AdamW(other.parameters())
    load_checkpoint(tmp_path, {"load_optimizer": True, "sharded_checkpoint": None}, other, other_optimizer)
    assert torch.equal(other[0].weight, model[0].weight.bfloat16().float())
    step(other, other_optimizer)
    assert other_optimizer.state[other[0].weight]["step"] == 257  # bfloat16 cannot count so far


def test_a_planner_of_the_users_reads_a_sharded_checkpoint(saved):
    folder, model, _ = saved
    other = network(1)
    options = CheckpointLoadOptions(sharded_checkpoint=None, load_planner=DefaultLoadPlanner())
    load_checkpoint(folder / "sharded", options, other)
    assert_same_state(other, model)


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_a_flipped_bit_is_found_and_nothing_is_changed(kind, saved):
    folder, model, _ = saved
    wanted = model[0].weight.detach().numpy().tobytes()
    (path,) = (path for path in (folder / kind / "model").iterdir() if wanted in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(wanted)] ^= 1
    path.write_bytes(data)
    other, untouched = network(1), network(1)
    with pytest.raises(CorruptCheckpointError, match=r"0\.weight"):
        load_checkpoint(folder / kind, CheckpointLoadOptions(sharded_checkpoint=None), other)
    assert_same_state(other, untouched)


def test_a_missing_optimizer_is_told_before_the_model_is_changed(saved):
    folder, *_ = saved
    os.unlink(folder / "whole/optim/optim.pt")
    other, untouched = network(1), network(1)
    with pytest.raises(FileNotFoundError, match=r"optim.pt"):
        load_checkpoint(folder / "whole", {"load_optimizer": True}, other, torch.optim.AdamW(other.parameters()))
    assert_same_state(other, untouched)


class Marker:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_that_runs_code_is_refused_by_name_and_opened_only_with_trust(tmp_path, caplog):
    marker = str(tmp_path / "marker")
    torch.save({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "evil": Marker(marker)}, tmp_path / "model.pt")
    (tmp_path / "resumption.pkl").write_bytes(pickle.dumps({"run_name": Marker(marker)}))
    model = nn.Linear(3, 2)
    for load in (
        lambda **more: load_model_checkpoint(model, tmp_path / "model.pt", {"strict": False}, **more),
        lambda **more: load_resumption_checkpoint(State(model, 0), tmp_path / "resumption.pkl", **more),
    ):
        with pytest.raises(pickle.UnpicklingError, match=r"open.*global not in allowlist") as caught:
            load()
        assert isinstance(caught.value, UnsafeCheckpointError)
    assert not os.path.exists(marker)
    with pytest.warns(ResourceWarning):  # the file that the pickle opened is closed by nobody
        load_model_checkpoint(model, tmp_path / "model.pt", {"strict": False}, trusted=True)
    assert os.path.exists(marker)
    assert "model.pt is loaded as trusted and may run any code" in caplog.text


class Counter(Callback):
    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def run(seed):
    model = network(seed)
    state = State(
        model, seed, f"run-{seed}", optimizers=torch.optim.SGD(model.parameters(), 0.1), callbacks=[Counter(seed)]
    )
    state.callbacks.append(Counter(10 * seed))
    state.schedulers = torch.optim.lr_scheduler.StepLR(state.optimizers[0], seed + 1)
    for _ in range(seed):
        state.timestamp = state.timestamp.to_next_batch(2)
    return state


def test_a_run_goes_on_where_it_was_saved(tmp_path):
    state = run(3)
    torch.manual_seed(5)
    folder = save_checkpoint_to_disk(tmp_path, state)
    drawn = torch.rand(3)
    other = run(1)
    load_checkpoint(folder, CheckpointLoadOptions(load_optimizer=True, load_resumption_state=True), state=other)
    assert torch.equal(torch.rand(3), drawn)
    assert other.timestamp == state.timestamp
    assert (other.rank_zero_seed, other.run_name) == (3, "run-3")
    assert [callback.count for callback in other.callbacks] == [3, 30]
    assert other.schedulers[0].step_size == 4
    assert_same_state(other.model, state.model)


def test_the_resumption_state_is_read_from_a_file_or_its_folder(tmp_path):
    save_resumption_state_to_disk(run(3), tmp_path)
    for path in (tmp_path, tmp_path / "resumption.pkl"):
        other = run(1)
        load_resumption_checkpoint(other, path)
        assert other.run_name == "run-3"
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        load_resumption_checkpoint(run(1), tmp_path / "other.pkl")


def test_the_plain_pickle_of_older_releases_is_read(tmp_path):
    plain = {
        "run_name": "old",
        "rank_zero_seed": 9,
        "timestamp": run(3).timestamp.state_dict(),
        "callbacks": [("Counter", {"count": 4}), ("Counter", {"count": 5})],
        "dataset_state": {"train": OrderedDict(seen=deque([1, 2]))},
    }
    (tmp_path / "resumption.pkl").write_bytes(pickle.dumps(plain))
    other = run(1)
    load_resumption_checkpoint(other, tmp_path)
    assert (other.run_name, other.rank_zero_seed, int(other.timestamp.batch)) == ("old", 9, 3)
    assert [callback.count for callback in other.callbacks] == [4, 5]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_is_loaded_from_a_store(sharded, tmp_path):
    state = run(3)
    folder = save_checkpoint_to_disk(tmp_path, state, CheckpointSaveOptions(sharded_checkpoint=sharded))
    store = FsspecObjectStore("memory://test-modular-load")
    publish_checkpoint(folder, store, f"run/{sharded}", overwrite=True)
    other = run(1)
    options = CheckpointLoadOptions(load_optimizer=True, load_resumption_state=True, sharded_checkpoint=None)
    load_checkpoint(f"memory://test-modular-load/run/{sharded}", options, state=other)
    assert_same_state(other.model, state.model)
    assert other.run_name == "run-3"
