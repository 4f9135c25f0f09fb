"""Mistakes are named, with the value and what is accepted, before or at the first step."""

import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.algorithms import EMA, ChannelsLast, LayerFreezing
from composer.core import Callback, DataSpec, Evaluator, Event
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.optim import ConstantScheduler, LinearScheduler
from composer.trainer._arguments import choose_precision
from composer_dist.devices import Device, DeviceGPU


def test_a_model_that_is_no_composer_model():
    with pytest.raises(ValueError, match=r"Provided model must be a subclass of ComposerModel.*Linear.*from_module"):
        Trainer(model=nn.Linear(2, 2))


def test_a_model_of_transformers_or_peft_is_told_what_wraps_it():
    published = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})
    adapted = type("PeftModel", (nn.Module,), {"__module__": "peft.peft_model"})
    for model in (type("GPT2", (published,), {})(), type("GPT2", (published,), {}), adapted()):
        with pytest.raises(ValueError, match=r"must be a subclass of ComposerModel") as error:
            Trainer(model=model)
        assert "composer.models.HuggingFaceModel(model, tokenizer=...)" in str(error.value)
        assert "pip install 'composer-suite[hf]'" in str(error.value)


@pytest.mark.parametrize(
    "returned", [[MulticlassAccuracy(2)], None, MulticlassAccuracy(2)], ids=["list", "none", "one"]
)
@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
def test_metrics_without_names(make_trainer, make_model, make_loader, evaluates, returned):
    model = make_model()
    model.get_metrics = lambda is_train=False: returned if is_train is not evaluates else {}
    with pytest.raises(
        TypeError, match=rf"ComposerClassifier\.get_metrics\(is_train={not evaluates}\) returned .*"
    ) as error:
        make_trainer(model=model, eval_dataloader=make_loader(4, 4))
    assert repr(returned) in str(error.value)
    assert "{'MulticlassAccuracy': MulticlassAccuracy(...)}" in str(error.value)


def test_metrics_may_be_in_a_collection_or_a_module(make_trainer, make_model, make_loader):
    for returned in (
        MetricCollection([MulticlassAccuracy(2)]),
        nn.ModuleDict({"MulticlassAccuracy": MulticlassAccuracy(2)}),
    ):
        model = make_model()
        model.get_metrics = lambda is_train=False, returned=returned: returned
        trainer = make_trainer(model=model, eval_dataloader=make_loader(4, 4), max_duration="1ba")
        trainer.fit()
        assert [*trainer.state.train_metrics] == [*trainer.state.eval_metrics["eval"]] == ["MulticlassAccuracy"]


@pytest.mark.parametrize("duration", ["ten epochs", "1epoch", "", "5"])
def test_a_misspelt_duration(make_trainer, duration):
    with pytest.raises(ValueError, match=r"ep") as error:
        make_trainer(max_duration=duration)
    assert repr(duration) in str(error.value)


def test_an_unknown_event_name(make_trainer):
    with pytest.raises(ValueError, match=r"befor_forward.*before_forward"):
        make_trainer().engine.run_event("befor_forward")


class Nothing(list):
    batch_size = 4


def test_training_that_would_never_end_for_want_of_batches_is_refused(make_trainer):
    trainer = make_trainer(train_dataloader=Nothing(), max_duration="3ba")
    with pytest.raises(ValueError, match=r"No batches were trained for global rank 0: .*\[\].*at least one batch"):
        trainer.fit()


def test_epochs_without_batches_are_warned_about(make_trainer, make_loader):
    trainer = make_trainer(train_dataloader=Nothing(), max_duration="2ep", eval_dataloader=make_loader(4, 4))
    with pytest.warns(UserWarning, match=r"No batches were trained for global rank 0: .*at least one batch") as seen:
        trainer.fit()
    assert {warning.filename for warning in seen} == {__file__}
    assert (int(trainer.state.timestamp.epoch), int(trainer.state.timestamp.batch)) == (2, 0)


