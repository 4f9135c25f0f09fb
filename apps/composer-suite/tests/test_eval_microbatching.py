"""Evaluations in microbatches: of a size that is found out, and as many on every rank where the ranks must meet."""

import pytest
import torch
import torch.distributed as tdist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat

from composer import Trainer
from composer.core import Callback, Evaluator
from composer.models import ComposerModel
from composer.utils import dist
from composer_dist.devices import DeviceCPU
from composer_dist.strategy import SingleDevice
from composer_dist.testing import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:device_eval_microbatch_size='auto':UserWarning", "ignore:.*Eval microbatch size:RuntimeWarning"
)


class Seen(Metric):
    """Keeps the samples that it was shown, in a list."""

    def __init__(self):
        super().__init__()
        self.add_state("samples", default=[], dist_reduce_fx="cat")

    def update(self, outputs, targets):
        self.samples.append(targets.clone())

    def compute(self):
        return dim_zero_cat(self.samples)


class SmallDevice(DeviceCPU):
    """Memory for some samples in the second metric's update, when the first has been updated already."""

    name = "gpu"

    def __init__(self, fits, ranks=(0,)):
        super().__init__()
        self.fits, self.ranks = fits, ranks


class Model(ComposerModel):
    def __init__(self, device):
        super().__init__()
        self.layer = nn.Linear(1, 3)
        self.device = device

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train=False):
        return {} if is_train else {"Seen": Seen(), "Accuracy": MulticlassAccuracy(3, average="micro")}

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch)

    def update_metric(self, batch, outputs, metric):
        is_short = isinstance(metric, MulticlassAccuracy) and len(batch[0]) > self.device.fits
        metric.update(outputs, batch[1])
        if is_short and dist.get_global_rank() in self.device.ranks:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def evaluate(device, size, num_samples=22):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(num_samples, 1), torch.arange(num_samples) % 3)
    sampler = dist.get_sampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    evaluator = Evaluator(label="val", dataloader=loader, device_eval_microbatch_size=size)
    model = Model(device)
    with Trainer(
        model=model,
        eval_dataloader=evaluator,
        device=device,
        precision="fp32",
        progress_bar=False,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    ) as trainer:
        trainer.eval()
        values = {name: metric.compute() for name, metric in trainer.state.eval_metrics["val"].items()}
        return values, trainer.state.evaluators[0].device_eval_microbatch_size


def test_what_does_not_fit_is_counted_once():
    values, size = evaluate(SmallDevice(fits=2), "auto")
    expected, _ = evaluate(SmallDevice(fits=8), 8)

    assert size == 2
    assert values["Seen"].tolist() == expected["Seen"].tolist()
    assert values["Accuracy"] == expected["Accuracy"]


def evaluate_on_ranks(fits, ranks, size):
    return evaluate(SmallDevice(fits, ranks), size)


def test_all_ranks_lower_the_size(tmp_path):
    results = run_ranks(evaluate_on_ranks, 2, (1,), "auto", store=tmp_path / "found", timeout_s=60)
    expected, _ = evaluate(SmallDevice(fits=8), 8)

    for values, size in results:
        assert size == 2
        assert sorted(values["Seen"].tolist()) == sorted(expected["Seen"].tolist())
        assert values["Accuracy"] == expected["Accuracy"]


def test_a_sample_that_does_not_fit_is_an_error():
    with pytest.raises(RuntimeError, match=r"out of memory in evaluator 'val'.*single sample"):
        evaluate(SmallDevice(fits=0), "auto")


def test_a_cpu_has_no_memory_to_run_out_of(make_trainer, make_loader):
    evaluator = Evaluator(label="val", dataloader=make_loader(8, 4), device_eval_microbatch_size="auto")
    message = "Can only use adaptive device_eval_microbatch_size on GPU.*'cpu'.*'val'"
    with pytest.raises(ValueError, match=message):
        make_trainer(eval_dataloader=evaluator)
    trainer = make_trainer(max_duration="1ep")
    with pytest.raises(ValueError, match=message):
        trainer.eval(evaluator)
    with pytest.raises(ValueError, match=message):
        trainer.fit(eval_dataloader=evaluator)


class Meeting(nn.Module):
    """Lets all ranks meet in each forward pass, as weights do that are gathered there."""

    def forward(self, inputs):
        tdist.all_reduce(torch.zeros(1))
        return inputs


class Forwards(Callback):
    def __init__(self):
        self.count = 0

    def eval_after_forward(self, state, logger):
        self.count += 1


def evaluate_unevenly():
    rank = dist.get_global_rank()
    batches = [torch.ones(6), torch.ones(2)] if rank == 0 else [torch.ones(1), torch.ones(5)]
    model = Model(SmallDevice(fits=8))
    model.layer = nn.Sequential(Meeting(), nn.Linear(1, 3))
    data = [(part[:, None], part.long()) for part in batches]
    evaluator = Evaluator(label="val", dataloader=data, device_eval_microbatch_size=2)
    forwards = Forwards()
    with Trainer(
        model=model,
        eval_dataloader=evaluator,
        device="cpu",
        progress_bar=False,
        callbacks=forwards,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    ) as trainer:
        # What DeepSpeed says at stage 3, and FSDP.
        type(trainer.strategy).meets_in_forward = True
        trainer.eval()
        return forwards.count, len(trainer.state.eval_metrics["val"]["Seen"].compute())


def test_ranks_that_meet_in_each_forward_pass_have_as_many(tmp_path):
    results = run_ranks(evaluate_unevenly, store=tmp_path / "store")

    # Batches of 3 and 1 microbatches, then of 1 and 3: three forward passes each time, and each sample counts once.
    assert results == [(6, 14), (6, 14)]


def test_a_single_device_meets_nobody():
    assert SingleDevice(DeviceCPU()).meets_in_forward is False
