"""A loop of one's own with `AlgorithmLoop` trains as our Trainer does."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from composer.models import ComposerModel
from composer_algorithms.bridges.loop import AlgorithmLoop

pytestmark = pytest.mark.filterwarnings("ignore::composer_events.NoEffectWarning")
NEED_A_FUNCTION = ("SAM", "SAM and MixUp", "SAM and StochasticDepth")


def make_loop(network, algorithms, dataloader, **options):
    model = ComposerModel.from_module(network, F.cross_entropy)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    return model, AlgorithmLoop(
        model, optimizer, algorithms, dataloader=dataloader, max_duration="2ep", seed=17, **options
    )


def train(loop, dataloader, model, case, *, reads_itself):
    losses = []

    def compute(b):
        b.outputs = model(b.batch)
        b.loss = model.loss(b.outputs, b.batch)
        losses.append(loop.state.loss)

    model.train()
    for _ in range(2):
        for x, y in dataloader if reads_itself else loop.epoch():
            if case in NEED_A_FUNCTION:
                loop.train_batch(compute, x, y)
            else:
                with loop.batch(x, y) as b:
                    compute(b)
                losses[-1] = loop.state.loss
    loop.close()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("reads_itself", [True, False], ids=["own_dataloader_line", "loop.epoch"])
def test_a_loop_of_ones_own_has_the_losses_and_weights_of_our_trainer(
    case, reads_itself, algorithms_of, images, network, run_of, by_our_trainer
):
    dataloader = DataLoader(images(), batch_size=4)
    model, loop = make_loop(network, algorithms_of(case), dataloader)
    losses = train(loop, dataloader, model, case, reads_itself=reads_itself)
    run_of(losses, network).assert_same(by_our_trainer(case))


@pytest.mark.parametrize("case", ["MixUp", "LabelSmoothing", "GradientClipping", "SAM", "EMA"])
def test_batches_in_pieces_are_our_trainers_microbatches(case, algorithms_of, images, network, run_of, by_our_trainer):
    dataloader = DataLoader(images(), batch_size=4)
    model, loop = make_loop(network, algorithms_of(case), dataloader, num_microbatches=2)
    losses = train(loop, dataloader, model, case, reads_itself=False)
    run_of(losses, network).assert_same(by_our_trainer(case, batch_size=8, microbatch_size=4))
