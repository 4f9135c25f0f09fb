"""A run that is resumed on another number of ranks keeps its global batches."""

import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks

GLOBAL, LENGTH = 12, 60  # 5 batches per epoch


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def batch_end(self, state, logger):
        self.losses.append(state.total_loss_dict["loss/train/total"].item())


def train(folder, last, of_rank=None, load=None, policy=None, save_interval="1ba"):
    """Return the losses, the samples and microbatches of each batch, and the warnings."""
    if policy is not None:
        os.environ["COMPOSER_ELASTIC_BATCH"] = policy
    torch.manual_seed(11)
    model = ComposerModel.from_module(
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), nn.functional.mse_loss
    )
    points = torch.randn(LENGTH, 3)
    data = TensorDataset(points, points.prod(dim=1, keepdim=True))
    of_rank = of_rank or GLOBAL // dist.get_world_size()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data, of_rank, sampler=dist.get_sampler(data, shuffle=True)),
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            max_duration=f"{last}ba",
            callbacks=(callback := Losses()),
            load_path=None if load is None else f"{folder}/{load}.pt",
            save_folder=str(folder),
            save_filename="{batch}.pt",
            save_interval=save_interval,
            save_overwrite=True,
            save_latest_filename=None,
            seed=5,
            device="cpu",
            progress_bar=False,
        )
        with trainer:
            trainer.fit()
    size = trainer.state.dataloader.batch_size
    samples = int(trainer.state.timestamp.sample) / int(trainer.state.timestamp.batch)
    found = [str(each.message) for each in told if "global batch" in str(each.message) or "in all" in str(each.message)]
    return callback.losses, (size, trainer.state.device_train_microbatch_size, samples), found


def on_ranks(world_size, tmp_path, *arguments):
    store = tmp_path / f"store{len(list(tmp_path.glob('store*')))}"
    results = run_ranks(train, tmp_path / "saved", *arguments, store=store, world_size=world_size, timeout_s=120)
    assert all(result == results[0] for result in results[1:])
    return results[0]


# 3: a script that has 3 samples per rank on any number of ranks. None: it divides the global batch by them.
@pytest.mark.slow
@pytest.mark.parametrize("of_rank", [3, None])
def test_losses_on_four_then_two_then_three_ranks_are_those_of_four(of_rank, tmp_path):
    whole, (*_, samples), _ = on_ranks(4, tmp_path, 15, of_rank)
    assert samples == GLOBAL
    first, _, told = on_ranks(4, tmp_path, 4, of_rank)
    assert not told
    second, sizes, told = on_ranks(2, tmp_path, 11, of_rank, 4, "keep-global", "1ep")  # inside an epoch
    assert sizes == (6, 6 if of_rank is None else 3, GLOBAL)
    assert len(told) == (of_rank is not None)
    third, sizes, told = on_ranks(3, tmp_path, 15, of_rank, 10, "keep-global")  # between two epochs
    assert sizes == (4, 4 if of_rank is None else 3, GLOBAL)
    assert len(told) == (of_rank is not None)
    torch.testing.assert_close(torch.tensor(first + second[:-1] + third), torch.tensor(whole), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_global_batch_changes_only_on_request_or_with_a_warning(tmp_path):
    on_ranks(2, tmp_path, 5, 4)  # 8 in all, and 60 samples: inside the first epoch
    _, sizes, told = on_ranks(3, tmp_path, 6, 4, 5)
    assert sizes[0] == 4
    assert "make batch_size times the ranks 8" in told[0]  # 3 does not divide 8
    on_ranks(2, tmp_path, 9, 4, None, None, "1ep")  # between two epochs: the save of batch 8
    _, sizes, told = on_ranks(1, tmp_path, 9, 4, 8, "keep-per-device")
    assert sizes[0] == 4
    assert not told
    with pytest.raises(Exception, match="a number of ranks that divides the global batch size 8"):
        on_ranks(3, tmp_path, 9, 4, 8, "keep-global")
