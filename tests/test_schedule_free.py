"""Optimizers with `train()` and `eval()` in the Trainer, next to the loop that their own documentation shows."""

import math

import pytest
import schedulefree
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import EMA, SAM, SWA
from composer.callbacks import ExportForInferenceCallback
from composer.core import Callback
from composer.models import ComposerModel
from composer_algorithms.sam import SAMOptimizer

KINDS = {
    "AdamW": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=0.05, warmup_steps=3, weight_decay=0.1),
    "SGD": lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=0.5, foreach=False),
    "RAdam": lambda parameters: schedulefree.RAdamScheduleFree(parameters, lr=0.05),
}


def make_network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def make_loader():
    generator = torch.Generator().manual_seed(5)
    points, labels = torch.randn(32, 5, generator=generator), torch.randint(3, (32,), generator=generator)
    return DataLoader(TensorDataset(points, labels), batch_size=4)


class Watch(Callback):
    """Notes losses, and the weights of evaluations."""

    def __init__(self):
        self.losses, self.evaluated = [], []

    def after_loss(self, state, logger):
        self.losses.append(state.loss.item())

    def eval_start(self, state, logger):
        self.evaluated.append(copy_of(state.model.module))


def copy_of(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def make_trainer(network, optimizer, *callbacks, **settings):
    return Trainer(
        model=ComposerModel.from_module(network, F.cross_entropy),
        train_dataloader=make_loader(),
        optimizers=optimizer,
        callbacks=callbacks,
        **{"max_duration": "3ep", "device": "cpu", "progress_bar": False, "seed": 3, **settings},
    )


def by_hand(network, optimizer, num_epochs=3, skipped=()):
    """Return the losses, and the weights of an evaluation at the end of each epoch."""
    losses, evaluated = [], []
    for epoch in range(num_epochs):
        optimizer.train()
        for number, (inputs, targets) in enumerate(make_loader()):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(inputs), targets)
            losses.append(loss.item())
            if (epoch, number) not in skipped:
                loss.backward()
                optimizer.step()
        optimizer.eval()
        evaluated.append(copy_of(network))
    return losses, evaluated


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interval", ["1ep", "8ba"])
def test_the_trainer_is_the_loop_by_hand(kind, interval):
    network, theirs, watch = make_network(), make_network(), Watch()
    with make_trainer(
        network, KINDS[kind](network.parameters()), watch, eval_dataloader=make_loader(), eval_interval=interval
    ) as trainer:
        trainer.fit()
    losses, evaluated = by_hand(theirs, KINDS[kind](theirs.parameters()))
    assert watch.losses == losses
    assert_same(watch.evaluated, evaluated)
    assert_same(copy_of(network), evaluated[-1])  # at the end, the model has the weights to use


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_weights_to_use_and_resumes_exactly(kind, tmp_path):
    whole, again, theirs = make_network(), make_network(), make_network()
    with make_trainer(whole, KINDS[kind](whole.parameters()), save_folder=tmp_path, save_interval="1ep") as trainer:
        trainer.fit()
    _, evaluated = by_hand(theirs, KINDS[kind](theirs.parameters()))
    for epoch, expected in enumerate(evaluated, start=1):
        saved = torch.load(tmp_path / f"ep{epoch}-ba{epoch * 8}-rank0.pt", weights_only=False)["state"]["model"]
        assert_same({name.removeprefix("module."): value for name, value in saved.items()}, expected)
    path = str(tmp_path / "ep1-ba8-rank0.pt")
    with make_trainer(again, KINDS[kind](again.parameters()), load_path=path) as trainer:
        trainer.fit(duration="1ep")
        trainer.fit(duration="1ep")  # the first fit has ended with the other weights
        saved = torch.load(tmp_path / "ep3-ba24-rank0.pt", weights_only=False)["state"]
        (expected,), (found,) = saved["optimizers"].values(), trainer.state.get_optim_state_dict().values()
        assert_same(found["state"], expected["state"])
        assert found["param_groups"] == expected["param_groups"]
    assert_same(copy_of(again), evaluated[-1])


