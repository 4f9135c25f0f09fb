"""A run with DeepSpeed is saved to one whole file, from which runs of any kind go on."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks


class Losses(Callback):
    def __init__(self):
        self.seen = {}

    def batch_end(self, state, logger):
        self.seen[int(state.timestamp.batch)] = float(state.loss.detach())


def train(stage, **settings):
    generator = torch.Generator().manual_seed(5)
    dataset = TensorDataset(torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator))
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model = ComposerModel.from_module(network, nn.functional.cross_entropy)
    losses = Losses()
    config = {} if stage is None else {"deepspeed_config": {"zero_optimization": {"stage": stage}}}
    with Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, 4, sampler=dist.get_sampler(dataset, shuffle=True)),
        max_duration="2ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05),
        callbacks=losses,
        device="cpu",
        progress_bar=False,
        seed=1,
        **config,
        **settings,
    ) as trainer:
        trainer.fit()
    return losses.seen


def save_and_resume(folder):
    found = {}
    for stage in (0, 2, 3):
        expected = train(stage, save_folder=f"{folder}/{stage}", save_interval="1ba", save_filename="ba{batch}.pt")
        dist.barrier()
        resumed = train(stage, load_path=f"{folder}/{stage}/ba2.pt")
        without = train(None, load_path=f"{folder}/{stage}/ba2.pt")
        found[stage] = expected, resumed, without
    train(None, save_folder=f"{folder}/ddp", save_interval="1ba", save_filename="ba{batch}.pt")
    dist.barrier()
    found["ddp"] = train(3, load_path=f"{folder}/ddp/ba2.pt"), found[3][0]
    return found


@pytest.mark.slow
def test_deepspeed_goes_on_at_every_stage_and_so_does_a_run_without_it(tmp_path):
    pytest.importorskip("deepspeed")
    for found in run_ranks(save_and_resume, str(tmp_path), store=tmp_path / "store", timeout_s=300):
        from_ddp, whole = found.pop("ddp")
        for expected, resumed, without in found.values():
            later = {batch: loss for batch, loss in expected.items() if batch > 2}
            assert resumed == later  # to the last bit
            assert without == pytest.approx(later, rel=1e-5)  # which sums in another order
        assert from_ddp == pytest.approx({batch: whole[batch] for batch in from_ddp}, rel=1e-5)
