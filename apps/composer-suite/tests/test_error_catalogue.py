"""Every mistake that the Trainer's documentation lists: its class, its text, and that nothing is written before it.

The texts are those that users' own test suites match.
"""

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.core import Callback, Evaluator
from composer.loggers import ProgressBarLogger
from composer.optim import LinearScheduler


class Endless:
    """A dataloader whose length can be asked for and is not known."""

    batch_size = 4

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        raise TypeError("no length")


class Unsized(Endless):
    __len__ = None


def adaptive(loader):
    with pytest.warns(UserWarning, match="device_eval_microbatch_size='auto' may run into CUDA errors"):
        return Evaluator(label="a", dataloader=loader, device_eval_microbatch_size="auto")


def plain(loader):
    return Evaluator(label="a", dataloader=loader)


# By name: what is given to the constructor, by a function of a dataloader, and what becomes of it.
CATALOGUE = {
    "no ComposerModel": (
        lambda loader: {"model": nn.Linear(2, 2), "optimizers": None},
        ValueError,
        "Provided model must be a subclass of ComposerModel",
    ),
    "seconds": (lambda loader: {"max_duration": "30sec"}, ValueError, "Wall clock time not an allowed time unit."),
    "hours": (lambda loader: {"max_duration": "1h30m"}, ValueError, "Wall clock time not an allowed time unit."),
    "a part of the training": (lambda loader: {"max_duration": "0.5dur"}, ValueError, "max_duration='0.5dur'"),
    "no duration left": (
        lambda loader: {"max_duration": "1ba", "schedulers": lambda state: 1.0, "scale_schedule_ratio": 0.1},
        ValueError,
        "Scale schedule has reduced the max_duration to 0",
    ),
    "a ratio without schedulers": (
        lambda loader: {"scale_schedule_ratio": 0.5},
        ValueError,
        "Specifying `scale_schedule_ratio` without `schedulers` has no effect",
    ),
    "steps without schedulers": (
        lambda loader: {"step_schedulers_every_batch": True},
        ValueError,
        "Specifying `step_schedulers_every_batch` without `schedulers` has no effect",
    ),
    "optimizers of another model": (
        lambda loader: {"optimizers": [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr) for lr in (1.0, 2.0)]},
        ValueError,
        "None of the parameters of SGD belongs to the model",
    ),
    "16 bits on a CPU": (lambda loader: {"precision": "amp_fp16"}, ValueError, "not supported for CPU training."),
    "adaptive training on a CPU": (
        lambda loader: {"device_train_microbatch_size": "auto"},
        ValueError,
        "Can only use adaptive device_train_microbatch_size on GPU",
    ),
    "adaptive evaluation on a CPU": (
        lambda loader: {"eval_dataloader": adaptive(loader)},
        ValueError,
        "device_eval_microbatch_size on GPU",
    ),
    "evaluators and others": (
        lambda loader: {"eval_dataloader": [plain(loader), loader]},
        ValueError,
        "Mixing Evaluator with other classes is not allowed, please wrapall other classes with the Evaluator class.",
    ),
    "an endless evaluation": (
        lambda loader: {"eval_dataloader": Endless(loader)},
        ValueError,
        "eval_subset_num_batches must be set when using an infinite sized",
    ),
    "an iterator that is being read": (
        lambda loader: {"train_dataloader": being_read(loader)},
        ValueError,
        "active iterator",
    ),
    "the console in samples": (
        lambda loader: {"console_log_interval": "3sp"},
        ValueError,
        "The `console_log_interval` argument must have units of EPOCH or BATCH.",
    ),
    "the console to nowhere": (lambda loader: {"console_stream": "stdlog"}, ValueError, "stream='stdlog' must be"),
    "autoresume without a name": (lambda loader: {"autoresume": True}, ValueError, "the `run_name` must be specified"),
    "autoresume without a folder": (
        lambda loader: {"autoresume": True, "run_name": "plum", "save_folder": None},
        ValueError,
        "The `save_folder` must be specified",
    ),
    "autoresume without a link": (
        lambda loader: {"autoresume": True, "run_name": "plum", "save_latest_filename": None},
        ValueError,
        "The `save_latest_filename` must be specified",
    ),
    "a seed too large": (lambda loader: {"seed": 2**32}, ValueError, "Invalid seed"),
    "a negative timeout": (lambda loader: {"dist_timeout": -1.0}, ValueError, "dist_timeout=-1.0 must be"),
    "a level of logging": (lambda loader: {"python_log_level": "loud"}, ValueError, "python_log_level='loud' must be"),
    "an unknown device": (lambda loader: {"device": "toaster"}, ValueError, "toaster"),
    "both ways to cut": (
        lambda loader: {"grad_accum": 2, "device_train_microbatch_size": 1},
        ValueError,
        "Cannot use both device_train_microbatch_size and grad_accum",
    ),
    "a callback's class": (lambda loader: {"callbacks": [Callback]}, TypeError, "Call it: Callback()"),
    "a logger's class": (lambda loader: {"loggers": ProgressBarLogger}, TypeError, "Call it: ProgressBarLogger()"),
    "an interval of saves": (lambda loader: {"save_interval": "5x"}, ValueError, "5x"),
    "an unknown argument": (lambda loader: {"save_forlder": "x"}, TypeError, "Did you mean 'save_folder'"),
    "settings of the compiler": (
        lambda loader: {"compile_config": {"modus": 1}},
        TypeError,
        "unexpected keyword argument 'modus'",
    ),
    "a way of synchronising": (lambda loader: {"ddp_sync_strategy": "sometimes"}, ValueError, "sometimes"),
    "what not to load": (lambda loader: {"load_ignore_keys": 5}, TypeError, "load_ignore_keys=5"),
}