class Uses(Callback):
    """Exports the weights, and predicts with them, at the end of a batch."""

    def __init__(self, folder):
        self.folder, self.trainer, self.outputs = folder, None, None

    def batch_end(self, state, logger):
        if state.timestamp.batch == 8:
            self.trainer.export_for_inference("safetensors", str(self.folder / "exported.safetensors"))
        elif state.timestamp.batch == 16:
            (self.outputs,) = self.trainer.predict([make_loader().dataset.tensors])


def test_predictions_and_exports_have_the_weights_to_use(tmp_path):
    network, theirs, uses = make_network(), make_network(), Uses(tmp_path)
    at_end = ExportForInferenceCallback("safetensors", str(tmp_path / "end.safetensors"))
    with make_trainer(network, KINDS["AdamW"](network.parameters()), uses, at_end) as trainer:
        uses.trainer = trainer
        trainer.fit()
    _, evaluated = by_hand(theirs, KINDS["AdamW"](theirs.parameters()))
    for name, expected in (("exported", evaluated[0]), ("end", copy_of(network))):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert_same({key.removeprefix("module."): value for key, value in found.items()}, expected)
    theirs.load_state_dict(evaluated[1])
    assert_same(uses.outputs, theirs(make_loader().dataset.tensors[0]).detach())


class Breaks(Callback):
    def after_backward(self, state, logger):
        if state.timestamp.batch == 11:
            state.model.module[0].bias.grad.fill_(math.nan)


def test_a_skipped_batch_leaves_the_averages_alone():
    network, theirs = make_network(), make_network()
    with make_trainer(network, KINDS["AdamW"](network.parameters()), Breaks(), on_divergence="skip") as trainer:
        trainer.fit()
    by_hand(theirs, KINDS["AdamW"](theirs.parameters()), skipped=[(1, 3)])
    # The mean of each epoch is computed at its end by hand, and once by the Trainer, which rounds less often.
    torch.testing.assert_close(copy_of(network), copy_of(theirs), rtol=1e-5, atol=1e-6)


def test_sam_takes_a_schedule_free_optimizer():
    network, theirs = make_network(), make_network()
    with make_trainer(network, KINDS["SGD"](network.parameters()), algorithms=SAM(rho=0.1)) as trainer:
        trainer.fit()
    inner = KINDS["SGD"](theirs.parameters())
    optimizer = SAMOptimizer(inner, rho=0.1)
    inner.train()
    for _ in range(3):
        for inputs, targets in make_loader():

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = F.cross_entropy(theirs(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    inner.eval()
    assert_same(copy_of(network), copy_of(theirs))


def test_a_second_optimizer_trains_beside_it():
    network, theirs = make_network(), make_network()

    def make(network):
        return [KINDS["AdamW"](network[0].parameters()), torch.optim.SGD(network[2].parameters(), lr=0.1)]

    with make_trainer(network, make(network)) as trainer:
        trainer.fit()
    free, plain = make(theirs)
    free.train()
    for _ in range(3):
        for inputs, targets in make_loader():
            theirs.zero_grad()
            F.cross_entropy(theirs(inputs), targets).backward()
            free.step()
            plain.step()
    free.eval()
    assert_same(copy_of(network), copy_of(theirs))


def test_a_step_by_hand_in_the_other_mode_is_the_optimizers_own_error():
    network = make_network()
    with make_trainer(network, KINDS["AdamW"](network.parameters())) as trainer:
        trainer.fit()
        with pytest.raises(Exception, match="Optimizer was not in train mode when step is called"):
            trainer.state.optimizers.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithms": EMA()}, "EMA cannot be combined with AdamWScheduleFree: both exchange the weights"),
        ({"algorithms": SWA()}, "SWA cannot be combined with AdamWScheduleFree: both exchange the weights"),
        ({"deepspeed_config": {}}, "AdamWScheduleFree cannot be combined with deepspeed_config"),
    ],
    ids=["EMA", "SWA", "DeepSpeed"],
)
def test_what_exchanges_or_copies_the_weights_itself_is_refused(settings, message):
    network = make_network()
    with pytest.raises(ValueError, match=message):
        make_trainer(network, KINDS["AdamW"](network.parameters()), **settings)
