"""Two ranks: who logs where, and what they know of each other."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.loggers import FileLogger, MLFlowLogger, TensorboardLogger, WandBLogger
from composer.models import ComposerClassifier
from composer.utils import dist
from composer_dist.testing import run_ranks


def train(make_logger, folder):
    """Train with a logger and return what of it is told apart, or the error."""
    data = TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    logger = make_logger(folder)
    try:
        with Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=2, sampler=dist.get_sampler(data)),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="1ep",
            loggers=logger,
            run_name="plum",
            progress_bar=False,
            device="cpu",
        ) as trainer:
            trainer.fit()
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return {name: getattr(logger, name, None) for name in ("run_id", "run_dir")}


def make_file(folder):
    return FileLogger(f"{folder}/{{run_name}}-{{rank}}.txt", capture_stdout=False, capture_stderr=False)


def make_tensorboard(folder):
    return TensorboardLogger(log_dir=folder)


def make_mlflow(folder):
    return MLFlowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db", log_system_metrics=False)


def make_wandb_of_each_rank(folder):
    return WandBLogger(rank_zero_only=False, init_kwargs={"mode": "offline", "dir": folder})


def make_wrong_wandb(folder):
    return WandBLogger(init_kwargs={"no_such_argument": 1})


def test_each_rank_writes_a_file_of_its_own(tmp_path):
    run_ranks(train, make_file, str(tmp_path), store=tmp_path / "store")
    for rank in range(2):
        lines = Path(tmp_path / f"plum-{rank}.txt").read_text().splitlines()
        assert sum(": loss/train/total: " in line for line in lines) == 2


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs the library 'tensorboard'")
def test_rank_0_alone_writes_event_files(tmp_path):
    run_ranks(train, make_tensorboard, str(tmp_path), store=tmp_path / "store")
    pids = {path.name.split(".")[-2] for path in (tmp_path / "plum").glob("events*")}
    assert len(pids) == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs the library 'mlflow'")
def test_all_ranks_know_the_run_that_rank_0_logs_to(tmp_path):
    first, second = run_ranks(train, make_mlflow, str(tmp_path), store=tmp_path / "store", timeout_s=120)
    assert first["run_id"] == second["run_id"] is not None


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs the library 'wandb'")
def test_each_rank_has_a_run_of_wandb_where_that_is_asked_for(tmp_path):
    first, second = run_ranks(train, make_wandb_of_each_rank, str(tmp_path), store=tmp_path / "store", timeout_s=120)
    assert len({first["run_dir"], second["run_dir"]} - {None}) == 2


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs the library 'wandb'")
def test_what_rank_0_cannot_begin_stops_all_ranks_at_once(tmp_path):
    first, second = run_ranks(train, make_wrong_wandb, str(tmp_path), store=tmp_path / "store", timeout_s=120)
    assert first.startswith("TypeError: ")
    assert "no_such_argument" in first
    assert second.startswith("RuntimeError: rank 1 stops, since WandBLogger has failed on rank 0: TypeError: ")