def test_data_that_can_be_read_only_once_do_not_pass_for_empty_epochs(make_trainer, make_loader):
    batches = iter(make_loader(8, 4))
    trainer = make_trainer(train_dataloader=batches, device_train_microbatch_size=4)
    with pytest.raises(ValueError, match=r"yielded no batch in epoch 1.*can be read only once"):
        trainer.fit(duration="2ep")


def test_fit_without_a_duration(make_trainer):
    with pytest.raises(ValueError, match=r"max_duration is a required argument.*'10ep'"):
        make_trainer().fit()


def test_fit_without_data(make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Trainer(model=model, optimizers=optimizer, max_duration="1ep", progress_bar=False, device="cpu") as trainer,
        pytest.raises(ValueError, match=r"train_dataloader is a required argument and must be specified when"),
    ):
        trainer.fit()


def test_fit_again_without_time_left(make_trainer):
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    with pytest.raises(ValueError, match=r"1ep.*Please provide the `duration` or specify `reset_time=True`"):
        trainer.fit()


def test_epochs_of_unknown_length(make_trainer, make_loader):
    class Stream:
        batch_size = 4

        def __iter__(self):
            return iter(make_loader(8, 4))

    trainer = make_trainer(train_dataloader=Stream(), max_duration="2ep")
    with pytest.raises(RuntimeError, match=r"'0.5dur' cannot be converted to batches.*does not say how many"):
        trainer.fit(schedulers=LinearScheduler(t_max="0.5dur"))
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.1
    trainer.fit(schedulers=ConstantScheduler())  # refused before, too: "max_duration cannot be specified in epochs"
    assert trainer.state.timestamp.batch == 4


def test_wall_clock_duration(make_trainer):
    with pytest.raises(ValueError, match=r"Wall clock time not an allowed time unit\..*'10ep'"):
        make_trainer(max_duration="1h")


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True])
def test_a_seed_out_of_range(make_trainer, seed):
    with pytest.raises(ValueError, match=f"Invalid seed: seed={seed}"):
        make_trainer(seed=seed)


@pytest.mark.parametrize("precision", ["amp_fp16", "amp_fp8"])
def test_a_precision_the_cpu_does_not_have(make_trainer, precision):
    with pytest.raises(ValueError, match=r"not supported for CPU training"):
        make_trainer(precision=precision)


class GPUWithoutCuda(DeviceGPU):
    """What chooses by the kind of device alone takes it for a GPU."""

    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("dtype", "precision", "chosen"),
    [
        (torch.float32, None, "amp_fp16"),
        (torch.float32, "amp_fp16", "amp_fp16"),
        (torch.bfloat16, None, "amp_bf16"),
        (torch.bfloat16, "amp_bf16", "amp_bf16"),
        (torch.bfloat16, "fp32", "fp32"),
        (torch.float16, "fp32", "fp32"),
    ],
)
@pytest.mark.parametrize("frozen", [None, torch.float16, torch.bfloat16])
def test_the_precision_of_a_gpu_fits_the_weights(make_model, dtype, precision, chosen, frozen):
    """A GradScaler failed in the first step, at gradients in bfloat16."""
    model = make_model().to(dtype)
    if frozen is not None:
        model.module[0].to(frozen).requires_grad_(False)
    assert choose_precision(precision, GPUWithoutCuda(), model, has_deepspeed=False).value == chosen


