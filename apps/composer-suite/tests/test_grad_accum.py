"""The older argument `grad_accum`: into how many microbatches each batch is cut."""

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.core import Callback
from composer.models import ComposerModel
from composer_dist.devices import DeviceCPU

pytestmark = pytest.mark.filterwarnings("ignore:grad_accum:DeprecationWarning")


class Sizes(Callback):
    """The sizes of the microbatches of each batch."""

    def __init__(self):
        self.of_batches = []

    def batch_start(self, state, logger):
        self.of_batches.append([])

    def before_forward(self, state, logger):
        self.of_batches[-1].append(len(state.batch))


@pytest.mark.parametrize(
    ("num_samples", "count", "sizes"),
    [(6, 1, [6]), (6, 2, [3, 3]), (7, 2, [4, 3]), (7, 3, [3, 3, 1]), (6, 4, [2, 2, 2]), (4, 4, [1, 1, 1, 1])],
)
def test_each_batch_is_cut_as_torch_chunk_cuts(make_trainer, make_model, num_samples, count, sizes):
    assert [len(part) for part in torch.zeros(num_samples).chunk(count)] == sizes
    trainer, cut = make(make_trainer, [torch.ones(num_samples, 2)], grad_accum=count)
    assert trainer.state.grad_accum == count
    assert trainer.state.device_train_microbatch_size is None

    trainer.fit()

    assert cut.of_batches == [sizes]
    assert trainer.state.device_train_microbatch_size == sizes[0]


def make(make_trainer, batches, **settings):
    model = ComposerModel.from_module(nn.Linear(2, 2), lambda outputs, batch: outputs.square().mean())
    model.forward = lambda batch: model.module(batch)
    model.loss = lambda outputs, batch: outputs.square().mean()
    cut = Sizes()
    settings = {"max_duration": f"{len(batches)}ba", "callbacks": cut, **settings}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_trainer(model=model, optimizers=optimizer, train_dataloader=batches, **settings), cut


def test_batches_of_other_lengths_are_cut_by_their_own_length(make_trainer):
    trainer, cut = make(make_trainer, [torch.ones(8, 2), torch.ones(5, 2), torch.ones(8, 2)], grad_accum=2)

    trainer.fit()

    assert cut.of_batches == [[4, 4], [3, 2], [4, 4]]


def test_a_batch_with_fewer_samples_than_microbatches_is_cut_into_samples(make_trainer):
    trainer, cut = make(make_trainer, [torch.ones(3, 2)], grad_accum=4)

    with pytest.warns(UserWarning, match="Cannot split batch of length 3 into grad_accum=4"):
        trainer.fit()

    assert cut.of_batches == [[1, 1, 1]]


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "many"])
def test_a_count_that_is_none(make_trainer, count):
    with pytest.raises(ValueError, match=rf"grad_accum={count!r} must be"):
        make_trainer(grad_accum=count)


def test_both_arguments_contradict_each_other(make_trainer):
    message = "Cannot use both device_train_microbatch_size and grad_accum.*=4 and grad_accum=2"
    with pytest.raises(ValueError, match=message):
        make_trainer(grad_accum=2, device_train_microbatch_size=4)
    with pytest.raises(ValueError, match=message):
        make_trainer(max_duration="1ep").fit(grad_accum=2, device_train_microbatch_size=4)


def test_the_old_default_of_grad_accum_gives_way(make_trainer):
    trainer, cut = make(make_trainer, [torch.ones(6, 2)], grad_accum=1, device_train_microbatch_size=2)

    trainer.fit()

    assert cut.of_batches == [[2, 2, 2]]
    assert trainer.state.grad_accum is None


def test_fit_takes_it_too_and_a_size_takes_its_place(make_trainer):
    trainer, cut = make(make_trainer, [torch.ones(6, 2)] * 3, device_train_microbatch_size=6, max_duration="1ba")
    trainer.fit()
    trainer.fit(duration="1ba", grad_accum=3)
    assert trainer.state.grad_accum == 3
    trainer.fit(duration="1ba", device_train_microbatch_size=3)

    assert cut.of_batches == [[6], [2, 2, 2], [3, 3]]
    assert trainer.state.grad_accum is None


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_it_is_said_to_be_old(make_trainer):
    with pytest.warns(
        DeprecationWarning, match="grad_accum=2 is an older spelling.*device_train_microbatch_size"
    ) as seen:
        make_trainer(grad_accum=2)
    assert [one.filename for one in seen if "grad_accum" in str(one.message)] == [make_trainer.__code__.co_filename]


def test_it_is_logged_with_the_size(make_trainer, recorder):
    trainer, _ = make(make_trainer, [torch.ones(6, 2)], grad_accum=2, loggers=recorder)

    trainer.fit()

    assert ("M", 0, ("trainer/device_train_microbatch_size", "trainer/grad_accum")) in recorder.seen


class SmallDevice(DeviceCPU):
    """Has memory for three samples."""

    name = "gpu"

    def batch_to_device(self, batch):
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch


class Loader(list):
    batch_size = 12


@pytest.mark.filterwarnings("ignore:.*is experimental:UserWarning")
@pytest.mark.parametrize("loader", [Loader, list])  # seen for a list, without a batch size: OverflowError
def test_the_number_of_microbatches_is_found_out(make_trainer, loader):
    trainer, _ = make(make_trainer, loader([torch.ones(12, 2)]), grad_accum="auto", device=SmallDevice())
    assert trainer.state.grad_accum == 1

    with pytest.warns(RuntimeWarning, match="grad_accum from [12] to [24]"):
        trainer.fit()

    assert trainer.state.grad_accum == 4
    assert trainer.state.device_train_microbatch_size == 3


@pytest.mark.filterwarnings("ignore:.*is experimental:UserWarning", "ignore:.*will be decreased:RuntimeWarning")
def test_microbatches_of_a_sample_cannot_be_more(make_trainer):
    class NoDevice(SmallDevice):
        def batch_to_device(self, batch):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer, _ = make(make_trainer, Loader([torch.ones(12, 2)]), grad_accum="auto", device=NoDevice())
    with pytest.raises(RuntimeError, match="microbatches of a single sample"):
        trainer.fit()
    assert trainer.state.grad_accum == 12  # 1, 2, 4, 8 and no more than samples


def test_the_gradient_is_that_of_the_whole_batch():
    def weights(**settings):
        torch.manual_seed(1)
        model = ComposerModel.from_module(nn.Linear(3, 2), nn.functional.cross_entropy)
        data = [(torch.randn(7, 3), torch.randint(2, (7,))) for _ in range(3)]
        with Trainer(
            model=model,
            train_dataloader=data,
            max_duration="3ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
            device="cpu",
            progress_bar=False,
            **settings,
        ) as trainer:
            trainer.fit()
        return [parameter.detach() for parameter in model.parameters()]

    # Sums over 7 samples in another order, in 3 steps.
    torch.testing.assert_close(weights(grad_accum=3), weights(device_train_microbatch_size=7), rtol=0, atol=1e-6)
