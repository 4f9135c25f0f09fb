"""Selective backprop against its law of probability, and on its events."""

import collections

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_algorithms import CutOut, SelectiveBackprop
from composer_algorithms.functional import select_using_loss, selective_backprop, should_selective_backprop
from composer_dist import get_device
from composer_dist.testing import run_ranks
from composer_events import Engine, Event, State
from composer_models import ComposerClassifier, ComposerModel
from composer_time import Timestamp


def of_value(outputs, target, reduction="none"):
    """A loss that is the input itself, so that ranks are known."""
    return outputs.flatten(1).mean(dim=1)


@given(
    duration=st.floats(0, 1), batch=st.integers(0, 99), start=st.floats(0, 1), end=st.floats(0, 1),
    interrupt=st.integers(0, 5),
)  # fmt: skip
def test_batches_inside_the_window_are_cut_but_for_every_nth(duration, batch, start, end, interrupt):
    is_whole = interrupt > 0 and batch % interrupt == interrupt - 1
    assert should_selective_backprop(duration, batch, start, end, interrupt) == (
        start <= duration < end and not is_whole
    )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_single_draw_follows_the_law_of_ranks(n):
    losses = torch.randperm(n).float()
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(n)
    for _ in range(4000):
        _, kept = select_using_loss(
            losses[:, None], torch.arange(n), nn.Identity(), of_value, keep=1 / n, generator=generator
        )
        counts[losses[kept].long()] += 1
    law = ((torch.arange(n) + 0.5) / n) ** (n - 1)
    law /= law.sum()
    assert ((counts / 4000 - law).abs() < 5 * (law * (1 - law) / 4000).sqrt() + 1e-3).all()


def test_draws_without_replacement_are_those_of_one_after_the_other():
    # The probability of each pair, drawn one after the other in proportion to p.
    p = torch.tensor([0.5, 1.5, 2.5, 3.5]) / 4  # keep=0.5: exponent 1
    p = p / p.sum()
    expected = {
        (i, j): (p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])).item() for i in range(4) for j in range(i + 1, 4)
    }
    x, y = torch.arange(4.0)[:, None], torch.arange(4)
    generator = torch.Generator().manual_seed(0)
    counts = collections.Counter()
    for _ in range(6000):
        _, kept = select_using_loss(x, y, nn.Identity(), of_value, keep=0.5, generator=generator)
        counts[tuple(sorted(kept.tolist()))] += 1
    for pair, probability in expected.items():
        assert abs(counts[pair] / 6000 - probability) < 5 * (probability / 6000) ** 0.5


@given(n=st.integers(1, 12), keep=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_inputs_and_targets_stay_together_and_none_comes_twice(n, keep, seed):
    x, y = torch.randn(n, 3), torch.arange(n)
    inputs, targets = select_using_loss(
        x, y, nn.Identity(), of_value, keep, generator=torch.Generator().manual_seed(seed)
    )
    assert len(inputs) == len(set(targets.tolist())) == max(1, int(keep * n))
    assert torch.equal(inputs, x[targets])


def test_keeping_all_computes_nothing():
    def model(x):
        raise AssertionError("not needed")

    x, y = torch.rand(4, 2), torch.arange(4)
    assert select_using_loss(x, y, model, of_value, keep=1)[0] is x


@pytest.mark.parametrize("shape", [(4, 3, 8), (4, 3, 8, 8), (4, 3, 8, 8, 8)])
def test_scores_may_come_from_smaller_inputs(shape):
    seen = []

    def model(x):
        assert not torch.is_grad_enabled()
        seen.append(x.shape)
        return x

    inputs, _ = select_using_loss(torch.rand(shape), torch.arange(4), model, of_value, 0.5, 0.5)
    assert seen == [torch.Size([4, 3, *[4] * (len(shape) - 2)])]
    assert inputs.shape[1:] == shape[1:]


def no_reduction(outputs, target):
    return outputs


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_fun": no_reduction}, TypeError, "must take a keyword argument `reduction`."),
        ({"loss_fun": 3}, TypeError, "must take a keyword argument `reduction`."),
        ({"keep": 0}, ValueError, "keep=0"),
        ({"keep": 1.5}, ValueError, r"keep=1\.5"),
        ({"scale_factor": 2}, ValueError, "scale_factor=2"),
        ({"scale_factor": 0.5}, ValueError, r"of shape \(4, 2\)"),
        ({"loss_fun": lambda o, t, reduction: o.sum()}, ValueError, r"has the shape \(\)"),
    ],
)
def test_what_cannot_be_selected_is_refused(arguments, error, message):
    call = {"input": torch.rand(4, 2), "target": torch.arange(4), "model": nn.Identity(), "loss_fun": of_value}
    with pytest.raises(error, match=message):
        select_using_loss(**{**call, **arguments})


