"""On its platform, the logger sends metadata; the platform's client is closed, so a module stands in for it."""

import json
import sys
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.loggers import MosaicMLLogger
from composer.loggers.mosaicml_logger import exception_to_json_serializable_dict, format_data_to_json_serializable
from composer.models import ComposerClassifier


@pytest.fixture
def sent(monkeypatch):
    """Set what the platform sets, and return the messages that it gets."""
    messages = []

    def update_run_metadata(run, data, *, future, protect):
        json.dumps(data)
        messages.append((run, data))

    client = ModuleType("mcli")
    client.update_run_metadata = update_run_metadata
    monkeypatch.setitem(sys.modules, "mcli", client)
    monkeypatch.setenv("MOSAICML_PLATFORM", "true")
    monkeypatch.setenv("MOSAICML_ACCESS_TOKEN_FILE", "/token")
    monkeypatch.setenv("RUN_NAME", "my-run")
    return messages


def train(max_duration, **settings):
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    data = TensorDataset(torch.zeros(6, 2), torch.zeros(6, dtype=torch.long))
    with Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(data, batch_size=2),
        max_duration=max_duration,
        device="cpu",
        progress_bar=False,
        **settings,
    ) as trainer:
        trainer.fit()
        return trainer


@pytest.mark.parametrize(
    ("max_duration", "progress"),
    [
        ("2ep", {"training_progress": "[epoch=2/2]", "training_sub_progress": "[batch=0/3]"}),
        ("4ba", {"training_progress": "[batch=4/4]"}),
        ("8sp", {"training_progress": "[epoch=1]", "training_sub_progress": "[batch=1/3]"}),
    ],
)
def test_the_trainer_logs_there_by_itself(sent, max_duration, progress):
    """Nothing was logged, and making the logger was a RuntimeError."""
    trainer = train(max_duration)
    assert len([each for each in trainer.state.callbacks if isinstance(each, MosaicMLLogger)]) == 1
    assert {run for run, _ in sent} == {"my-run"}
    last = {name: value for _, data in sent for name, value in data.items()}
    assert {name: last[f"mosaicml/{name}"] for name in progress} == progress
    assert isinstance(last["mosaicml/loss/train/total"], float)
    assert {"mosaicml/train_started_time", "mosaicml/train_finished_time"} <= last.keys()


def test_a_logger_of_the_users_own_is_the_only_one_and_leaves_names_out(sent):
    logger = MosaicMLLogger(log_interval=0, ignore_keys=["loss/*", "metrics/*"])
    trainer = train("1ep", loggers=logger)
    assert [each for each in trainer.state.callbacks if isinstance(each, MosaicMLLogger)] == [logger]
    names = {name for _, data in sent for name in data}
    assert "mosaicml/time/batch" in names
    assert not any("loss" in name or "metrics" in name for name in names)
    assert len(sent) > 3, "after each batch, too"


@pytest.mark.parametrize("ignores", [True, False])
def test_an_error_of_the_platform_ends_the_run_only_if_asked_for(sent, monkeypatch, ignores):
    def fail(*args, **settings):
        raise ConnectionError("no platform")

    monkeypatch.setattr(sys.modules["mcli"], "update_run_metadata", fail)
    logger = MosaicMLLogger(ignore_exceptions=ignores)
    if ignores:
        train("1ba", loggers=logger)
    else:
        with pytest.raises(ConnectionError, match="no platform"):
            train("1ba", loggers=logger)


def test_the_error_that_ends_a_run_is_sent(sent):
    model = torch.nn.Linear(2, 2)
    trainer = Trainer(
        model=ComposerClassifier(model, num_classes=2),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=[(torch.full((2, 2), float("nan")), torch.zeros(2, dtype=torch.long))],
        max_duration="1ep",
        device="cpu",
        device_train_microbatch_size=2,
        progress_bar=False,
    )
    with pytest.raises(RuntimeError, match="gradient is not finite"):
        trainer.fit()
    trainer.close()
    last = {name: value for _, data in sent for name, value in data.items()}
    assert last["mosaicml/exception"]["class"] == "DivergenceError"


def test_everything_is_made_into_what_json_can_write():
    given = {"a": torch.tensor(1.5), "b": (1, None), "c": object, "d": torch.ones(2)}
    assert format_data_to_json_serializable(given) == {"a": 1.5, "b": [1, None], "c": str(object), "d": [1.0, 1.0]}
    error = FileNotFoundError(2, "No such file", "weights.pt")
    made = exception_to_json_serializable_dict(error)
    assert (made["class"], made["attributes"]["filename"]) == ("FileNotFoundError", "weights.pt")
    json.dumps(made)