class CPUForFloat16(Device):
    name, dist_backend, torch_device = "gpu", "gloo", torch.device("cpu")

    def module_to_device(self, module):
        return module

    def tensor_to_device(self, tensor):
        return tensor


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.bfloat16, "precision='amp_bf16'"), (torch.float16, "model.float()")]
)
def test_weights_whose_gradients_no_scaler_takes_are_evaluated_and_not_trained(
    make_trainer, make_model, make_loader, dtype, advice
):
    settings = {"device": CPUForFloat16(), "precision": "amp_fp16"}
    with pytest.raises(ValueError, match=r"precision='amp_fp16' needs weights in float32") as refusal:
        make_trainer(model=make_model().to(dtype), **settings)
    assert advice in str(refusal.value)
    model = make_model().to(dtype)
    model.module.register_forward_pre_hook(lambda module, inputs: inputs[0].to(dtype))
    trainer = make_trainer(model=model, train_dataloader=None, eval_dataloader=make_loader(4, 2), **settings)
    trainer.eval()
    assert trainer.state.eval_metric_values
    with pytest.raises(ValueError, match=r"precision='amp_fp16' needs weights in float32"):
        trainer.fit(train_dataloader=make_loader(4, 2), duration="1ba")


def test_weights_that_the_optimizer_does_not_have_may_have_any_dtype(make_trainer, make_model):
    model = make_model()
    model.module[0].to(torch.float16).register_forward_pre_hook(lambda layer, inputs: inputs[0].half())
    model.module[0].register_forward_hook(lambda layer, inputs, output: output.float())
    optimizer = torch.optim.SGD(model.module[-1].parameters(), lr=0.1)
    make_trainer(model=model, optimizers=optimizer, device=CPUForFloat16(), precision="amp_fp16").fit(duration="1ba")


def test_an_unknown_device(make_trainer):
    with pytest.raises(ValueError, match="toaster"):
        make_trainer(device="toaster")


def test_a_mixture_of_evaluators_and_dataloaders(make_trainer, make_loader):
    mixture = [Evaluator(label="a", dataloader=make_loader(4, 4)), make_loader(4, 4)]
    with pytest.raises(ValueError, match=r"Mixing Evaluator with other classes is not allowed, please wrapall"):
        make_trainer(eval_dataloader=mixture)


def test_a_batch_size_that_is_nowhere_said(make_trainer, make_loader):
    with pytest.raises(ValueError, match=r"`device_train_microbatch_size` must be set.*batch_size"):
        make_trainer(train_dataloader=list(make_loader(8, 4)))


def test_a_batch_size_that_the_batch_sampler_alone_has(make_trainer, make_data):
    data = make_data(8)
    sampler = BatchSampler(SequentialSampler(data), batch_size=4, drop_last=False)
    trainer = make_trainer(train_dataloader=DataLoader(data, batch_sampler=sampler), max_duration="1ep")
    trainer.fit()
    assert (trainer.state.device_train_microbatch_size, int(trainer.state.timestamp.batch)) == (4, 2)


def test_a_batch_sampler_that_has_no_batch_size(make_trainer, make_data):
    loader = DataLoader(make_data(8), batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match=r"`batch_size`.*DataLoader has none, nor has its batch_sampler, a list"):
        make_trainer(train_dataloader=loader)
    make_trainer(train_dataloader=loader, device_train_microbatch_size=2, max_duration="1ep").fit()


def test_dataloaders_by_name(make_trainer, make_loader):
    with pytest.raises(TypeError, match=r"has the keys \['name'\].*Evaluator\(label=\.\.\., dataloader=\.\.\.\)"):
        make_trainer(eval_dataloader={"name": make_loader(4, 4)})


@pytest.mark.parametrize("size", [0, -2, "big", True])
def test_a_microbatch_size_that_is_none(make_trainer, size):
    with pytest.raises(ValueError, match="device_train_microbatch_size="):
        make_trainer(device_train_microbatch_size=size)


@pytest.mark.parametrize("name", ["scale_schedule_ratio", "step_schedulers_every_batch"])
def test_settings_of_schedulers_without_schedulers(make_trainer, name):
    with pytest.raises(ValueError, match=f"Specifying `{name}` without `schedulers` has no effect"):
        make_trainer(max_duration="1ep", **{name: 0.5 if name.startswith("scale") else True})


