import copy
import io
import logging

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from composer_events import State


class Model(torch.nn.Module):
    """Has a child called `module`, a buffer, a frozen part and tied weights, as real models do."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 8, bias=False)
        self.tied = torch.nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = torch.nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.tied(self.head(self.module(x))))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


def make_state(optimizer="adam", model=None, **settings):
    model = model or Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = State(model, rank_zero_seed=0, run_name="run", max_duration="4ba", **settings)
    state.optimizers = OPTIMIZERS[optimizer](trained)
    state.schedulers = torch.optim.lr_scheduler.StepLR(state.optimizers[0], step_size=1, gamma=0.5)
    return state


def train(state, num_batches=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        inputs = torch.randn(6, 4, generator=generator)

        def closure(inputs=inputs):
            state.optimizers.zero_grad()
            state.loss = state.model(inputs).square().mean()
            state.loss.backward()
            return state.loss

        state.optimizers.step(closure)
        state.schedulers.step()
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=6)


def weights(state):
    return {name: value.clone() for name, value in state.get_model_state_dict().items()}


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s")), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(optimizer):
    straight = make_state(optimizer)
    train(straight, 2)
    saved = through_a_file(straight.state_dict())
    train(straight, 2, seed=1)

    resumed = make_state(optimizer)
    resumed.load_state_dict(saved)
    assert resumed.timestamp.batch == 2
    train(resumed, 2, seed=1)
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saving_before_the_first_step_changes_nothing(optimizer):
    saving, not_saving = make_state(optimizer), make_state(optimizer)
    not_saving.model.load_state_dict(saving.model.state_dict())
    before = copy.deepcopy(saving.optimizers[0].state_dict())
    saved = through_a_file(saving.state_dict())
    train(saving)
    train(not_saving)
    torch.testing.assert_close(weights(saving), weights(not_saving), rtol=0, atol=0)

    restored = make_state(optimizer)
    restored.load_state_dict(saved)
    torch.testing.assert_close(restored.optimizers[0].state_dict()["state"], before["state"], rtol=0, atol=0)


def test_the_layout_has_parameters_by_name_and_objects_by_class():
    state = make_state()
    train(state)
    saved = state.state_dict()
    assert set(saved) == {*state.serialized_attributes, "integrations", "metadata"} - {
        "scaler",
        "train_metrics",
        "eval_metrics",
    }
    assert set(saved["model"]) == set(state.model.state_dict())
    adam = saved["optimizers"]["Adam"]
    names = ["module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias", "head.weight"]
    assert adam["param_groups"][0]["params"] == names
    assert set(adam["state"]) == set(names)
    assert set(adam["state"]["head.weight"]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert saved["schedulers"]["StepLR"]["last_epoch"] == 2
    assert saved["timestamp"]["Timestamp"]["batch"] == 2
    assert saved["metadata"]["torch_version"] == str(torch.__version__)


@pytest.mark.parametrize("wrap", ["compile", "ddp", "both", "compiled part"])
def test_wrappers_leave_no_trace_in_the_names(wrap, process_group):
    plain = make_state()
    train(plain)
    wrapped = make_state()
    model = wrapped.model
    if wrap == "compiled part":
        model.module = torch.compile(model.module, backend="eager")
    if wrap in ("ddp", "both"):
        model = DistributedDataParallel(model)
    if wrap in ("compile", "both"):
        model = torch.compile(model, backend="eager")
    wrapped.model = model
    assert wrapped.is_model_ddp == (wrap == "ddp")

    saved = plain.state_dict()
    wrapped.load_state_dict(saved, strict=True)
    again = wrapped.state_dict()
    assert list(again["model"]) == list(saved["model"])
    torch.testing.assert_close(dict(again["model"]), dict(saved["model"]), rtol=0, atol=0)
    ours, theirs = again["optimizers"]["Adam"], saved["optimizers"]["Adam"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    assert ours["param_groups"] == theirs["param_groups"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_sharded_model_has_the_same_layout(kind, process_group):
    class FSDP2Config:
        state_dict_type = kind

    class ParallelismConfig:
        fsdp, fsdp2, tp = None, FSDP2Config(), None

    def make_sharded():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh)
        return make_state(model=model, parallelism_config=ParallelismConfig())

    state = make_sharded()
    assert state.fsdp_enabled
    assert state.fsdp_state_dict_type == kind
    fresh = state.state_dict()
    assert fresh["optimizers"]["Adam"]["state"] == {}
    train(state)
    saved = copy.deepcopy(state.state_dict())
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(saved["model"]) == set(saved["optimizers"]["Adam"]["state"]) == names
    assert all(
        isinstance(value, torch.distributed.tensor.DTensor) == (kind == "sharded") for value in saved["model"].values()
    )
    train(state, seed=1)

    resumed = make_sharded()
    resumed.load_state_dict(saved, strict=True)
    train(resumed, seed=1)
    again, expected = resumed.state_dict(), state.state_dict()
    torch.testing.assert_close(dict(again["model"]), dict(expected["model"]), rtol=0, atol=0)
    torch.testing.assert_close(
        again["optimizers"]["Adam"]["state"], expected["optimizers"]["Adam"]["state"], rtol=0, atol=0
    )


def test_weights_of_a_checkpoint_that_says_it_was_ddp_lose_their_prefix():
    state = make_state()
    prefixed = {f"module.{name}": value + 1 for name, value in state.model.state_dict().items()}
    expected = {name.removeprefix("module."): value.clone() for name, value in prefixed.items()}
    state.load_state_dict({"model": prefixed, "_is_model_ddp_wrapped": True}, strict=True)
    torch.testing.assert_close(weights(state), expected)


@pytest.mark.parametrize("change", ["missing", "too many", "shape"])
def test_weights_that_do_not_fit_are_refused_when_strict(change):
    state = make_state()
    saved = dict(state.model.state_dict())
    if change == "missing":
        del saved["head.weight"]
    elif change == "too many":
        saved["extra"] = torch.zeros(1)
    else:
        saved["head.weight"] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
        state.load_model_state({"model": saved}, None, strict=True)


def test_weights_that_are_missing_or_too_many_are_logged_when_not_strict(caplog):
    state = make_state()
    saved = {**state.model.state_dict(), "extra": torch.zeros(1)}
    del saved["head.weight"]
    state.load_model_state({"model": saved}, None, strict=False)
    logged = [record.getMessage() for record in caplog.records if record.name == "composer.core.state"]
    assert caplog.records[0].levelno == logging.WARNING
    assert ["head.weight" in logged[0], "extra" in logged[1]] == [True, True]
    assert "extra" in saved  # the caller's dict is left alone


@pytest.mark.parametrize("side", ["saved", "current"])
def test_a_parameter_that_only_one_side_optimizes_is_named(side):
    both = [make_state(), make_state()]
    for state in both:
        train(state)
    fewer = both[0 if side == "current" else 1]
    parameters = [p for name, p in fewer.model.named_parameters() if p.requires_grad and name != "head.weight"]
    fewer.optimizers = torch.optim.Adam(parameters)
    fewer.schedulers = None
    with pytest.raises(KeyError, match=r"head\.weight"):
        both[1].load_optim_state(both[0].state_dict())


def test_such_a_parameter_is_passed_over_when_not_strict():
    saved, current = make_state(), make_state()
    for state in (saved, current):
        train(state)
    kept = copy.deepcopy(current.optimizers[0].state[current.model.head.weight])
    state_dict = saved.state_dict()
    adam = state_dict["optimizers"]["Adam"]
    del adam["state"]["head.weight"]
    adam["param_groups"][0]["params"].remove("head.weight")
    current.load_optim_state(state_dict, strict=False)
    torch.testing.assert_close(current.optimizers[0].state[current.model.head.weight], kept)
    ours, theirs = (s.optimizers[0].state[s.model.module[0].weight] for s in (current, saved))
    torch.testing.assert_close(ours, theirs)


def test_parameter_groups_are_matched_by_name_and_not_by_place():
    def with_groups(swap):
        state = make_state()
        groups = [
            {"params": list(state.model.module.parameters()), "lr": 0.01},
            {"params": [state.model.head.weight], "lr": 0.02},
        ]
        state.optimizers = torch.optim.Adam(groups[::-1] if swap else groups)
        state.schedulers = None
        return state

    saved, current = with_groups(swap=False), with_groups(swap=True)
    train(saved)
    current.load_optim_state(saved.state_dict())
    head, body = current.optimizers[0].param_groups
    assert (head["lr"], body["lr"]) == (0.02, 0.01)
    expected = saved.optimizers[0].state[saved.model.head.weight]
    torch.testing.assert_close(current.optimizers[0].state[current.model.head.weight], expected)


def test_parameters_by_number_as_old_checkpoints_have_them_are_read():
    saved, current = make_state(), make_state()
    train(saved)
    current.load_optim_state({"optimizers": {"Adam": saved.optimizers[0].state_dict()}})
    expected = saved.optimizers[0].state[saved.model.head.weight]
    torch.testing.assert_close(current.optimizers[0].state[current.model.head.weight], expected)


def test_tied_weights_are_known_by_either_of_their_names():
    saved, current = make_state(), make_state()
    train(saved)
    state_dict = saved.state_dict()
    adam = state_dict["optimizers"]["Adam"]
    adam["state"]["tied.weight"] = adam["state"].pop("head.weight")
    names = adam["param_groups"][0]["params"]
    names[names.index("head.weight")] = "tied.weight"
    current.load_optim_state(state_dict)
    expected = saved.optimizers[0].state[saved.model.head.weight]
    torch.testing.assert_close(current.optimizers[0].state[current.model.head.weight], expected)


def test_an_optimizer_that_the_checkpoint_lacks_is_named_and_left_as_it_is():
    saved, current = make_state("sgd"), make_state("adam")
    with pytest.warns(UserWarning, match=r"Adam is not in the state_dict\. Its state will not be restored\."):
        current.load_optim_state(saved.state_dict())


def test_two_optimizers_of_one_class_keep_their_own_state():
    def with_two():
        state = make_state()
        parts = (state.model.module.parameters(), [state.model.head.weight])
        state.optimizers = [torch.optim.Adam(part, lr=lr) for part, lr in zip(parts, (0.1, 0.2), strict=True)]
        state.schedulers = None
        return state

    saved, current = with_two(), with_two()
    saved.optimizers[1].param_groups[0]["lr"] = 0.7
    state_dict = saved.state_dict()
    assert list(state_dict["optimizers"]) == ["Adam", "Adam#1"]
    current.load_optim_state(state_dict)
    assert [optimizer.param_groups[0]["lr"] for optimizer in current.optimizers] == [0.1, 0.7]


def test_a_hugging_face_model_adds_its_metadata():
    class HuggingFaceModel(Model):
        checkpoint_integration = "huggingface"

        def get_metadata(self):
            return {"model": "gpt2"}

    assert make_state(model=HuggingFaceModel()).state_dict()["integrations"] == {"huggingface": {"model": "gpt2"}}
    assert make_state().state_dict()["integrations"] == {}


class Metric(torch.nn.Module):
    """As much of a torchmetrics metric as saving and loading ask for."""

    def __init__(self, total=0.0):
        super().__init__()
        self.register_buffer("total", torch.tensor(total), persistent=False)
        self._computed = None
        self._update_count = 0

    def persistent(self, mode):
        self._non_persistent_buffers_set = set() if mode else {"total"}


def test_metrics_are_saved_only_when_asked_for():
    state = make_state()
    state.train_metrics = {"Metric": Metric(3.0)}
    assert "train_metrics" not in state.state_dict()
    state.save_metrics = True
    saved = state.state_dict()
    assert saved["train_metrics"]["Metric"]["state_dict"] == {"total": torch.tensor(3.0)}
    assert saved["eval_metrics"] == {}


def make_metric_state():
    state = make_state(save_metrics=True)
    state.train_metrics = {"Metric": Metric()}
    state.eval_metrics = {"eval": {"Metric": Metric()}, "other": {"Metric": Metric()}}
    return state


def test_metrics_are_restored_by_name_and_label():
    saved, restored = make_metric_state(), make_metric_state()
    saved.train_metrics["Metric"].total += 2
    saved.train_metrics["Gone"] = Metric()
    saved.eval_metrics["eval"]["Metric"].total += 5
    saved.eval_metrics["eval"]["Metric"]._computed = torch.tensor(0.5)
    restored.load_state_dict(through_a_file(saved.state_dict()))
    assert restored.train_metrics["Metric"].total == 2
    assert list(restored.train_metrics) == ["Metric"]
    evaluated = restored.eval_metrics["eval"]["Metric"]
    assert (evaluated.total, evaluated._computed, evaluated._update_count) == (5, 0.5, 1)
    assert restored.eval_metrics["other"]["Metric"].total == 0


def test_whole_metrics_as_old_checkpoints_have_them_are_read():
    state = make_metric_state()
    state.load_state_dict({"train_metrics": {"Metric": Metric(4.0)}})
    assert state.train_metrics["Metric"].total == 4


def test_the_metrics_of_checkpoints_that_kept_all_of_them_together_are_read():
    state = make_metric_state()
    state.load_state_dict({"_current_metrics": {"train": {"Metric": Metric(4.0)}, "eval": {"Metric": Metric(5.0)}}})
    assert state.train_metrics["Metric"].total == 4
    assert state.eval_metrics["eval"]["Metric"].total == 5
    assert state.eval_metrics["other"]["Metric"].total == 0


def test_values_that_a_metric_lacks_or_does_not_know_are_named():
    state = make_metric_state()
    unknown = {"state_dict": {"sum": torch.tensor(1.0)}, "_computed": None}
    with pytest.warns(UserWarning, match=r"lacks values \['total'\]"), pytest.warns(UserWarning, match=r"\['sum'\]"):
        state.load_state_dict({"train_metrics": {"Metric": unknown}})


def test_arrays_in_metrics_as_old_checkpoints_have_them_become_tensors():
    numpy = pytest.importorskip("numpy")
    state = make_metric_state()
    arrays = {"state_dict": {"total": numpy.float32(6)}, "_computed": numpy.array(0.25)}
    state.load_state_dict({"train_metrics": {"Metric": arrays}})
    metric = state.train_metrics["Metric"]
    assert (metric.total, metric._computed) == (6, 0.25)
    assert isinstance(metric._computed, torch.Tensor)


def test_the_batch_size_of_the_training_loader_is_noted():
    loader = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=4)
    assert make_state(train_dataloader=loader).state_dict()["metadata"]["train_dataloader_batch_size"] == 4
