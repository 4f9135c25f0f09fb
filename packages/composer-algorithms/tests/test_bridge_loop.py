"""A loop of one's own, with `AlgorithmLoop`."""

import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from composer_algorithms import EMA, SAM, GradientClipping, LabelSmoothing, LayerFreezing, MixUp, NoOpModel
from composer_algorithms.bridges import loop as loop_module
from composer_algorithms.bridges.loop import AlgorithmLoop
from composer_events import Algorithm, Callback, Event

NUM_BATCHES = 4


@pytest.fixture
def loader():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(4 * NUM_BATCHES, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0.5).long()), batch_size=4)


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def model():
    return new_model()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def make_loop(model, loader, algorithms=(), **options):
    settings = {"dataloader": loader, "max_duration": "2ep", "seed": 7, **options}
    return AlgorithmLoop(model, sgd(model), algorithms, **settings)


def train_epoch(loop, model):
    for x, y in loop.epoch():
        with loop.batch(x, y) as b:
            b.outputs = model(b.inputs)
            b.loss = F.cross_entropy(b.outputs, b.targets)


class Events(Callback):
    def __init__(self):
        self.names = []

    def run_event(self, event, state, logger):
        self.names.append(event.value)


def test_without_algorithms_it_is_the_plain_loop(model, loader):
    plain = new_model()
    optimizer = sgd(plain)
    for _ in range(2):
        for x, y in loader:
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    loop = make_loop(model, loader)
    for _ in range(2):
        train_epoch(loop, model)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected)


MICROBATCH = "before_forward after_forward before_loss after_loss before_backward after_backward"
BATCH = (
    f"before_dataloader after_dataloader batch_start before_train_batch {MICROBATCH} after_train_batch batch_end "
    f"batch_checkpoint"
)


def test_it_comes_to_all_events_of_training_in_their_order(model, loader):
    seen = Events()
    with make_loop(model, loader, callbacks=seen) as loop:
        for _ in range(2):
            train_epoch(loop, model)
    epoch = ["epoch_start", *BATCH.split() * NUM_BATCHES, "before_dataloader", "epoch_end", "epoch_checkpoint"]
    begin = ["init", "before_load", "after_load", "fit_start", "iteration_start"]
    assert seen.names == [*begin, *epoch, *epoch, "fit_end"]


def test_a_loop_that_reads_its_dataloader_itself_comes_to_them_too(model, loader):
    seen = Events()
    with make_loop(model, loader, callbacks=seen) as loop:
        for x, y in loader:
            with loop.batch(x, y) as b:
                b.outputs = model(b.inputs)
                b.loss = F.cross_entropy(b.outputs, b.targets)
    assert seen.names[4:] == [
        *("iteration_start", "epoch_start"),
        *BATCH.split() * NUM_BATCHES,
        *("epoch_end", "epoch_checkpoint", "fit_end"),
    ]


def test_iterations_evaluation_and_prediction_have_their_events(model, loader):
    seen = Events()
    loop = make_loop(model, loader, callbacks=seen)
    loop.state.iteration_length = "1ep"
    train_epoch(loop, model)
    with loop.evaluation(loader):
        assert not model.training
        with loop.eval_batch(*next(iter(loader))) as b:
            b.outputs = model(b.inputs)
    with loop.prediction(loader), loop.predict_batch(*next(iter(loader))) as b:
        b.outputs = model(b.inputs)
    assert model.training
    loop.close()
    with loop_without_fit(model, loader, seen) as other, other.evaluation():
        pass
    assert {event.value for event in Event} == set(seen.names)


def loop_without_fit(model, loader, callback):
    loop = make_loop(model, loader)
    loop.state.callbacks.append(callback)
    return loop


