"""What all callbacks have in common: they can be begun, closed and used again, and log what loggers can take."""

import json
import pickle
import re
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import callbacks
from composer.core import Engine, Event, State
from composer.loggers import InMemoryLogger, Logger, LoggerDestination
from composer.models import ComposerClassifier

# Models of Hugging Face, and what saves them, are tested where they live.
OWN = sorted(set(callbacks.__all__) - {"HuggingFaceCheckpointer"})
NEEDS = {"SystemMetricsMonitor": "psutil", "MLPerfCallback": "mlperf_logging"}
# What they say of a machine without an accelerator, or of being asked to log often.
QUIET = pytest.mark.filterwarnings("ignore:.*only works on CUDA devices", "ignore:cache_clear_cmd is not set")


class Classifier(ComposerClassifier):
    """One that can also go on with a prompt."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 2), train_metrics=MulticlassAccuracy(2), val_metrics=MulticlassAccuracy(2))
        self.tokenizer = Words()
        self.has_train_metrics = True

    def get_metrics(self, is_train=False):
        return {} if is_train and not self.has_train_metrics else super().get_metrics(is_train)

    def generate(self, input_ids, attention_mask, synced_gpus, max_new_tokens):
        return torch.cat([input_ids, input_ids.new_ones(len(input_ids), max_new_tokens)], dim=1)


class Words:
    padding_side, pad_token, eos_token, pad_token_id = "right", "_", "_", 0

    def __call__(self, prompts, return_tensors, padding):
        tokens = torch.tensor([[ord(text)] for text in prompts])
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def batch_decode(self, rows, skip_special_tokens):
        return [str(row) for row in rows]


class Checks(LoggerDestination):
    """Refuses values that are neither tensors nor such as JSON can hold."""

    def __init__(self):
        self.num_values = 0

    def log_metrics(self, metrics, step=None):
        for value in metrics.values():
            self.num_values += 1
            if not isinstance(value, torch.Tensor):
                json.dumps(value)


ARGUMENTS = {
    "Generate": {"prompts": ["a", "b", "c"], "interval": "1ba", "batch_size": 2, "max_new_tokens": 20},
    "ThresholdStopper": {"monitor": "MulticlassAccuracy", "dataloader_label": "train", "threshold": 0.99},
    "EarlyStopper": {"monitor": "MulticlassAccuracy", "dataloader_label": "train"},
    "ExportForInferenceCallback": {"save_format": "torchscript", "save_path": "model"},
    "MLPerfCallback": {"root_folder": "mlperf", "index": 0},
    "GradientNoiseScale": {"interval": 1},
    "SpeedMonitor": {"window_size": 1},
    "LoadCheckpoint": {"load_path": "fake-path"},
    "CheckpointSaver": {"folder": "checkpoints", "overwrite": True},
}


@pytest.fixture(params=OWN)
def make_callback(request, tmp_path, monkeypatch):
    """Make a callback of each class, as Composer's own suite does."""
    name = request.param
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if name == "LoadCheckpoint":
        monkeypatch.setattr("composer.callbacks.load_checkpoint.load_checkpoint", lambda *args, **settings: None)
    monkeypatch.chdir(tmp_path)
    return lambda: getattr(callbacks, name)(**ARGUMENTS.get(name, {}))


@QUIET
def test_a_callback_is_begun_closed_and_begun_by_another_run(make_callback, make_loader):
    callback = make_callback()
    state = State(
        Classifier(),
        rank_zero_seed=0,
        run_name="run",
        device="cpu",
        max_duration="1ep",
        train_dataloader=make_loader(8, 4),
        dataloader=make_loader(8, 4),
        optimizers=torch.optim.SGD([torch.zeros(1)], lr=0.1),
        callbacks=callback,
    )
    engine = Engine(state, Logger(state))
    for event in (Event.INIT, Event.FIT_START, Event.FIT_END, Event.FIT_START, Event.FIT_END):
        engine.run_event(event)
    engine.close()
    callback.close(state, engine.logger)
    callback.post_close()
    callback.post_close()
    Engine(state, Logger(state)).close()
    pickle.loads(pickle.dumps(callback.state_dict()))


@QUIET
@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_two_fits_follow_each_other_and_log_what_loggers_can_take(make_callback, make_trainer, microbatch_size):
    data = TensorDataset(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    checks, callback, model = Checks(), make_callback(), Classifier()
    model.has_train_metrics = not isinstance(callback, callbacks.FreeOutputs)  # which need the outputs
    if isinstance(callback, callbacks.GradientNoiseScale):
        microbatch_size = 1  # it compares microbatches
    trainer = make_trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=2),
        eval_dataloader=DataLoader(data, batch_size=2),
        max_duration="1ep",
        callbacks=callback,
        loggers=[checks, InMemoryLogger()],
        device_train_microbatch_size=microbatch_size,
    )
    trainer.fit()
    trainer.state.max_duration = "2ep"
    trainer.fit()
    trainer.close()
    trainer.close()
    assert checks.num_values > 0


def test_every_callback_has_a_module_of_its_own():
    modules = {type_.__module__.rpartition(".")[2] for type_ in map(callbacks.__getattr__, OWN)}
    for module in [*modules - {"saver", "loader"}, "checkpoint_saver", "load_checkpoint"]:
        assert hasattr(callbacks, module)


def test_a_checkpoint_is_loaded_by_the_function_that_users_patch(make_trainer, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "composer.callbacks.load_checkpoint.load_checkpoint", lambda path, *args, **settings: calls.append(path)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(callbacks=callbacks.LoadCheckpoint("fake-path"))
    assert calls == ["fake-path"]


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("EarlyStopper", "min_delta", "small"),
        ("EarlyStopper", "patience", "3sp"),
        ("MemoryMonitor", "dist_aggregate_batch_interval", 0),
        ("OOMObserver", "overwrite", "no"),
        ("OptimizerMonitor", "batch_log_interval", 1.5),
        ("RuntimeEstimator", "skip_batches", -1),
        ("SpeedMonitor", "window_size", 0),
        ("SyncMonitor", "skip_batches", -1),
        ("ThresholdStopper", "threshold", "high"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_when_the_callback_is_made(name, argument, value):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{argument}={value!r} ")):
        getattr(callbacks, name)(**ARGUMENTS.get(name, {}) | {argument: value})


def test_letters_of_a_text_are_no_names_of_modules():
    with pytest.raises(TypeError, match=r"ignore_module_types='dropout' must be a list of texts"):
        callbacks.ActivationMonitor(ignore_module_types="dropout")
