"""Loading a checkpoint into a training state."""

import datetime
import re
import warnings

import pytest
import torch
from safetensors.torch import save_file as save_safetensors

from composer_checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    LoadCheckpoint,
    NoCheckpointError,
    UnsafeCheckpointError,
    glob_filter,
    load_checkpoint,
    load_file,
    save_checkpoint,
    save_file,
)
from composer_dist.reproducibility import load_rng_state
from composer_events import Callback, Event


@pytest.fixture
def trained(loop):
    run = loop(max_duration="2ep")
    run.fit()
    return run


@pytest.fixture
def path(trained, tmp_path):
    return save_checkpoint(trained.state, str(tmp_path / "{run_name}-ba{batch}.pt"))


def weights(run):
    return [parameter.detach().clone() for parameter in run.layer.parameters()]


def moments(run):
    return [state["exp_avg"].clone() for state in run.state.optimizers[0].state.values()]


def test_saving_and_loading_is_the_identity(loop, trained, path):
    run = loop(max_duration="3ep")
    load_checkpoint(path, run.state, run.engine.logger)
    torch.testing.assert_close(weights(run), weights(trained), rtol=0, atol=0)
    torch.testing.assert_close(moments(run), moments(trained), rtol=0, atol=0)
    assert run.state.timestamp == trained.state.timestamp
    assert run.state.load_path == path


def test_what_is_loaded_can_be_trained_on_and_saved_to_the_same_file(loop, trained, path):
    run = loop(max_duration="3ep")
    load_checkpoint(path, run.state, run.engine.logger)
    run.state.timestamp = run.state.timestamp.copy(epoch=2, batch_in_epoch=0)
    save_checkpoint(run.state, path)
    run.fit()
    assert not torch.equal(weights(run)[0], weights(trained)[0])


def test_the_name_of_the_run_is_that_of_now(loop, path):
    run = loop()
    run.state.run_name = "pear"
    load_checkpoint(path, run.state, None)
    assert run.state.run_name == "pear"


def test_the_path_may_have_the_name_of_the_run_and_the_rank(loop, trained, tmp_path):
    save_checkpoint(trained.state, str(tmp_path / "plum-rank{rank}.pt"))
    run = loop()
    load_checkpoint(str(tmp_path / "{run_name}-rank{rank}.pt"), run.state, None)
    assert run.state.timestamp.batch == 4


def test_random_numbers_go_on_where_they_were(loop, trained, tmp_path):
    torch.manual_seed(7)
    path = save_checkpoint(trained.state, str(tmp_path / "now.pt"))
    expected = torch.rand(3)
    torch.manual_seed(8)
    load_rng_state(load_checkpoint(path, loop().state, None))
    assert torch.equal(torch.rand(3), expected)


def test_an_epoch_of_other_batches_is_not_gone_on_with(loop, tmp_path):
    def make(batch_size):
        return loop(train_dataloader=torch.utils.data.DataLoader(torch.ones(8, 2), batch_size))

    run = make(2)
    run.state.timestamp = run.state.timestamp.to_next_batch(samples=2)
    path = save_checkpoint(run.state, str(tmp_path / "ba1.pt"))
    same = make(2)
    load_checkpoint(path, same.state, None)
    assert (same.state.timestamp.epoch, same.state.timestamp.batch_in_epoch) == (0, 1)
    other = make(4)
    with pytest.warns(UserWarning, match="batches of 2 samples on 1 ranks, 2 in all, and now a batch has 4"):
        load_checkpoint(path, other.state, None)
    assert (other.state.timestamp.epoch, other.state.timestamp.batch_in_epoch) == (1, 0)
    assert other.state.timestamp.batch == 1