def test_losses_of_several_values_are_averaged():
    x = torch.stack([torch.tensor([[0.0, 100.0]]), torch.tensor([[60.0, 60.0]])])
    generator = torch.Generator().manual_seed(0)
    counts = collections.Counter()
    for _ in range(500):
        _, kept = select_using_loss(
            x, torch.arange(2), nn.Identity(), lambda o, t, reduction: o, 0.5, generator=generator
        )
        counts[kept.item()] += 1
    assert abs(counts[1] / 500 - 0.75) < 0.1  # 60 is the larger mean, drawn with 1.5 / 2


def test_the_older_name_works_and_says_what_to_write_instead():
    x, y = torch.rand(4, 2), torch.arange(4)
    with pytest.warns(DeprecationWarning, match="select_using_loss"):
        assert len(selective_backprop(x, y, nn.Identity(), of_value, 0.5)[0]) == 2


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        return self.last(self.norm(x))

    def loss(self, outputs, batch, reduction="mean"):
        y = batch["y"] if isinstance(batch, dict) else batch[1]
        return F.cross_entropy(outputs, y, reduction=reduction)


@pytest.fixture
def sb_state():
    state = State(Model(), rank_zero_seed=3, max_duration="10ba", device=get_device("cpu"))
    state.timestamp = Timestamp(batch=6, batch_in_epoch=6)
    state.batch = (torch.randn(8, 4), torch.arange(8) % 3)
    return state


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("make_batch", "input_key", "target_key"),
    [
        (lambda x, y: (x, y), 0, 1),
        (lambda x, y: [x, y], 0, 1),
        (lambda x, y: {"x": x, "y": y}, "x", "y"),
        (lambda x, y: Pair(x, y), "x", "y"),
    ],
    ids=["tuple", "list", "dict", "namedtuple"],
)
def test_batches_of_every_form_are_cut_and_what_was_loaded_stays(sb_state, make_batch, input_key, target_key):
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    loaded = sb_state.batch = make_batch(x, y)
    algorithm = SelectiveBackprop(input_key=input_key, target_key=target_key)
    algorithm.apply(Event.AFTER_DATALOADER, sb_state, None)
    kept = sb_state.batch_get_item(input_key)
    assert type(sb_state.batch) is type(loaded)
    assert kept.shape == (4, 4)
    places = [(x == row).all(dim=1).nonzero().item() for row in kept]
    assert torch.equal(sb_state.batch_get_item(target_key), y[places])
    sb_state.batch = loaded
    assert sb_state.batch_get_item(input_key) is x


def test_everything_with_an_entry_for_each_example_is_cut_alike(sb_state):
    x = torch.randn(8, 4)
    sb_state.batch = {"x": x, "y": torch.arange(8) % 3, "index": torch.arange(8), "scale": torch.tensor(2.0)}
    SelectiveBackprop(input_key="x", target_key="y").apply(Event.AFTER_DATALOADER, sb_state, None)
    assert torch.equal(sb_state.batch["x"], x[sb_state.batch["index"]])
    assert sb_state.batch["scale"] == 2


def test_lists_with_an_entry_for_each_example_are_cut_too(sb_state):
    inputs, targets = sb_state.batch
    names = [f"{value:.4f}" for value in inputs[:, 0].tolist()]
    parts = [torch.arange(len(inputs)) for _ in inputs]  # as many as examples, but each is one of all examples
    sb_state.batch = {"x": inputs, "y": targets, "name": names, "pair": tuple(names), "parts": parts, "one": names[0]}
    algorithm = SelectiveBackprop(0.0, 1.0, input_key="x", target_key="y")
    algorithm.apply(Event.AFTER_DATALOADER, sb_state, None)
    kept = [f"{value:.4f}" for value in sb_state.batch["x"][:, 0].tolist()]
    assert 0 < len(kept) < len(names)
    assert sb_state.batch["name"] == kept
    assert sb_state.batch["pair"] == tuple(kept)
    assert sb_state.batch["parts"] is parts
    assert sb_state.batch["one"] == names[0]


def test_it_acts_on_init_and_on_batches_inside_its_window(sb_state):
    algorithm = SelectiveBackprop(start=0.5, end=0.9, interrupt=2)
    assert [event for event in Event if algorithm.match(event, sb_state)] == [Event.INIT, Event.AFTER_DATALOADER]
    for batch, is_cut in ((7, False), (8, True), (9, False), (4, False)):
        sb_state.timestamp = Timestamp(batch=batch, batch_in_epoch=batch)
        assert algorithm.match(Event.AFTER_DATALOADER, sb_state) == is_cut
    assert not SelectiveBackprop(keep=1).match(Event.AFTER_DATALOADER, sb_state)
    SelectiveBackprop(keep=1).apply(Event.AFTER_DATALOADER, sb_state, None)
    assert len(sb_state.batch[0]) == 8


