"""Mistakes are named, with the value and what is accepted, before or at the first step."""

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.core import Callback, Evaluator
from composer.loggers import LoggerDestination
from composer.optim import LinearScheduler


def test_a_model_that_is_no_composer_model():
    with pytest.raises(ValueError, match=r"Provided model must be a subclass of ComposerModel.*Linear.*from_module"):
        Trainer(model=nn.Linear(2, 2))


@pytest.mark.parametrize("duration", ["ten epochs", "1epoch", "", "5"])
def test_a_misspelt_duration(make_trainer, duration):
    with pytest.raises(ValueError, match=r"ep") as error:
        make_trainer(max_duration=duration)
    assert repr(duration) in str(error.value)


def test_an_unknown_event_name(make_trainer):
    with pytest.raises(ValueError, match=r"befor_forward.*before_forward"):
        make_trainer().engine.run_event("befor_forward")


def test_a_dataloader_that_yields_nothing(make_trainer):
    class Nothing:
        batch_size = 4

        def __iter__(self):
            return iter(())

    trainer = make_trainer(train_dataloader=Nothing(), max_duration="3ba")
    with pytest.raises(ValueError, match=r"No batches were trained.*Nothing.*at least one batch"):
        trainer.fit()


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
    with pytest.raises(ValueError, match=r"max_duration cannot be specified in epochs.*'2ep'"):
        trainer.fit()


def test_wall_clock_duration(make_trainer):
    with pytest.raises(ValueError, match=r"Wall clock time not an allowed time unit\..*'10ep'"):
        make_trainer(max_duration="1h")


def test_several_optimizers(make_trainer, make_model):
    model = make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
    with pytest.raises(NotImplementedError, match="Only one optimizer is supported; found 2 optimizers"):
        make_trainer(model=model, optimizers=optimizers)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5])
def test_a_seed_out_of_range(make_trainer, seed):
    with pytest.raises(ValueError, match=f"Invalid seed: seed={seed}"):
        make_trainer(seed=seed)


@pytest.mark.parametrize("precision", ["amp_fp16", "amp_fp8"])
def test_a_precision_the_cpu_does_not_have(make_trainer, precision):
    with pytest.raises(ValueError, match=r"not supported for CPU training"):
        make_trainer(precision=precision)


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
        ({"eval_interval": -5}, "eval_interval=-5 must be"),
        ({"eval_interval": None}, "eval_interval=None must be"),
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
        ({"schedulers": "cosine"}, "schedulers holds 'cosine', which is no scheduler"),
        ({"schedulers": LinearScheduler}, r"LinearScheduler.*Call it: LinearScheduler\(\.\.\.\)"),
        ({"algorithms": "ema"}, "algorithms holds 'ema', which is no Algorithm"),
        ({"train_dataloader": 5, "device_train_microbatch_size": 1}, "train_dataloader=5 is no iterable"),
    ],
)
def test_things_of_another_kind(make_trainer, settings, said):
    with pytest.raises(TypeError, match=said):
        make_trainer(**settings)


def test_callbacks_of_a_trainer_that_could_not_be_made_are_free_again(make_trainer):
    callback = Callback()
    with pytest.raises(ValueError, match="reduced the max_duration to 0"):
        make_trainer(callbacks=callback, max_duration="1ba", schedulers=lambda state: 1.0, scale_schedule_ratio=0.1)
    make_trainer(callbacks=callback, max_duration="1ba").fit()


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