def test_weights_alone_leave_the_rest_as_it_is(loop, trained, path):
    run = loop()
    assert load_checkpoint(path, run.state, None, load_weights_only=True) is None
    torch.testing.assert_close(weights(run), weights(trained), rtol=0, atol=0)
    assert run.state.timestamp.batch == 0
    assert not run.state.optimizers[0].state


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_weights_of_no_training_run_are_loaded_too(loop, trained, tmp_path, name):
    save_file(trained.layer.state_dict(), tmp_path / name)
    run = loop()
    load_checkpoint(tmp_path / name, run.state, None, load_weights_only=True)
    torch.testing.assert_close(weights(run), weights(trained), rtol=0, atol=0)
    with pytest.raises(IncompatibleCheckpointError, match="load_weights_only=True"):
        load_checkpoint(tmp_path / name, run.state, None)


def test_unfitting_weights_are_an_error_only_where_asked_for(loop, trained, tmp_path, caplog):
    content = {"state": {"model": {"weight": trained.layer.weight.detach(), "scale": torch.ones(1)}}}
    save_file(content, tmp_path / "other.pt")
    run = loop()
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
        load_checkpoint(tmp_path / "other.pt", run.state, None, load_weights_only=True)
    load_checkpoint(tmp_path / "other.pt", run.state, None, load_weights_only=True, strict_model_weights=False)
    assert "bias" in caplog.text
    assert "scale" in caplog.text


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_changed(loop, path):
    run = loop(model=torch.nn.Sequential(torch.nn.Linear(2, 1)), optimizers=None)
    run.state.optimizers = torch.optim.SGD(run.state.model.parameters(), lr=0.1)
    with pytest.raises(IncompatibleCheckpointError, match="another model"):
        load_checkpoint(path, run.state, None)
    assert run.state.timestamp.batch == 0


def of_another_width():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


@pytest.mark.parametrize("load_weights_only", [True, False])
def test_weights_of_another_shape_are_refused_before_any_is_changed(loop, tmp_path, load_weights_only):
    saved = loop(model=of_another_width(), optimizers=None)
    save_checkpoint(saved.state, str(tmp_path / "x.pt"))
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    run = loop(model=model, optimizers=None)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(IncompatibleCheckpointError, match=r"Error\(s\) in loading state_dict.*3 of another") as refusal:
        load_checkpoint(tmp_path / "x.pt", run.state, None, load_weights_only=load_weights_only)
    assert isinstance(refusal.value, RuntimeError)
    assert "0.weight ((3, 2) in the checkpoint, (4, 2) in the model)" in str(refusal.value)
    assert all(map(torch.equal, before, model.parameters()))


def test_weights_of_another_shape_can_be_left_out(loop, tmp_path, caplog):
    saved = of_another_width()
    save_file({"state": {"model": saved.state_dict()}}, tmp_path / "x.pt")
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    run = loop(model=model, optimizers=None)
    load_checkpoint(tmp_path / "x.pt", run.state, None, load_weights_only=True, strict_model_weights=False)
    assert torch.equal(model[1].bias, saved[1].bias)  # which alone fits
    assert "3 weights" in caplog.text
    assert "left out" in caplog.text


def test_each_list_of_what_does_not_fit_names_ten_at_most(loop, tmp_path):
    theirs = {f"extra.{number}": torch.ones(1) for number in range(30)}
    save_file({"state": {"model": {"weight": torch.ones(1, 2, dtype=torch.int64), **theirs}}}, tmp_path / "x.pt")
    run = loop()
    with pytest.raises(RuntimeError, match=r"1 not in the checkpoint: bias; 30 not in the model") as refusal:
        load_checkpoint(tmp_path / "x.pt", run.state, None, load_weights_only=True)
    assert str(refusal.value).count("extra.") == 10
    assert "weight (torch.int64 in the checkpoint, torch.float32 in the model)" in str(refusal.value)


def test_weights_of_less_precision_are_converted(loop, tmp_path):
    halves = {"weight": torch.ones(1, 2).half(), "bias": torch.ones(1).half()}
    save_file({"state": {"model": halves}}, tmp_path / "x.pt")
    run = loop()
    load_checkpoint(tmp_path / "x.pt", run.state, None, load_weights_only=True)
    assert run.layer.weight.dtype is torch.float32
    assert torch.equal(run.layer.weight, torch.ones(1, 2))