def being_read(loader):
    loader = torch.utils.data.DataLoader(loader.dataset, batch_size=4, num_workers=1, persistent_workers=True)
    next(iter(loader))
    return loader


@pytest.mark.parametrize("mistake", CATALOGUE)
@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_a_mistake_is_named_before_anything_is_written(make_trainer, make_loader, recorder, tmp_path, mistake):
    make_settings, kind, text = CATALOGUE[mistake]
    (tmp_path / "ep0-ba1-rank0.pt").write_text("of another run")
    settings = {"save_folder": str(tmp_path), "loggers": recorder, "max_duration": "2ba"}
    with pytest.raises(kind) as error:
        make_trainer(**settings | make_settings(make_loader(8, 4)))
    assert text in str(error.value)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("ep0-ba1-rank0.pt", "of another run")]
    assert recorder.events() == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "max_duration is a required argument and must be specified when constructing the Trainer or when calling"),
        ({"duration": "10sec"}, "Wall clock time not an allowed time unit."),
        ({"duration": "1ep", "scale_schedule_ratio": 0.5}, "`scale_schedule_ratio` without `schedulers` has no effect"),
        ({"duration": "1ep", "step_schedulers_every_batch": True}, "`step_schedulers_every_batch` without"),
        ({"duration": "1ep", "precision": "amp_fp16"}, "not supported for CPU training."),
        ({"duration": "1ep", "device_train_microbatch_size": "auto"}, "adaptive device_train_microbatch_size on GPU"),
        (
            {"duration": "2ba", "schedulers": LinearScheduler(), "scale_schedule_ratio": 0.1},
            "Scale schedule has reduced the max_duration to 0",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_mistakes_in_fit(make_trainer, arguments, text):
    trainer = make_trainer()
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the text is compared below
        trainer.fit(**arguments)
    assert text in str(error.value)
    assert int(trainer.state.timestamp.batch) == 0


def test_fit_without_data(make_trainer):
    with pytest.raises(ValueError, match="train_dataloader is a required argument and must be specified when"):
        make_trainer(train_dataloader=None).fit(duration="1ep")


def test_a_schedule_over_epochs_of_unknown_length(make_trainer, make_loader):
    with pytest.raises(RuntimeError, match=r"cannot be converted to batches, because .*dataloader_len is None"):
        make_trainer(train_dataloader=Unsized(make_loader(8, 4))).fit(duration="1ep", schedulers=LinearScheduler())


def test_no_time_left(make_trainer):
    trainer = make_trainer(max_duration="1ba")
    trainer.fit()
    with pytest.raises(ValueError, match="Please provide the `duration` or specify `reset_time=True`"):
        trainer.fit()


def test_a_model_without_parameters_can_be_evaluated_and_not_trained(make_loader, make_model):
    model = make_model()
    model.module = nn.Identity()
    with pytest.warns(UserWarning, match="No optimizer was specified, and the model does not have parameters"):
        trainer = Trainer(model, train_dataloader=make_loader(8, 4), device="cpu", progress_bar=False)
    with trainer:
        with pytest.raises(ValueError, match="No optimizer was specified when constructing the Trainer"):
            trainer.fit(duration="1ba")
        trainer.eval(make_loader(4, 4))
        assert len(trainer.predict(make_loader(8, 4))) == 2


def test_a_later_checkpoint_of_another_run_is_no_mistake_before_fit(make_trainer, tmp_path):
    (tmp_path / "ep5-ba9-rank0.pt").write_text("of another run")
    trainer = make_trainer(max_duration="1ba", save_folder=str(tmp_path))
    with pytest.raises(FileExistsError, match="may conflict with a future checkpoint"):
        trainer.fit()
    assert (tmp_path / "ep5-ba9-rank0.pt").read_text() == "of another run"


@pytest.mark.parametrize("layers", [(), (nn.Linear(2, 2),)], ids=["no weight in common", "some in common"])
def test_weights_of_another_model(make_trainer, make_model, tmp_path, layers):
    path = make_trainer(max_duration="1ba").save_checkpoint(str(tmp_path / "other.pt"))
    model = make_model()
    model.module = nn.Sequential(*model.module, *layers) if layers else nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for ComposerClassifier"):
        make_trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            load_path=path,
            load_weights_only=True,
        )