def test_a_class_in_place_of_a_callback(make_trainer):
    class Mine(Callback):
        pass

    with pytest.raises(TypeError, match=r"callbacks holds .*Mine.*Call it: Mine\(\)"):
        make_trainer(callbacks=[Mine])


@pytest.fixture
def trained(make_trainer):
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    return trainer


def facts(trainer):
    state = trainer.state
    names = ("dataloader", "dataloader_label", "train_dataloader", "device_train_microbatch_size", "precision")
    times = [str(time) for time in (state.dataloader_len, state.max_duration, state.timestamp.batch)]
    return [getattr(state, name) for name in names] + times + list(state.schedulers)


@pytest.mark.parametrize(
    "settings",
    [
        {"duration": "2"},
        {"duration": "1h", "reset_time": True},
        {"duration": "0ba", "reset_time": True},
        {"duration": "0.5dur"},
        {"duration": "2iter"},
        {"precision": "amp_fp8", "reset_time": True},
        {"train_dataloader": "another", "device_train_microbatch_size": 1},
        {"train_subset_num_batches": 1},
        {"train_subset_num_batches": 0, "duration": "1ep"},
        {"schedulers": LinearScheduler(), "scale_schedule_ratio": 0.01, "duration": "1ba"},
        {"schedulers": LinearScheduler(), "scale_schedule_ratio": 0.5, "duration": "1ba"},
    ],
    ids="-".join,
)
def test_a_fit_that_cannot_begin_changes_nothing(trained, make_loader, settings):
    if "train_dataloader" in settings:
        settings = {**settings, "train_dataloader": make_loader(12, 3)}
    before = facts(trained)
    with pytest.raises(ValueError):  # noqa: PT011 - which one is tested elsewhere
        trained.fit(**settings)
    assert facts(trained) == before


def test_a_schedule_that_leaves_no_time_to_train(trained):
    trained.fit(duration="2ep")
    trained.state.max_duration = "4ep"
    with pytest.raises(ValueError, match=r"2ep is not beyond the 3ep trained so far"):
        trained.fit(schedulers=LinearScheduler(), scale_schedule_ratio=0.5)


def test_a_duration_in_tokens_over_data_without_tokens(make_trainer):
    trainer = make_trainer(max_duration="3tok")
    with pytest.raises(ValueError, match=r"'3tok' counts tokens.*get_num_tokens_in_batch"):
        trainer.fit()


