"""A loop with Accelerate and `AcceleratedLoop` trains as our Trainer does."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from composer.models import ComposerModel

accelerate = pytest.importorskip("accelerate")
from composer_algorithms.bridges.accelerate import AcceleratedLoop  # noqa: E402  # needs accelerate

pytestmark = pytest.mark.filterwarnings("ignore")  # Accelerate and torch warn about each other
NEED_A_FUNCTION = ("SAM", "SAM and MixUp", "SAM and StochasticDepth")


@pytest.fixture(autouse=True)
def one_accelerator_after_the_other():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make_loop(network, algorithms, dataset, **options):
    model = ComposerModel.from_module(network, F.cross_entropy)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    loader = DataLoader(dataset, batch_size=4)
    return AcceleratedLoop(accelerator, model, optimizer, algorithms, dataloader=loader, max_duration="2ep", seed=17)


def train(loop, case):
    losses = []

    def compute(b):
        b.outputs = loop.model(b.batch)
        b.loss = F.cross_entropy(b.outputs, b.targets)
        losses.append(loop.state.loss)

    loop.model.train()
    for _ in range(2):
        for x, y in loop.epoch():
            if case in NEED_A_FUNCTION:
                loop.train_batch(compute, x, y)
            else:
                with loop.batch(x, y) as b:
                    compute(b)
                losses[-1] = loop.state.loss
    loop.close()
    return [loss.item() for loss in losses]


def test_it_has_the_losses_and_weights_of_our_trainer(case, algorithms_of, images, network, run_of, by_our_trainer):
    loop = make_loop(network, algorithms_of(case), images())
    run_of(train(loop, case), network).assert_same(by_our_trainer(case))


@pytest.mark.parametrize("case", ["MixUp", "LabelSmoothing", "GradientClipping", "EMA"])
def test_accumulated_batches_are_our_trainers_microbatches(
    case, algorithms_of, images, network, run_of, by_our_trainer
):
    loop = make_loop(network, algorithms_of(case), images(), gradient_accumulation_steps=2)
    run_of(train(loop, case), network).assert_same(by_our_trainer(case, batch_size=8, microbatch_size=4))


def test_precision_is_the_accelerators(algorithms_of, images, network):
    loop = make_loop(network, algorithms_of("MixUp of losses"), images(), mixed_precision="bf16")
    assert str(loop.state.precision.value) == "amp_bf16"
    with loop.batch(*next(iter(loop.dataloader))) as b:
        b.outputs = loop.model(b.batch)
        b.loss = F.cross_entropy(b.outputs, b.targets)
    assert loop.state.timestamp.batch == 1


def test_optimizers_that_look_twice_do_not_accumulate(algorithms_of, images, network):
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        make_loop(network, algorithms_of("SAM"), images(), gradient_accumulation_steps=2)


def test_a_prepared_model_is_refused(algorithms_of, images, network):
    wrapped = object.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    with pytest.raises(ValueError, match="it is prepared already"):
        AcceleratedLoop(
            accelerate.Accelerator(cpu=True), wrapped, [], algorithms_of("EMA"), dataloader=[], max_duration=1
        )