class Counted(torch.nn.Linear):
    """Loads in a way of its own, as metrics do."""

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


def test_what_loads_in_its_own_way_leaves_the_rest_of_a_model_compared(loop, tmp_path):
    saved = torch.nn.Sequential(Counted(2, 3), torch.nn.Linear(3, 1))
    save_file({"state": {"model": saved.state_dict()}}, tmp_path / "x.pt")
    model = torch.nn.Sequential(Counted(2, 3), torch.nn.Linear(3, 2))
    run = loop(model=model, optimizers=None)
    before = model[0].weight.detach().clone()
    with pytest.raises(IncompatibleCheckpointError, match=r"2 of another shape or kind: 1\.weight"):
        load_checkpoint(tmp_path / "x.pt", run.state, None, load_weights_only=True)
    assert torch.equal(model[0].weight, before)


def test_a_model_that_renames_what_it_loads_is_not_compared_before(loop, trained, tmp_path):
    def rename(module, state_dict, *_):
        state_dict["weight"] = state_dict.pop("old.weight")

    saved = {"old.weight": trained.layer.weight.detach(), "bias": trained.layer.bias.detach()}
    save_file({"state": {"model": saved}}, tmp_path / "x.pt")
    run = loop()
    run.layer.register_load_state_dict_pre_hook(rename)
    load_checkpoint(tmp_path / "x.pt", run.state, None, load_weights_only=True)
    assert torch.equal(run.layer.weight, trained.layer.weight)


def test_a_checkpoint_of_weights_alone_that_is_loaded_in_full_is_warned_about(loop, trained, tmp_path):
    path = save_checkpoint(trained.state, str(tmp_path / "weights.pt"), weights_only=True)
    run = loop()
    with pytest.warns(UserWarning, match="is not in the state_dict") as warned:
        load_checkpoint(path, run.state, None)
    told = [str(warning.message) for warning in warned]
    for name in ("AdamW", "Timestamp"):
        assert f"{name} is not in the state_dict. Its state will not be restored." in told
    torch.testing.assert_close(weights(run), weights(trained), rtol=0, atol=0)


