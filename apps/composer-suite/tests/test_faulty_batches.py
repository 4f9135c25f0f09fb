"""Batches, dataloaders and parameters that are odd: trained on where that has a meaning, and named where not."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from composer import Trainer
from composer.core import Callback, DataSpec
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.devices import DeviceCPU
from composer_dist.testing import run_ranks

LR = 0.5


def fit(module, data, loss=nn.functional.cross_entropy, **settings):
    model = ComposerModel.from_module(module, loss)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with Trainer(
        model=model,
        train_dataloader=data,
        progress_bar=False,
        seed=1,
        **{
            "device": "cpu",
            "optimizers": torch.optim.SGD(trained, lr=LR),
            "max_duration": "1ba",
            "callbacks": None,
            **settings,
        },
    ) as trainer:
        trainer.fit()
        return trainer.state


def notes_of(error):
    return " ".join(getattr(error.value, "__notes__", ()))


def by_hand(module, inputs, targets, loss=nn.functional.cross_entropy):
    """The weights after one step of plain gradient descent."""
    gradients = torch.autograd.grad(loss(module(inputs), targets), list(module.parameters()))
    return [parameter.detach() - LR * g for parameter, g in zip(module.parameters(), gradients, strict=True)]


class Batches(list):
    batch_size = 4


def test_a_batch_without_samples_moves_nothing():
    layer = nn.Linear(2, 2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]

    state = fit(layer, Batches([(torch.empty(0, 2), torch.empty(0, dtype=torch.long))]))

    torch.testing.assert_close([*layer.parameters()], before, rtol=0, atol=0)
    assert state.total_loss_dict["loss/train/total"] == 0
    assert state.timestamp.batch == 1
    assert state.timestamp.sample == 0


def test_a_batch_of_one_sample_is_a_batch():
    layer = nn.Linear(2, 2)
    batch = (torch.ones(1, 2), torch.tensor([1]))
    expected = by_hand(layer, *batch)

    fit(layer, Batches([batch]))

    torch.testing.assert_close([*layer.parameters()], expected)


def train_on_fewer_samples_than_ranks():
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    num_samples = 1 - dist.get_global_rank()  # rank 1 has none
    batch = (torch.ones(num_samples, 2), torch.ones(num_samples, dtype=torch.long))
    expected = by_hand(layer, torch.ones(1, 2), torch.ones(1, dtype=torch.long))
    fit(layer, Batches([batch]))
    return [parameter.detach() for parameter in layer.parameters()], expected


def test_a_batch_of_fewer_samples_than_ranks_counts_those_there_are(tmp_path):
    for weights, expected in run_ranks(train_on_fewer_samples_than_ranks, store=tmp_path / "store"):
        torch.testing.assert_close(weights, expected)


class Growing:
    """Another number of batches in each epoch; the length is that of the first."""

    batch_size = 2

    def __init__(self, *lengths):
        self.lengths = iter(lengths)
        self.first = lengths[0]

    def __len__(self):
        return self.first

    def __iter__(self):
        return iter([(torch.ones(2, 2), torch.tensor([0, 1]))] * next(self.lengths))


class BatchesOfEpochs(Callback):
    def __init__(self):
        self.counts = []

    def epoch_end(self, state, logger):
        self.counts.append(int(state.timestamp.batch) - sum(self.counts))


def test_an_epoch_has_no_more_batches_than_the_dataloader_said_and_may_have_fewer():
    counts = BatchesOfEpochs()

    fit(nn.Linear(2, 2), Growing(3, 2, 5), max_duration="3ep", callbacks=counts)

    assert counts.counts == [3, 2, 3]


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(2), 1


def test_an_endless_dataset_has_epochs_only_of_a_length_that_is_given():
    state = fit(nn.Linear(2, 2), DataLoader(Endless(), batch_size=2), max_duration="4ba")
    assert state.timestamp.epoch == 0
    state = fit(nn.Linear(2, 2), DataLoader(Endless(), batch_size=2), max_duration="2ep", train_subset_num_batches=3)

    assert state.timestamp.batch == 6


class Opaque:
    """A batch that says nothing of its samples."""


def test_a_batch_that_cannot_be_counted_or_cut_names_what_to_give():
    with pytest.raises((ValueError, NotImplementedError), match="Opaque") as error:
        fit(nn.Linear(2, 2), Batches([Opaque()]))
    assert "DataSpec" in str(error.value) or "get_num_samples_in_batch" in str(error.value)

    counted = DataSpec(Batches([Opaque()]), get_num_samples_in_batch=lambda batch: 8)
    with pytest.raises(NotImplementedError, match=r"Opaque.*split_batch"):
        fit(nn.Linear(2, 2), counted)


class Worker(Dataset):
    """Does something to the worker that asks for its fifth sample."""

    def __init__(self, what):
        self.what = what

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4:
            self.what()
        return torch.ones(2), 1


def raise_in_worker():
    raise KeyError("sample 4 is gone")


def die():
    time.sleep(1)  # until the batches before are trained on: its death interrupts whatever the Trainer does
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(60)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (raise_in_worker, "sample 4 is gone"),
        (die, "killed by signal|exited unexpectedly"),
        (hang, "timed out after 5 seconds"),
    ],
)
def test_a_worker_that_fails_is_named_with_the_batch(what, said):
    loader = DataLoader(Worker(what), batch_size=2, num_workers=1, timeout=5 if what is hang else 50, prefetch_factor=1)

    with pytest.raises((KeyError, RuntimeError), match=said) as error:
        fit(nn.Linear(2, 2), loader, max_duration="1ep")

    assert "raised in the dataloader of epoch 0, batch 2" in notes_of(error)


def test_labels_out_of_range_are_named_with_the_batch():
    batches = Batches([(torch.ones(4, 2), torch.tensor([0, 1, 1, 0])), (torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))])

    with pytest.raises(IndexError, match="Target 2 is out of bounds") as error:
        fit(nn.Linear(2, 2), batches, max_duration="1ep")

    assert "raised in the loss of epoch 0, batch 1" in notes_of(error)


def fail(*args, **kwargs):
    raise ZeroDivisionError("today")


class Unreadable:
    batch_size = 4

    def __iter__(self):
        fail()


GOOD = Batches([(torch.ones(4, 2), torch.tensor([0, 1, 1, 0]))])


@pytest.mark.parametrize(
    ("data", "stage"),
    [
        (Unreadable(), "{dataloader}"),
        (DataSpec(GOOD, batch_transforms=fail), "{dataloader}"),
        (DataSpec(GOOD, microbatch_transforms=fail), "{microbatch}"),
    ],
    ids=["iter", "batch_transforms", "microbatch_transforms"],
)
@pytest.mark.parametrize(
    ("use", "stages"),
    [
        ("fit", {"dataloader": "the dataloader", "microbatch": "the preparation of a microbatch"}),
        ("eval", {"dataloader": "the dataloader of an evaluation", "microbatch": "an evaluation"}),
        ("predict", {"dataloader": "the dataloader of a prediction", "microbatch": "a prediction"}),
    ],
)
def test_data_that_cannot_be_made_ready_is_named_with_where(data, stage, use, stages):
    model = ComposerModel.from_module(nn.Linear(2, 2), nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with (
        pytest.raises(ZeroDivisionError) as error,
        Trainer(model, train_dataloader=GOOD, optimizers=optimizer, device="cpu", progress_bar=False) as trainer,
    ):
        trainer.fit(train_dataloader=data, duration="1ba") if use == "fit" else getattr(trainer, use)(data)
    assert notes_of(error) == f"raised in {stage.format(**stages)} of epoch 0, batch 0"


def test_an_error_inside_of_a_closure_is_named_by_the_innermost_stage():
    module = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError) as error:
        fit(module, GOOD, loss=fail, optimizers=torch.optim.LBFGS(module.parameters()))
    assert notes_of(error) == "raised in the loss of epoch 0, batch 0"


def test_an_error_that_led_to_another_one_keeps_its_place():
    def run_out(*args):
        raise RuntimeError("c10::Error")

    device = DeviceCPU()
    device.name = "gpu"
    with pytest.warns(UserWarning, match="is experimental"), pytest.raises(RuntimeError, match="cuda error") as error:
        fit(nn.Linear(2, 2), GOOD, loss=run_out, device=device, device_train_microbatch_size="auto")
    assert error.value.__cause__.__notes__ == ["raised in the loss of epoch 0, batch 0"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_inputs_of_another_dtype_are_named_with_the_batch(dtype):
    with pytest.raises(RuntimeError, match="dtype") as error:
        fit(nn.Linear(2, 2), Batches([(torch.ones(4, 2, dtype=dtype), torch.tensor([0, 1, 1, 0]))]))

    assert "raised in the forward pass of epoch 0, batch 0" in notes_of(error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_a_transform_makes_them_what_the_model_takes(dtype):
    layer = nn.Linear(2, 2)
    targets = torch.tensor([0, 1, 1, 0])
    expected = by_hand(layer, torch.ones(4, 2), targets)
    data = DataSpec(
        Batches([(torch.ones(4, 2, dtype=dtype), targets)]),
        microbatch_transforms=lambda batch: (batch[0].float(), batch[1]),
    )

    fit(layer, data)

    torch.testing.assert_close([*layer.parameters()], expected)


@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize(
    "laid_out",
    [
        pytest.param(lambda images: images.to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(lambda images: images.flip(3).contiguous().transpose(2, 3).flip(2).transpose(2, 3), id="views"),
        pytest.param(lambda images: images[:, :1].expand(-1, 3, -1, -1), id="expanded"),
        pytest.param(lambda images: images.clone().requires_grad_(), id="with gradient"),
    ],
)
def test_memory_formats_of_inputs_change_nothing(laid_out, size):
    torch.manual_seed(2)
    network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.LazyLinear(2))
    images, targets = laid_out(torch.randn(4, 3, 5, 6)), torch.tensor([0, 1, 1, 0])
    expected = by_hand(network, images.detach().contiguous(), targets)

    fit(network, Batches([(images, targets)]), device_train_microbatch_size=size)

    # Each weight is a sum over 4 samples, taken in another order.
    torch.testing.assert_close([*network.parameters()], expected, rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(self.first(inputs))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.second(self.first(inputs))


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.none, self.layer = nn.Parameter(torch.empty(0)), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.layer(inputs) + self.none.sum()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))

    def forward(self, inputs):
        return (inputs.to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize("kind", [Tied, Frozen, Empty, Complex])
def test_parameters_of_every_kind_are_trained_as_by_hand(kind):
    torch.manual_seed(3)
    module = kind()
    inputs, targets = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(nn.functional.cross_entropy(module(inputs), targets), trained)
    expected = [parameter.detach() - LR * g for parameter, g in zip(trained, gradients, strict=True)]
    frozen = [p.clone() for p in module.parameters() if not p.requires_grad]

    fit(module, Batches([(inputs, targets)]), device_train_microbatch_size=2)

    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close([p for p in module.parameters() if not p.requires_grad], frozen, rtol=0, atol=0)


def test_weights_without_values_are_refused():
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"Cannot copy out of meta tensor.*to_empty"):
        fit(layer, Batches([(torch.ones(4, 2), torch.tensor([0, 1, 1, 0]))]))


def test_a_sum_over_samples_of_a_dataset_is_that_of_its_batches():
    data = TensorDataset(torch.ones(7, 2), torch.ones(7, dtype=torch.long))
    state = fit(nn.Linear(2, 2), DataLoader(data, batch_size=3), max_duration="2ep")
    assert state.timestamp.sample == 14