def test_batches_in_pieces_make_one_step_with_the_mean_of_their_gradients(model, loader):
    plain = new_model()
    optimizer = sgd(plain)
    batches = list(loader)
    for group in (batches[:3], batches[3:]):
        (sum(F.cross_entropy(plain(x), y) for x, y in group) / len(group)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loop = make_loop(model, loader, num_microbatches=3)
    train_epoch(loop, model)
    assert loop.state.timestamp.batch == 2
    assert loop.state.timestamp.epoch == 1
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # the order of the sums differs


def test_sam_looks_twice_at_all_pieces_of_a_batch(loader):
    model, seen = new_model(), Events()
    loop = make_loop(model, loader, SAM(rho=0.1), num_microbatches=2, callbacks=seen)

    def compute(b):
        b.outputs = model(b.inputs)
        b.loss = F.cross_entropy(b.outputs, b.targets)

    x, y = next(iter(loader))
    assert loop.train_batch(compute, x, y) is None
    expected = F.cross_entropy(model(x), y).item()
    assert loop.train_batch(compute, x, y).item() == pytest.approx(expected, abs=1e-6)
    assert seen.names.count("before_train_batch") == 2
    assert seen.names.count("before_forward") == 4


def test_what_keeps_running_twice_is_refused_in_a_block(model, loader):
    loop = make_loop(model, loader, SAM())
    with pytest.raises(RuntimeError, match=r"a block runs once.*loop\.train_batch"), loop.batch(*next(iter(loader))):
        pass


def test_the_average_is_evaluated_and_training_goes_on_with_the_weights(model, loader):
    loop = make_loop(model, loader, EMA(half_life="2ba"))
    train_epoch(loop, model)
    weights = [weight.clone() for weight in model.parameters()]
    average = [weight.clone() for weight in loop.state.algorithms[0].get_ema_model(new_model()).parameters()]
    with loop.evaluation():
        assert all(map(torch.equal, model.parameters(), average))
        assert not all(map(torch.equal, model.parameters(), weights))
    assert all(map(torch.equal, model.parameters(), weights))


def test_nobody_trains_inside_an_evaluation(model, loader):
    loop = make_loop(model, loader, EMA(half_life="2ba"))
    train_epoch(loop, model)
    weights = [weight.clone() for weight in model.parameters()]
    with (
        pytest.raises(RuntimeError, match=r"trained inside `with loop\.evaluation\(\):`"),
        loop.evaluation(),
        loop.batch(*next(iter(loader))),
    ):
        pass
    assert all(map(torch.equal, model.parameters(), weights))
    train_epoch(loop, model)


def test_a_save_in_the_middle_of_a_batch_is_told(model, loader):
    loop = make_loop(model, loader, num_microbatches=2)
    warned = []
    for x, y in loop.epoch():
        with loop.batch(x, y) as b:
            b.outputs = model(b.inputs)
            b.loss = F.cross_entropy(b.outputs, b.targets)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.state_dict()
        warned.append([str(warning.message) for warning in caught])
    assert [len(each) for each in warned] == [1, 0, 1, 0]
    assert "after 1 of the 2 parts of a batch" in warned[0][0]


@pytest.mark.parametrize("num_batches", [3, 4, 6])
def test_a_resumed_run_ends_like_one_that_was_not_interrupted(num_batches, loader, tmp_path):
    def algorithms():
        return [MixUp(alpha=0.5), EMA(half_life="2ba"), LayerFreezing(freeze_start=0.0)]

    def run(model, loop, save_at=None):
        while loop.state.timestamp.epoch < 2:
            for x, y in loop.epoch():
                with loop.batch(x, y) as b:
                    b.outputs = model(b.inputs)
                    b.loss = F.cross_entropy(b.outputs, b.targets)
                if loop.state.timestamp.batch == save_at:
                    with loop.evaluation():
                        optimizer = loop.optimizers[0].state_dict()
                        saved = {"model": model.state_dict(), "optimizer": optimizer, "loop": loop.state_dict()}
                        torch.save(saved, tmp_path / "saved.pt")
        with loop.evaluation():
            return [weight.clone() for weight in model.parameters()]

    model = new_model()
    expected = run(model, make_loop(model, loader, algorithms()), save_at=num_batches)
    resumed = new_model()
    loop = make_loop(resumed, loader, algorithms())
    saved = torch.load(tmp_path / "saved.pt")
    resumed.load_state_dict(saved["model"])
    loop.optimizers[0].load_state_dict(saved["optimizer"])
    loop.load_state_dict(saved["loop"])
    assert all(map(torch.equal, run(resumed, loop), expected))
    assert loop.state.timestamp.batch == 2 * NUM_BATCHES


def test_a_state_of_other_algorithms_is_refused(model, loader):
    state = make_loop(model, loader, MixUp()).state_dict()
    with pytest.raises(ValueError, match=r"\['EMA'\] are not those of the checkpoint, \['MixUp'\]"):
        make_loop(model, loader, EMA()).load_state_dict(state)


def test_gradients_are_clipped_in_their_true_size_under_a_scaler(model, loader):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loop = make_loop(model, loader, GradientClipping("norm", 0.01), scaler=scaler, precision="amp_bf16")
    x, y = next(iter(loader))
    with loop.batch(x, y) as b, torch.autocast("cpu", torch.bfloat16):
        b.outputs = model(b.inputs)
        b.loss = F.cross_entropy(b.outputs, b.targets)
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_a_block_that_fails_leaves_the_next_one_to_begin_anew(model, loader):
    loop = make_loop(model, loader, LabelSmoothing(0.1))
    x, y = next(iter(loader))
    with pytest.raises(ZeroDivisionError), loop.batch(x, y):
        raise ZeroDivisionError
    with loop.batch(x, y) as b:
        b.outputs = model(b.inputs)
        b.loss = F.cross_entropy(b.outputs, b.targets)
    assert loop.state.timestamp.batch == 1


def forgets_the_inputs(model, b, x, y):
    b.outputs = model(x)


def forgets_the_targets(model, b, x, y):
    b.outputs = model(b.inputs)
    b.loss = F.cross_entropy(b.outputs, y)


def forgets_the_outputs(model, b, x, y):
    b.loss = F.cross_entropy(model(b.inputs), b.targets)


@pytest.mark.parametrize(
    ("body", "algorithm", "message"),
    [
        (forgets_the_inputs, MixUp(), r"b\.outputs was assigned, and MixUp changed the batch"),
        (forgets_the_targets, LabelSmoothing(0.1), r"b\.loss was assigned, and LabelSmoothing changed the batch"),
        (forgets_the_outputs, LabelSmoothing(0.1), r"b\.loss was assigned before b\.outputs, and LabelSmoothing acts"),
        (forgets_the_outputs, MixUp(interpolate_loss=True), r"before b\.outputs, and MixUp acts in between"),
    ],
)
def test_what_algorithms_do_cannot_be_passed_over(body, algorithm, message, model, loader):
    x, y = next(iter(loader))
    loop = make_loop(model, loader, algorithm)
    with pytest.raises(RuntimeError, match=message), loop.batch(x, y) as b:
        body(model, b, x, y)


def test_a_block_without_a_loss_is_an_error(model, loader):
    with pytest.raises(RuntimeError, match=r"ended without b\.loss"), make_loop(model, loader).batch(torch.rand(2, 4)):
        pass


def test_a_loss_with_several_values_is_an_error(model, loader):
    x, y = next(iter(loader))
    loop = make_loop(model, loader)
    with pytest.raises(TypeError, match=r"b\.loss is a tensor of shape \(4,\)"), loop.batch(x, y) as b:
        b.loss = F.cross_entropy(model(x), y, reduction="none")


def test_an_algorithm_that_puts_another_model_in_place_is_refused(model, loader):
    with pytest.raises(ValueError, match="replaced the Sequential"):
        make_loop(model, loader, NoOpModel())


def test_classes_and_strangers_are_no_algorithms(model, loader):
    with pytest.raises(TypeError, match=r"pass objects, MixUp\(\.\.\.\)"):
        make_loop(model, loader, [MixUp])
    with pytest.raises(TypeError, match="holds 'mixup', which is not an Algorithm"):
        make_loop(model, loader, ["mixup"])


@pytest.mark.parametrize(("optimizer", "error"), [(None, ValueError), ([], ValueError), ("adam", TypeError)])
def test_a_loop_that_would_never_step_is_refused(optimizer, error, model, loader):
    with pytest.raises(error, match="optimizer"):
        AlgorithmLoop(model, optimizer, dataloader=loader, max_duration="1ep")


def test_the_optimizer_of_another_model_is_refused(model, loader):
    with pytest.raises(ValueError, match="None of the parameters of SGD belongs to the Sequential"):
        AlgorithmLoop(model, sgd(new_model()), dataloader=loader, max_duration="1ep")
    AlgorithmLoop(model, [sgd(new_model()), sgd(model)], dataloader=loader, max_duration="1ep")


def test_pieces_and_whole_batches_do_not_go_together(model, loader):
    with pytest.raises(ValueError, match="num_microbatches=2"):
        make_loop(model, loader, MixUp(draw_per="batch"), num_microbatches=2)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        make_loop(model, loader, num_microbatches=0)


def test_data_without_a_length_are_read_by_the_loop(model):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from [(torch.rand(4), 1)] * 8

    loader = DataLoader(Stream(), batch_size=4)
    loop = make_loop(model, loader)
    train_epoch(loop, model)
    assert loop.state.timestamp.epoch == 1
    batch = make_loop(model, loader).batch(torch.rand(4, 4), torch.ones(4).long())
    with pytest.raises(RuntimeError, match=r"the end of an epoch is unknown.*loop\.epoch"), batch:
        pass


def test_gradients_of_gradients_are_there_for_an_algorithm_that_asks(model, loader):
    class Differentiates(Algorithm):
        has_graph = False

        @property
        def backwards_create_graph(self):
            return True

        def match(self, event, state):
            return event is Event.AFTER_BACKWARD

        def apply(self, event, state, logger):
            self.has_graph = all(weight.grad.requires_grad for weight in state.model.parameters())

    algorithm = Differentiates()
    loop = make_loop(model, [next(iter(loader))], algorithm)
    with pytest.warns(UserWarning, match="create_graph=True"):
        train_epoch(loop, model)
    assert algorithm.has_graph


def test_the_public_names_are_these():
    assert loop_module.__all__ == ["AlgorithmLoop", "LoopBatch"]


def test_the_package_of_bridges_loads_no_other_library():
    code = (
        "import sys, composer_algorithms.bridges, composer_algorithms.bridges.loop\n"
        "assert not {'transformers', 'lightning', 'accelerate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
