"""What the tests of destinations share: no service is reached from here but those on this machine."""

import os
import random
import threading
import warnings

import pytest
import torch

from composer.core import Engine, Event, State
from composer.loggers import Logger

# What the clients read when they are imported: report no errors, tell nobody of it, leave torch alone.
os.environ.update(
    COMET_DISABLE_AUTO_LOGGING="1",
    COMET_ERROR_TRACKING_ENABLE="false",
    COMET_LOGGING_CONSOLE="CRITICAL",
    DO_NOT_TRACK="true",
    MLFLOW_DISABLE_TELEMETRY="true",
    WANDB_ERROR_REPORTING="false",
    WANDB_SILENT="true",
)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Let every client write files below the test's own folder."""
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_CONFIG_DIR": str(tmp_path / "wandb-config"),
        "WANDB_CACHE_DIR": str(tmp_path / "wandb-cache"),
        "WANDB_DATA_DIR": str(tmp_path / "wandb-data"),
        "WANDB_DISABLE_GIT": "true",
        "COMET_OFFLINE_DIRECTORY": str(tmp_path),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "RUN_NAME", "DATABRICKS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    # The clients warn about themselves; what ours says is looked for in each test.
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        yield


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """Name a database for MLflow, the same one for all: its tables take seconds to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def begun():
    """Go through INIT with destinations and give a Logger over them; all are closed when the test ends."""
    engines = []

    def begin(*destinations, run_name="plum"):
        state = State(torch.nn.Linear(1, 1), rank_zero_seed=0, run_name=run_name, device="cpu", callbacks=destinations)
        engine = Engine(state, Logger(state, destinations))
        engines.append(engine)
        engine.run_event(Event.INIT)
        return engine

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture
def drawing(monkeypatch):
    """Keep the names of the threads that draw from Python's own generator, from which training draws, too."""
    names = set()
    draw = random.random

    def note_and_draw():
        names.add(threading.current_thread().name)
        return draw()

    monkeypatch.setattr(random, "random", note_and_draw)
    return names