@pytest.mark.parametrize(
    ("count", "kind", "message"),
    [
        (0, ValueError, r"returned 0 .*'64sp' counts samples, and would never be reached"),
        (-8, ValueError, "returned -8 .*must return a number, 0 or more"),
        (math.nan, ValueError, "returned nan .*must return a number, 0 or more"),
        (None, TypeError, "returned None .*must return a number of samples"),
        ({"total": 8}, TypeError, r"returned \{'total': 8\} .*must return a number of samples"),
    ],
)
def test_a_count_of_samples_with_which_training_would_never_end(make_trainer, make_loader, count, kind, message):
    data = DataSpec(make_loader(8, 4), get_num_samples_in_batch=lambda batch: count)
    trainer = make_trainer(train_dataloader=data, max_duration="64sp")
    with pytest.raises(kind, match=f"get_num_samples_in_batch {message}"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0


def test_a_scheduler_over_an_optimizer_that_does_not_train(make_trainer, make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make_model().parameters(), lr=0.1), 1)
    with pytest.raises(ValueError, match="StepLR of another SGD than the one in `optimizers`"):
        make_trainer(model=model, optimizers=optimizer, schedulers=other)
    make_trainer(model=model, optimizers=optimizer, schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_an_optimizer_over_another_models_parameters(make_trainer, make_model):
    with pytest.raises(ValueError, match="None of the parameters of SGD belongs to the model"):
        make_trainer(model=make_model(), optimizers=torch.optim.SGD(make_model().parameters(), lr=0.1))


@pytest.mark.parametrize("loss", [{}, [], {"a": 1.0}, "loss", None], ids=repr)
def test_a_loss_that_is_none(make_trainer, make_model, loss):
    model = make_model()
    model.loss = lambda outputs, batch: loss
    with pytest.raises(TypeError, match=r"loss\(\) returned .*must return a tensor"):
        make_trainer(model=model, max_duration="1ba").fit()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train_subset_num_batches": 0}, "train_subset_num_batches=0 must be"),
        ({"train_subset_num_batches": 1.5}, r"train_subset_num_batches=1\.5 must be"),
        ({"eval_subset_num_batches": -5}, "eval_subset_num_batches=-5 must be"),
        ({"eval_interval": -5}, "eval_interval=-5 is less than 0"),
        ({"max_duration": 0}, "max_duration=0 must be greater than 0"),
        ({"max_duration": "-3ba"}, "max_duration='-3ba' must be greater than 0"),
        ({"device_train_microbatch_size": 1.5}, r"device_train_microbatch_size=1\.5 must be a whole number"),
        ({"device_train_microbatch_size": float("nan")}, "device_train_microbatch_size=nan must be"),
    ],
)
def test_numbers_out_of_range(make_trainer, make_loader, settings, said):
    with pytest.raises(ValueError, match=said):
        make_trainer(eval_dataloader=make_loader(4, 4), **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"schedulers": "cosine"}, "schedulers holds 'cosine', which is not a scheduler"),
        ({"schedulers": LinearScheduler}, r"LinearScheduler.*Call it: LinearScheduler\(\.\.\.\)"),
        ({"algorithms": "ema"}, r"algorithms holds 'ema', which is no Algorithm"),
        ({"callbacks": ["speed"]}, "callbacks holds 'speed', which is no Callback"),
        ({"train_dataloader": 5, "device_train_microbatch_size": 1}, "dataloader=5 is not an iterable"),
    ],
)
def test_things_of_another_kind(make_trainer, settings, said):
    with pytest.raises(TypeError, match=said):
        make_trainer(**settings)


@pytest.mark.parametrize("name", ["..", "a/../../b", "a\\..\\b"])
def test_a_run_name_that_leads_out_of_its_folders_is_refused_before_one_is_made(make_trainer, tmp_path, name):
    with pytest.raises(ValueError, match="Give a name without"):
        make_trainer(run_name=name, save_folder=str(tmp_path / "w" / "{run_name}"))
    assert not list(tmp_path.iterdir())


def test_a_run_name_may_be_a_number(make_trainer):
    make_trainer(run_name=12)


def test_callbacks_of_a_trainer_that_could_not_be_made_are_free_again(make_trainer):
    callback = Callback()
    with pytest.raises(ValueError, match="reduced the max_duration to 0"):
        make_trainer(callbacks=callback, max_duration="1ba", schedulers=lambda state: 1.0, scale_schedule_ratio=0.1)
    make_trainer(callbacks=callback, max_duration="1ba").fit()


def test_evaluations_at_no_interval(make_trainer, make_loader):
    with pytest.raises(TypeError, match="eval_interval=None is not a length"):
        make_trainer(eval_dataloader=make_loader(4, 4), eval_interval=None)


def test_settings_of_evaluations_without_an_eval_dataloader(make_trainer):
    with pytest.warns(UserWarning, match=r"eval_interval='3ba'.*has no effect. If trying to run an evaluator"):
        make_trainer(eval_interval="3ba")


def test_use_after_close(make_trainer):
    trainer = make_trainer(max_duration="1ep")
    trainer.close()
    with pytest.raises(RuntimeError, match="The engine was already closed"):
        trainer.fit()


def test_an_error_in_a_callback_names_callback_and_event(make_trainer):
    class Broken(Callback):
        def batch_end(self, state, logger):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as error:
        make_trainer(max_duration="1ep", callbacks=Broken()).fit()
    assert any("Broken" in note and "BATCH_END" in note for note in error.value.__notes__)


