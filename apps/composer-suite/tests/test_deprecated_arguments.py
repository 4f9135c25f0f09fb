"""Arguments under their older names work, and warn with the current name."""

import pytest
import torch

from composer.algorithms import GradientClipping


@pytest.mark.parametrize(
    ("older", "instead"),
    [
        ({"load_strict": True}, "load_strict_model_weights"),
        ({"load_chunk_size": 4096}, "Leave it out"),
        ({"save_artifact_name": "a", "save_folder": "x"}, "save_folder"),
        ({"save_latest_artifact_name": "a", "save_folder": "x"}, "save_folder"),
        ({"grad_clip_norm": -1}, r"GradientClipping\('norm', ...\)"),
        ({"compute_training_metrics": True}, "get_metrics"),
        ({"console_log_level": "epoch"}, "console_log_interval='1ep'"),
    ],
    ids=str,
)
def test_each_says_what_to_write_today(make_trainer, older, instead):
    (name, value) = next(iter(older.items()))
    with pytest.warns(DeprecationWarning, match=f"{name}={value!r} is an older spelling. .*{instead}") as seen:
        make_trainer(**older)
    assert len(seen) == 1
    assert seen[0].filename.endswith("conftest.py")  # the line that calls the Trainer


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"load_strict": True, "load_strict_model_weights": False},
            "load_strict=True and load_strict_model_weights=False are two names of one argument",
        ),
        (
            {"console_log_level": "epoch", "console_log_interval": "2ep"},
            "console_log_level='epoch' and console_log_interval='2ep' are two names",
        ),
        (
            {"grad_clip_norm": 1.0, "algorithms": GradientClipping("norm", 2.0)},
            "grad_clip_norm=1.0 and algorithms=.* both clip gradients",
        ),
    ],
    ids=["load_strict", "console_log_level", "grad_clip_norm"],
)
@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_an_argument_under_two_names_is_refused(make_trainer, arguments, said):
    with pytest.raises(ValueError, match=said):
        make_trainer(**arguments)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_durations", "'max_duration'"),
        ("traindataloader", "'train_dataloader'"),
        ("grad_clip", "'grad_clip_norm'"),
        ("optimizer", "'optimizers'"),
    ],
)
def test_a_misspelt_argument_names_its_neighbours(make_trainer, name, near):
    with pytest.raises(TypeError, match=f"got an unexpected keyword argument {name!r}. Did you mean .*{near}"):
        make_trainer(**{name: 1})


def test_an_argument_like_no_other(make_trainer):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'\. See the docstring"):
        make_trainer(zzz=1)


@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_grad_clip_norm_clips_as_the_algorithm_does(make_trainer):
    weights = []
    for settings in ({"grad_clip_norm": 0.01}, {"algorithms": GradientClipping("norm", 0.01)}, {"grad_clip_norm": 0}):
        trainer = make_trainer(max_duration="2ba", **settings)
        trainer.fit()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.state.model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_no_training_metrics_where_they_are_switched_off(make_trainer, recorder):
    trainer = make_trainer(max_duration="1ba", compute_training_metrics=False, loggers=recorder)
    assert trainer.state.train_metrics == {}
    trainer.fit()
    assert ("M", 0, ()) in recorder.seen  # the call is there, as where a model has no metrics


@pytest.mark.parametrize(("level", "lines"), [("epoch", 1), ("batch", 2)])
@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_the_level_of_the_console_is_an_interval(make_trainer, capsys, level, lines):
    make_trainer(max_duration="1ep", log_to_console=True, console_log_level=level).fit()
    assert capsys.readouterr().err.count("Train loss/train/total") == lines


@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_an_unknown_level_of_the_console(make_trainer):
    with pytest.raises(ValueError, match="console_log_level='step' must be 'epoch' or 'batch'"):
        make_trainer(console_log_level="step")


def test_the_console_is_on_by_default_of_old_where_there_is_no_bar(make_trainer):
    from composer.loggers import ConsoleLogger

    trainer = make_trainer(log_to_console=None)
    assert isinstance(trainer.logger.destinations[0], ConsoleLogger)


@pytest.mark.filterwarnings("ignore:.*is an older spelling:DeprecationWarning")
def test_older_names_are_hyperparameters_only_where_they_are_used(make_trainer):
    assert "save_artifact_name" not in make_trainer(auto_log_hparams=True).local_hparams
    used = make_trainer(auto_log_hparams=True, save_artifact_name="a", save_folder="x").local_hparams
    assert used["save_artifact_name"] == "a"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [({"max_epochs": 3}, "3ep"), ({"num_train_epochs": 2.0}, "3ep"), ({"max_steps": 500}, "500ba")],
)
def test_the_length_of_training_of_other_trainers_names_the_duration(make_trainer, arguments, meant):
    with pytest.raises(
        TypeError, match=rf"unexpected keyword argument '{next(iter(arguments))}'.*max_duration='{meant}'"
    ):
        make_trainer(**arguments)
