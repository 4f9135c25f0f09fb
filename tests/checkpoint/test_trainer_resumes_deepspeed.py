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


def train(stage, lr=0.05, **settings):
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
        optimizers=torch.optim.AdamW(model.parameters(), lr=lr),
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


OF_ADAMW = "state/optimizers/AdamW"
LEFT_OUT = {
    "lr": [f"{OF_ADAMW}/*/lr"],
    "groups": [f"{OF_ADAMW}/param_groups"],
    "group": [f"{OF_ADAMW}/param_groups/0"],
    "state": [f"{OF_ADAMW}/state"],
    "value": [f"{OF_ADAMW}/*/exp_avg"],
}


def leave_out_of_optimizers(folder):
    found = {}
    for stage in (0, 2, 3):
        train(stage, save_folder=f"{folder}/{stage}", save_interval="1ba", save_filename="ba{batch}.pt")
        dist.barrier()
        path = f"{folder}/{stage}/ba2.pt"
        for what, patterns in LEFT_OUT.items():
            found[stage, what] = train(stage, load_path=path, load_ignore_keys=patterns, lr=0.01)
        found[stage, "lr by hand"] = train(stage, load_path=path, load_ignore_keys=set_lr)
    return found


def set_lr(content):
    for group in content["state"]["optimizers"]["AdamW"]["param_groups"]:
        group["lr"] = 0.01


@pytest.mark.slow
def test_under_deepspeed_an_optimizer_keeps_its_own_values_of_what_is_left_out(tmp_path):
    """Seen before: `KeyError: 'param_groups'`."""
    pytest.importorskip("deepspeed")
    for found in run_ranks(leave_out_of_optimizers, str(tmp_path), store=tmp_path / "store", timeout_s=300):
        for stage in (0, 2, 3):
            assert found[stage, "lr"] == found[stage, "groups"] == found[stage, "group"] == found[stage, "lr by hand"]
            assert found[stage, "value"] == found[stage, "state"] != found[stage, "lr"]