def test_a_dataloader_that_gives_every_rank_all_samples_is_refused(make_trainer, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="get_sampler"):
        make_trainer()


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"precision_config": 3}, TypeError, "precision_config=3 must be a dict"),
        ({"train_dataloader_label": 3}, TypeError, "train_dataloader_label=3 must be a text"),
        ({"load_exclude_algorithms": 5}, TypeError, "load_exclude_algorithms=5 must be a list of texts"),
        ({"load_exclude_algorithms": "EMA"}, TypeError, "load_exclude_algorithms='EMA' must be a list"),
        ({"save_folder": 3}, TypeError, "save_folder=3 must be a text or a path, or None"),
        ({"save_filename": None}, TypeError, "save_filename=None must be a text or a path"),
        ({"load_path": 3}, TypeError, "load_path=3 must be a text or a path"),
        ({"spin_dataloaders": "no"}, TypeError, "spin_dataloaders='no' must be True or False"),
        ({"dist_timeout": math.inf}, ValueError, "dist_timeout=inf must be a finite number"),
        ({"max_duration": True}, ValueError, "max_duration=True is not a length of training.*'10ep'"),
    ],
    ids=str,
)
def test_an_argument_of_a_wrong_kind_is_named(make_trainer, settings, error, said):
    with pytest.raises(error, match=said):
        make_trainer(**settings)


@pytest.mark.parametrize("number", [np.int64, np.int32], ids=["int64", "int32"])
def test_numbers_of_numpy_are_numbers(make_trainer, make_loader, number):
    trainer = make_trainer(
        seed=number(3),
        max_duration=number(1),
        train_subset_num_batches=number(1),
        eval_dataloader=make_loader(4, 4),
        eval_interval=number(1),
        device_train_microbatch_size=number(2),
        dist_timeout=np.float32(60),
    )
    trainer.fit()
    trainer.fit(duration=number(1), train_subset_num_batches=number(2))
    assert (trainer.state.rank_zero_seed, trainer.state.timestamp.batch) == (3, 3)


@pytest.mark.parametrize(
    ("settings", "missing"),
    [({"load_weights_only": True}, "load_path"), ({"save_artifact_name": "a"}, "save_folder")],
)
@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_an_argument_that_needs_another_one_says_so(make_trainer, settings, missing):
    ((name, value),) = settings.items()
    with pytest.warns(UserWarning, match=f"{name}={value!r} has no effect without {missing}"):
        make_trainer(**settings)


@pytest.mark.parametrize("holders", [("callbacks", "callbacks"), ("loggers", "callbacks"), ("algorithms",) * 2])
def test_the_same_object_twice_is_refused(make_trainer, holders):
    member = ChannelsLast() if "algorithms" in holders else InMemoryLogger()
    given = {}
    for holder in holders:
        given.setdefault(holder, []).append(member)
    with pytest.raises(ValueError, match=rf"The same {type(member).__name__} is .*{holders[0]}.*called twice"):
        make_trainer(**given)


def test_an_evaluator_whose_metrics_nobody_has_is_refused(make_trainer, make_loader):
    evaluator = Evaluator(label="exam", dataloader=make_loader(4, 4), metric_names=["Nope"])
    with pytest.raises(ValueError, match=r"'exam' has metric_names=\['Nope'\].*MulticlassAccuracy"):
        make_trainer(eval_dataloader=evaluator)


def test_no_evaluators_may_be_written_as_an_empty_list(make_trainer):
    trainer = make_trainer(eval_dataloader=[], max_duration="1ba")
    trainer.fit()
    assert trainer.state.evaluators == []
    with pytest.raises(ValueError, match="eval_dataloader must be provided"):
        trainer.eval(eval_dataloader=[])