@pytest.fixture
def hugging_face(tmp_path):
    """Make the folder of a Hugging Face model, whose names have no `model.` before them."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_safetensors({"transformer.weight": torch.ones(1, 2)}, folder / "model.safetensors")
    return folder


def test_the_folder_of_a_hugging_face_model_is_named_with_the_command_that_converts_it(loop, hugging_face):
    with pytest.raises(IncompatibleCheckpointError, match=rf"Hugging Face.*composer-ckpt convert {hugging_face} x\.pt"):
        load_checkpoint(hugging_face, loop().state, None)


@pytest.mark.parametrize("load_weights_only", [False, True])
def test_the_weights_of_a_hugging_face_model_are_named_with_that_command(loop, hugging_face, load_weights_only):
    path = hugging_face / "model.safetensors"
    with pytest.raises(CheckpointError, match=rf"Hugging Face.*composer-ckpt convert {hugging_face} x\.pt"):
        load_checkpoint(path, loop().state, None, load_weights_only=load_weights_only)


def test_only_weights_of_a_hugging_face_model_are_taken_for_some(loop, tmp_path):
    save_safetensors({"another": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="of another model") as refusal:
        load_checkpoint(tmp_path / "x.safetensors", loop().state, None, load_weights_only=True)
    assert "Hugging Face" not in str(refusal.value)


def test_a_missing_file_is_named(loop, tmp_path):
    with pytest.raises(NoCheckpointError, match=r"Local path .*nothing\.pt does not exist"):
        load_checkpoint(tmp_path / "nothing.pt", loop().state, None)


def test_a_damaged_file_changes_nothing(loop, path):
    with open(path, "rb+") as file:
        content = file.read()
        weight = load_file(path)["state"]["model"]["weight"].numpy().tobytes()
        file.seek(content.index(weight))
        file.write(bytes([weight[0] ^ 1]))
    run = loop()
    before = weights(run)
    with pytest.raises(CorruptCheckpointError, match="state/model/weight"):
        load_checkpoint(path, run.state, None)
    torch.testing.assert_close(weights(run), before, rtol=0, atol=0)
    assert run.state.timestamp.batch == 0


def test_a_file_that_would_run_code_is_refused_unless_trusted(loop, trained, tmp_path, caplog):
    state = {"model": trained.layer.state_dict(), "note": frozenset([1]), "kind": torch.nn.Linear}
    torch.save({"state": state}, tmp_path / "evil.pt")
    run = loop()
    with pytest.raises(UnsafeCheckpointError, match="Linear"):
        load_checkpoint(tmp_path / "evil.pt", run.state, None)
    load_checkpoint(tmp_path / "evil.pt", run.state, None, trusted=True, load_weights_only=True)
    assert "trusted" in caplog.text


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*"], {}),
        (["b"], {"a": {"x": 1, "y": [1, {"z": 2}, 3]}}),
        (["a/*"], {"a": {}, "b": (1, 2)}),
        (["a/y/0", "a/y/2"], {"a": {"x": 1, "y": [{"z": 2}]}, "b": (1, 2)}),
        (["a/y/1/z"], {"a": {"x": 1, "y": [1, {}, 3]}, "b": (1, 2)}),
        (["*/z", "a/x"], {"a": {"y": [1, {}, 3]}, "b": (1, 2)}),
        (["b/0"], {"a": {"x": 1, "y": [1, {"z": 2}, 3]}, "b": (2,)}),
        (["a/y", "a/y/1"], {"a": {"x": 1}, "b": (1, 2)}),
    ],
)
def test_patterns_name_paths_of_keys_and_places(patterns, expected):
    content = {"a": {"x": 1, "y": [1, {"z": 2}, 3]}, "b": (1, 2)}
    with warnings.catch_warnings(action="error"):
        glob_filter(patterns)(content)
    assert content == expected


def test_a_pattern_that_matches_nothing_is_warned_about():
    with pytest.warns(UserWarning, match="were ignored by load_ignore_key state/c"):
        glob_filter(["state/c"])({"state": {"a": 1}})


def test_what_is_ignored_stays_as_it_is(loop, trained, path):
    run = loop()
    before = weights(run)
    assert load_checkpoint(path, run.state, None, ignore_keys=["state/model/*", "rng"]) is None
    torch.testing.assert_close(weights(run), before, rtol=0, atol=0)
    assert run.state.timestamp.batch == 4


def test_everything_can_be_ignored(loop, path):
    run = loop()
    load_checkpoint(path, run.state, None, ignore_keys=["*"])
    assert run.state.timestamp.batch == 0


def test_a_function_may_say_what_is_ignored(loop, path):
    run = loop()
    load_checkpoint(path, run.state, None, ignore_keys=lambda content: content["state"].pop("timestamp"))
    assert run.state.timestamp.batch == 0
    assert run.state.optimizers[0].state


def test_what_is_ignored_must_be_patterns_or_a_function(loop, path):
    with pytest.raises(TypeError, match="load_ignore_keys='state'"):
        load_checkpoint(path, loop().state, None, ignore_keys="state")


class Counter(Callback):
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_callbacks_of_one_class_get_their_own_states_back(loop, tmp_path):
    first, second = Counter(), Counter()
    first.count, second.count = 3, 5
    path = save_checkpoint(loop([first, second]).state, str(tmp_path / "two.pt"))
    run = loop([Counter(), Counter()])
    load_checkpoint(path, run.state, None)
    assert [callback.count for callback in run.state.callbacks] == [3, 5]


def test_a_callback_loads_one_more_checkpoint_at_its_event(loop, trained, path):
    run = loop([LoadCheckpoint(path, load_weights_only=True, event="after_load")])
    run.engine.run_event(Event.BEFORE_LOAD)
    assert not torch.equal(weights(run)[0], weights(trained)[0])
    run.engine.run_event(Event.AFTER_LOAD)
    torch.testing.assert_close(weights(run), weights(trained), rtol=0, atol=0)
    assert run.state.load_path is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_path", None),
        ("load_weights_only", "no"),
        ("strict_model_weights", "no"),
        ("ignore_keys", 5),
        ("event", 5),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_when_the_callback_is_made(name, value):
    with pytest.raises(TypeError, match=rf"{name}={re.escape(repr(value))} .*([Pp]ass|give|must be)"):
        LoadCheckpoint(**{"load_path": "ep1.pt", name: value})


def test_no_path_is_refused_when_the_callback_is_made():
    with pytest.raises(ValueError, match="load_path='' names no checkpoint"):
        LoadCheckpoint("")


def loader_of(num_samples, seed=0):
    dataset = torch.utils.data.TensorDataset(torch.ones(num_samples, 2))
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)
    return torch.utils.data.DataLoader([row for (row,) in dataset], batch_size=2, sampler=sampler)


def saved_after(loop, tmp_path, duration):
    run = loop(train_dataloader=loader_of(8), max_duration=duration)
    run.fit()
    return save_checkpoint(run.state, str(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"num_samples": 6}, r"num_samples=8 \(now 6\)"), ({"num_samples": 8, "seed": 5}, r"shuffle_seed=0 \(now 5\)")],
)
def test_the_middle_of_an_epoch_of_other_data_is_refused_before_anything_changes(loop, tmp_path, settings, told):
    path = saved_after(loop, tmp_path, "2ba")
    run = loop(train_dataloader=loader_of(**settings))
    before = run.layer.weight.detach().clone()
    with pytest.raises(IncompatibleCheckpointError, match=rf"inside epoch 0, after 2 batches .* with {told}"):
        load_checkpoint(path, run.state, None)
    assert torch.equal(run.layer.weight, before)
    assert run.state.timestamp.batch == 0


def test_an_epoch_of_other_data_can_be_begun_again_or_gone_on_with(loop, tmp_path):
    path = saved_after(loop, tmp_path, "2ba")
    again, on = loop(train_dataloader=loader_of(6)), loop(train_dataloader=loader_of(6))
    load_checkpoint(path, again.state, None, restart_epoch=True)
    assert (again.state.timestamp.batch, again.state.timestamp.batch_in_epoch) == (2, 0)
    load_checkpoint(path, on.state, None, ignore_keys=["state/metadata/train_data/*"])
    assert (on.state.timestamp.batch, on.state.timestamp.batch_in_epoch) == (2, 2)


def test_data_may_change_between_epochs_and_for_weights_alone(loop, tmp_path):
    run = loop(train_dataloader=loader_of(6))
    load_checkpoint(saved_after(loop, tmp_path, "2ba"), run.state, None, load_weights_only=True)
    load_checkpoint(saved_after(loop, tmp_path, "1ep"), run.state, None)
    assert run.state.timestamp.epoch == 1


@pytest.mark.parametrize("clock", [datetime.timedelta(seconds=5.25), 5.25])
def test_clocks_are_read_as_lengths_of_time_and_as_seconds(loop, tmp_path, clock):
    path = saved_after(loop, tmp_path, "1ep")
    content = torch.load(path, weights_only=True)  # as another program reads and writes it
    content["state"]["timestamp"]["Timestamp"]["total_wct"] = clock
    torch.save(content, path)
    run = loop()
    load_checkpoint(path, run.state, None)
    assert run.state.timestamp.total_wct == datetime.timedelta(seconds=5.25)