def test_a_callback_that_another_trainer_still_has(make_trainer):
    callback = Callback()
    make_trainer(callbacks=callback)
    with pytest.raises(RuntimeError, match=r"Cannot create a new trainer with an open callback .*Call `trainer.close"):
        make_trainer(callbacks=callback)


def test_a_trainer_as_a_context_frees_its_callbacks_although_fit_failed(make_trainer):
    closed = []

    class Broken(Callback):
        def batch_end(self, state, logger):
            raise ZeroDivisionError

        def close(self, state, logger):
            closed.append("close")

        def post_close(self):
            closed.append("post_close")

    callback = Broken()
    with pytest.raises(ZeroDivisionError), make_trainer(callbacks=callback, max_duration="1ba") as trainer:
        trainer.fit()
    assert closed == ["close", "post_close"]
    make_trainer(callbacks=callback)


@pytest.mark.parametrize("use", ["fit", "eval", "predict"])
def test_any_use_after_close(make_trainer, make_loader, use):
    trainer = make_trainer(max_duration="1ba")
    trainer.close()
    with pytest.raises(RuntimeError, match="The engine was already closed"):
        getattr(trainer, use)(*([] if use == "fit" else [make_loader(4, 4)]))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optimizers": None}, "No optimizer was specified."),
        ({"eval_interval": "2ba"}, "has no effect. If trying to run an evaluator"),
        ({"loggers": ProgressBarLogger(), "progress_bar": True}, "loggers already holds a ProgressBarLogger"),
        ({"log_to_console": True, "progress_bar": True}, "progress_bar=True and log_to_console=True both write"),
    ],
    ids=["optimizer", "evaluator", "bar", "console"],
)
def test_warnings_of_the_constructor_point_at_the_users_line(make_trainer, settings, text):
    with pytest.warns(UserWarning, match=text) as seen:
        make_trainer(**settings)
    assert {warning.filename for warning in seen} <= {make_trainer.__code__.co_filename}


def test_an_evaluation_under_a_known_label(make_trainer, make_loader):
    trainer = make_trainer(eval_dataloader=make_loader(4, 4))
    with pytest.warns(UserWarning, match="eval_dataloader label 'eval'"):
        trainer.eval(make_loader(4, 4))


def test_the_model_may_come_first_without_a_name(make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(model, optimizers=optimizer, device="cpu", progress_bar=False) as trainer:
        assert trainer.state.model is model
    with pytest.raises(TypeError, match="positional"):
        Trainer(model, [1])