def test_an_interval_given_to_fit_does_not_reach_the_evaluators_there_are(make_trainer, make_loader):
    trainer = make_trainer(max_duration="1ep", eval_dataloader=make_loader(4, 4))
    with pytest.warns(UserWarning, match=r"eval_interval=2 .* has no effect.*also one of an earlier call"):
        trainer.fit(eval_interval=2)


@pytest.mark.parametrize(
    ("settings", "category", "said"),
    [
        ({"precision": "bf16"}, DeprecationWarning, "precision='bf16' is an older spelling"),
        ({"grad_accum": 8}, UserWarning, "Cannot split batch of length 4 into grad_accum=8"),
        ({"device_train_microbatch_size": 100}, UserWarning, "Cannot split tensor of length 4"),
    ],
    ids=["precision", "count", "size"],
)
def test_a_warning_is_about_the_users_line(make_trainer, settings, category, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_duration="1ba", **settings).fit()
    (warning,) = [warning for warning in caught if re.search(said, str(warning.message))]
    assert warning.category is category
    assert Path(warning.filename).name in ("conftest.py", "test_invalid_input.py")  # which call the Trainer


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.BEFORE_TRAIN_BATCH, Event.EVAL_BATCH_START])
def test_a_batch_that_cannot_be_cut_names_who_may_have_set_it(make_trainer, make_loader, event):
    class Vandal(Callback):
        pass

    def vandalise(self, state, logger):
        state.batch = "foo"

    setattr(Vandal, event.value, vandalise)
    trainer = make_trainer(max_duration="1ep", callbacks=Vandal(), eval_dataloader=make_loader(4, 4))
    with pytest.raises(NotImplementedError, match="type 'str'") as refusal:
        trainer.fit()
    notes = " ".join(refusal.value.__notes__)
    assert "state.batch is a str" in notes
    assert f"callback Vandal on {event}" in notes


class WritesAtInit(LoggerDestination):
    """Opens its file as soon as the Trainer lets it, and so replaces what a run of before has written."""

    def __init__(self, path):
        self.path = path

    def init(self, state, logger):
        self.path.write_text("begun")


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (
            {"schedulers": LinearScheduler(), "scale_schedule_ratio": 0.1, "max_duration": "1ba"},
            ValueError,
            "Scale schedule has reduced the max_duration to 0.*'1ba'",
        ),
        ({"compile_config": {"backend": "toaster"}}, ValueError, "compile_config=.*'toaster'.*inductor"),
        ({"compile_config": {"mode": "toaster"}}, ValueError, "compile_config=.*'toaster'.*max-autotune"),
        ({"load_path": "nothing.pt"}, FileNotFoundError, "nothing.pt does not exist"),
    ],
    ids=["duration", "backend", "mode", "load_path"],
)
def test_no_file_is_replaced_before_all_arguments_are_checked(make_trainer, tmp_path, settings, error, said):
    log = tmp_path / "log.txt"
    log.write_text("of the run before")
    with pytest.raises(error, match=said):
        make_trainer(loggers=WritesAtInit(log), **settings)
    assert log.read_text() == "of the run before"


def test_a_checkpoint_never_replaces_a_folder(make_trainer, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("1")
    monkeypatch.chdir(tmp_path / "out")
    trainer = make_trainer(max_duration="1ba")
    for name in (str(tmp_path / "out"), ".", ""):
        with pytest.raises(FileExistsError, match="out is a folder, and a file is to be written"):
            trainer.save_checkpoint(name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


@pytest.mark.parametrize("method", [EMA, LayerFreezing])
def test_a_method_of_ones_own_that_extends_one_deepspeed_cannot_have_is_refused_too(make_trainer, method):
    """LayerFreezing ended with "'NoneType' object has no attribute 'cpu'", and EMA trained."""
    mine = type("Mine", (method,), {})()
    with pytest.raises(
        ValueError, match=r"Mine cannot be combined with deepspeed_config\['zero_optimization'\]\['stage'\]=3"
    ):
        make_trainer(algorithms=[mine], deepspeed_config={"zero_optimization": {"stage": 3}})
