"""What EMA, SWA and SAM keep of a sharded model is saved with it, each rank its shards, and goes on from there."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import EMA, SAM, SWA
from composer.models import ComposerClassifier
from composer.utils import dist
from composer_checkpoint import verify
from composer_dist.testing import run_ranks

AVERAGES = {
    "ema": lambda: EMA(half_life="2ba"),
    "swa": lambda: SWA(swa_start="0.2dur", swa_end="0.9dur", update_interval="1ba", schedule_swa_lr=True, swa_lr=0.01),
}
ALGORITHMS = {**AVERAGES, "sam": SAM}
BEFORE, MIDWAY, LAST = 1, 4, 8


def make_trainer(algorithm, kind="sharded", sharded=True, **settings):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    data = TensorDataset(torch.randn(16, 5), torch.arange(16) % 3)
    loader = DataLoader(data, 4 // dist.get_world_size(), sampler=dist.get_sampler(data, shuffle=False))
    return Trainer(
        model=ComposerClassifier(network, num_classes=3),
        train_dataloader=loader,
        eval_dataloader=loader,
        max_duration="8ba",
        optimizers=torch.optim.Adam(network.parameters(), lr=0.05),
        algorithms=ALGORITHMS[algorithm](),
        parallelism_config={"fsdp": {"state_dict_type": kind, "sharded_ckpt_prefix_dir": "ba{batch}"}}
        if sharded
        else None,
        device="cpu",
        progress_bar=False,
        seed=5,
        run_name="plum",
        **settings,
    )


def state_of(trainer):
    """Return weights, and what the average holds, whole; of what is not sharded, where it is that of rank 0."""
    weights = trainer.strategy.model_state_dict(trainer.state.model)
    found = {name: value for name, value in weights.items() if "running" not in name or dist.get_global_rank() == 0}
    (algorithm,) = trainer.state.algorithms
    saved = algorithm.state_dict()
    if isinstance(algorithm, EMA):
        found |= {f"average.{name}": value for name, value in saved["ema_model"]["named_parameters_dict"].items()}
    if isinstance(algorithm, SWA):
        found |= {f"average.{name}": value for name, value in saved["swa_model"].items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in found.items()}


def train(algorithm, **settings):
    with make_trainer(algorithm, **settings) as trainer:
        trainer.fit()
        return state_of(trainer)


def save_and_resume(algorithm, kind, save_async, folder):
    """Return what whole runs and resumed ones end with."""
    name = "ba{batch}-{rank}.pt" if kind == "local" else "ba{batch}.pt"
    saving = {"save_folder": folder, "save_filename": name, "save_interval": "1ba", "save_async": save_async}
    found = {LAST: train(algorithm, kind=kind, **saving)}
    for batch in (BEFORE, MIDWAY):
        path = os.path.join(folder, f"ba{batch}" if kind == "sharded" else name.replace("{batch}", str(batch)))
        found[batch] = train(algorithm, kind=kind, load_path=path)
    return found


@pytest.mark.parametrize(("kind", "save_async"), [("sharded", False), ("sharded", True), ("local", False)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sharded_run_goes_on_to_the_last_bit(tmp_path, algorithm, kind, save_async):
    folder = str(tmp_path / "checkpoints")
    for found in run_ranks(
        save_and_resume, algorithm, kind, save_async, folder, store=tmp_path / "store", timeout_s=200
    ):
        for batch in (BEFORE, MIDWAY):
            assert found[batch].keys() == found[LAST].keys()
            for name, value in found[LAST].items():
                assert torch.equal(found[batch][name], value), (batch, name)


def load(average, path):
    with make_trainer(average, sharded=False, load_path=path) as trainer:
        return state_of(trainer)


def save_and_load(average, folder):
    """Return what two ranks load of a checkpoint that two ranks saved, and how much of one average is this rank's."""
    train(average, save_folder=folder, save_interval="1ba")
    path = os.path.join(folder, f"ba{MIDWAY}")
    with make_trainer(average, load_path=path) as trainer:
        (algorithm,) = trainer.state.algorithms
        saved = algorithm.state_dict()
        shards = saved["ema_model"]["named_parameters_dict"] if average == "ema" else saved["swa_model"]
        (weight,) = [value for name, value in shards.items() if name.endswith("module.0.weight")]
        return state_of(trainer), weight.to_local().shape


@pytest.mark.parametrize("average", AVERAGES)
def test_an_average_that_two_ranks_share_is_loaded_by_one(tmp_path, average):
    folder = tmp_path / "checkpoints"
    (saved, shape), (_, other_shape) = run_ranks(
        save_and_load, average, str(folder), store=tmp_path / "store", timeout_s=200
    )
    assert shape == other_shape == (3, 5)  # half of it on each
    path = str(folder / f"ba{MIDWAY}")
    verify(path)
    loaded = load(average, path)
    assert loaded.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name
