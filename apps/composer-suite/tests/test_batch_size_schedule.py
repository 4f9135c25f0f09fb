"""`Schedule('batch_size', ...)`: the batches of the dataloader are divided, and the clock counts the parts."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from composer.core import Callback
from composer.models import ComposerClassifier
from composer.optim import LinearScheduler, Schedule
from composer_dist.devices import DeviceCPU

SIZES = [4, 4, 4, 4, 8, 8, 4, 8, 8, 16, 4]  # of two epochs of 36 samples


def grow(state):
    """Ask for batches of 4, from batch 3 on for 11, and from batch 9 on for 16."""
    batch = state.timestamp.batch
    return 4.0 if batch < 3 else 11.0 if batch < 9 else 16.0


GROW = Schedule("batch_size", grow, absolute=True)


class Sizes(Callback):
    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        self.seen.append(len(state.batch[1]))


@pytest.mark.parametrize(
    ("max_duration", "num_batches"), [("2ep", 11), ("1ep", 7), ("7ba", 7), ("9ba", 9), ("50sp", 9), ("72sp", 11)]
)
@pytest.mark.parametrize("settings", [{}, {"device_train_microbatch_size": 3}, {"train_subset_num_batches": 3}])
def test_weights_equal_a_loop_over_the_same_samples(
    make_trainer, make_model, make_data, max_duration, num_batches, settings
):
    data, sizes, model, by_hand = make_data(36), Sizes(), make_model(), make_model()
    trainer = make_trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=16),
        max_duration=max_duration,
        schedulers=GROW,
        callbacks=sizes,
        **settings,
    )
    trainer.fit()
    assert sizes.seen == SIZES[:num_batches]

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    ends = list(itertools.accumulate(SIZES[:num_batches]))
    for begin, end in itertools.pairwise([0, *ends]):
        inputs, targets = data[[index % 36 for index in range(begin, end)]]
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand.module(inputs), targets).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)  # microbatches add gradients in another order
    assert trainer.state.timestamp.sample == ends[-1]


class ShortOfMemory(DeviceCPU):
    name = "gpu"


class FitsThree(Callback):
    def before_forward(self, state, logger):
        if len(state.batch[1]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.filterwarnings("ignore:device_train_microbatch_size='auto' is", "ignore:A batch ran out of memory")
def test_automatic_microbatches_shrink_while_batches_grow(make_trainer, make_data):
    def train(**settings):
        loader = DataLoader(make_data(36), batch_size=16)
        trainer = make_trainer(train_dataloader=loader, max_duration="2ep", schedulers=GROW, **settings)
        trainer.fit()
        assert trainer.state.timestamp == "11ba"
        return trainer.state.model.state_dict(), trainer.state.device_train_microbatch_size

    expected, _ = train()
    short = {"device": ShortOfMemory(), "device_train_microbatch_size": "auto", "precision": "fp32"}
    weights, size = train(**short, callbacks=FitsThree())
    assert size == 2
    for name in weights:
        torch.testing.assert_close(weights[name], expected[name])


class Noisy(Dataset):
    """Samples with noise of the process and of a generator that the dataset holds."""

    def __init__(self, data):
        self.data, self.generator = data, torch.Generator().manual_seed(5)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        point, target = self.data[index]
        return point + torch.rand(2) + torch.rand(2, generator=self.generator), target


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.parametrize("kind", [Noisy, Stream])
def test_a_run_resumes_exactly_after_any_batch(tmp_path, make_trainer, make_data, kind):
    def train(**settings):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 2))
        trainer = make_trainer(
            model=ComposerClassifier(network, num_classes=2),
            train_dataloader=DataLoader(kind(make_data(36)), batch_size=16, shuffle=kind is Noisy),
            max_duration="2ep",
            schedulers=GROW,
            callbacks=(sizes := Sizes()),
            **settings,
        )
        trainer.fit()
        return sizes.seen, [parameter.detach().clone() for parameter in trainer.state.model.parameters()]

    _, weights = train(save_folder=tmp_path, save_interval="1ba", save_filename="{batch}.pt", save_latest_filename=None)
    for batch in range(1, len(SIZES)):
        rest, resumed = train(load_path=tmp_path / f"{batch}.pt")
        assert rest == SIZES[batch:], batch
        assert all(map(torch.equal, weights, resumed)), batch


def test_fits_go_on_in_the_middle_of_a_batch_of_the_dataloader(make_trainer, make_loader):
    trainer = make_trainer(
        train_dataloader=make_loader(36, 16),
        eval_dataloader=make_loader(8, 8),
        eval_interval="1ba",
        schedulers=GROW,
        callbacks=(sizes := Sizes()),
    )
    for _ in SIZES:
        trainer.fit(duration="1ba")
        assert trainer.state.dataloader_len is None  # the parts of later batches are not known
    assert sizes.seen == SIZES


def test_a_factor_starts_from_the_dataloaders_batch_size(make_trainer, make_loader):
    trainer = make_trainer(
        train_dataloader=make_loader(64, 16),
        max_duration="64sp",
        schedulers=[LinearScheduler(), Schedule("batch_size", LinearScheduler(0.0, 1.0, t_max="32sp"))],
        callbacks=(sizes := Sizes()),
    )
    trainer.fit()
    assert sizes.seen == [1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16]
    trainer.fit(duration="32sp", schedulers=LinearScheduler())
    assert sizes.seen[12:] == [16, 16]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train_dataloader": [(torch.zeros(4, 2), torch.zeros(4).long())], "device_train_microbatch_size": 2},
            "train_dataloader=list",
        ),
        (
            {
                "train_dataloader": DataLoader(
                    TensorDataset(torch.zeros(4, 2), torch.zeros(4).long()),
                    batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, False),
                )
            },
            "Give a torch DataLoader with a batch_size",
        ),
        ({"schedulers": Schedule("batch_size", lambda state: 2.0)}, "asks for 8 samples, .* have 4 over all ranks"),
        ({"schedulers": Schedule("batch_size", lambda state: -0.5)}, "asks for -2 samples"),
        ({"schedulers": [GROW, GROW]}, "two schedules of batch_size"),
        ({"schedulers": [GROW, LinearScheduler()]}, "dur' cannot be converted to batches.*schedule of 'batch_size'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make_trainer, settings, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        make_trainer(**{"max_duration": "1ep", "schedulers": GROW, **settings})


def test_a_resume_inside_an_epoch_needs_the_schedule(tmp_path, make_trainer, make_loader):
    halves = Schedule("batch_size", lambda state: 0.5)
    make_trainer(max_duration="1ba", schedulers=halves, save_folder=tmp_path, save_filename="ba{batch}.pt").fit()
    with pytest.raises(ValueError, match=r"inside an epoch by a run with Schedule\('batch_size', \.\.\.\)"):
        make_trainer(max_duration="2ba", load_path=tmp_path / "ba1.pt").fit()