def test_it_acts_before_other_algorithms(sb_state):
    seen = []

    class Seeing(CutOut):
        def apply(self, event, state, logger):
            seen.append(len(state.batch[0]))

    sb_state.algorithms = [Seeing(), SelectiveBackprop(interrupt=0)]
    sb_state.set_dataloader([sb_state.batch], "train")
    Engine(sb_state).run_event(Event.AFTER_DATALOADER)
    assert seen == [4]


@pytest.mark.parametrize(("score_mode", "is_touched"), [("train", True), ("eval", False)])
def test_batch_norms_see_the_scored_examples_in_train_mode_only(sb_state, score_mode, is_touched):
    sb_state.model.train()
    SelectiveBackprop(score_mode=score_mode).apply(Event.AFTER_DATALOADER, sb_state, None)
    assert (sb_state.model.norm.num_batches_tracked == 1) == is_touched
    assert sb_state.model.training


@pytest.mark.parametrize(("precision", "dtype"), [("amp_bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_losses_are_computed_in_the_precision_of_the_run(sb_state, precision, dtype):
    seen = []
    sb_state.model.last.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    sb_state.precision = precision
    SelectiveBackprop().apply(Event.AFTER_DATALOADER, sb_state, None)
    assert seen == [dtype]


@pytest.mark.parametrize("loss_fn", [no_reduction, nn.CrossEntropyLoss(), lambda outputs, targets: outputs.sum()])
@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
@pytest.mark.parametrize(
    "make",
    [
        lambda loss_fn: ComposerClassifier(nn.Linear(4, 3), num_classes=3, loss_fn=loss_fn),
        lambda loss_fn: ComposerModel.from_module(nn.Linear(4, 3), loss_fn),
    ],
)
def test_a_loss_function_without_reduction_is_refused_before_training(sb_state, make, wrap, loss_fn):
    """Seen before, after half of training: "forward() got an unexpected keyword argument 'reduction'"."""
    sb_state.model = wrap(make(loss_fn))
    with pytest.raises(TypeError, match="must take a keyword argument `reduction`"):
        SelectiveBackprop().apply(Event.INIT, sb_state, None)
    SelectiveBackprop(keep=1).apply(Event.INIT, sb_state, None)  # which computes no losses
    sb_state.model = wrap(make(F.cross_entropy))
    SelectiveBackprop().apply(Event.INIT, sb_state, None)


def test_a_model_without_a_loss_of_its_own_is_refused(sb_state):
    SelectiveBackprop().apply(Event.INIT, sb_state, None)
    sb_state.model.loss = lambda outputs, batch: outputs.sum()
    for event in (Event.INIT, Event.AFTER_DATALOADER):
        with pytest.raises(TypeError, match="must take a keyword argument `reduction`"):
            SelectiveBackprop().apply(event, sb_state, None)
    sb_state.model = nn.Linear(4, 3)
    with pytest.raises(RuntimeError, match="Linear is not a ComposerModel"):
        SelectiveBackprop().apply(Event.INIT, sb_state, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": -1}, "start=-1"),
        ({"end": 2}, "end=2"),
        ({"keep": 0}, "keep=0"),
        ({"interrupt": -1}, "interrupt=-1"),
        ({"scale_factor": 1.5}, r"scale_factor=1\.5"),
        ({"score_mode": "both"}, "score_mode='both'"),
    ],
)
def test_numbers_outside_their_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SelectiveBackprop(**arguments)


def test_a_checkpoint_makes_the_draws_go_on(sb_state):
    def kept(algorithm, num):
        result = []
        for _ in range(num):
            sb_state.batch = (torch.arange(64.0).view(16, 4), torch.zeros(16, dtype=torch.long))
            algorithm.apply(Event.AFTER_DATALOADER, sb_state, None)
            result.append(sb_state.batch[0])
        return torch.stack(result)

    whole, first, resumed = (SelectiveBackprop(score_mode="eval") for _ in range(3))
    kept(first, 3)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(kept(resumed, 2), kept(whole, 5)[3:])


def select_under_ddp():
    state = State(Model(), rank_zero_seed=3, max_duration="10ba", device=get_device("cpu"))
    state.model = DistributedDataParallel(state.model)
    state.timestamp = Timestamp(batch=6)
    state.batch = (torch.arange(32.0).view(8, 4), torch.arange(8) % 3)
    SelectiveBackprop().apply(Event.INIT, state, None)
    SelectiveBackprop().apply(Event.AFTER_DATALOADER, state, None)
    state.model.module.loss(state.model(state.batch), state.batch).backward()
    return state.batch[0], state.model.module.last.weight.grad


def test_each_rank_selects_for_itself_and_their_gradients_are_averaged(tmp_path):
    (first, gradient), (second, other_gradient) = run_ranks(select_under_ddp, store=tmp_path / "store")
    assert first.shape == second.shape == (4, 4)
    assert not torch.equal(first, second)
    assert torch.equal(gradient, other_gradient)
