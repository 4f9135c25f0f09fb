"""Averages over views against each view on its own, and what metrics get to see of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from composer_algorithms import MultiViewEval
from composer_algorithms._tensors import UnsupportedBatchError
from composer_algorithms.functional import multi_view_forward
from composer_events import Engine, Evaluator, Event, NoEffectWarning, State

IMAGES = torch.rand(5, 3, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(32, 7)).double()


def averaged(flip, shift, average):
    """Pad by reflection, and crop and mirror each view on its own."""
    height, width = IMAGES.shape[-2:]
    padded = F.pad(IMAGES, [shift] * 4, mode="reflect")
    corners = {shift: 0.5, 0: 0.25, 2 * shift: 0.25} if shift else {0: 1.0}
    total = 0
    for corner, weight in corners.items():
        view = padded[..., corner : corner + height, corner : corner + width]
        for image in [view, view.flip(-1)] if flip else [view]:
            logits = NETWORK(image)
            term = logits if average == "logits" else logits.softmax(dim=-1)
            total = total + term * weight / (1 + flip)
    return total if average == "logits" else total.log()


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_the_function_and_the_algorithm_average_over_each_view(flip, shift, average):
    expected = averaged(flip, shift, average)
    before = IMAGES.clone()
    torch.testing.assert_close(multi_view_forward(NETWORK, IMAGES, flip, shift, average), expected)
    state = evaluate([MultiViewEval(flip, shift, average)])
    torch.testing.assert_close(state.outputs, expected)
    assert state.batch[0] is IMAGES
    assert torch.equal(IMAGES, before)


def evaluate(algorithms, label="eval", network=NETWORK):
    state = State(network, rank_zero_seed=0, algorithms=algorithms, dataloader=[0], dataloader_label=label)
    state.batch = (IMAGES, torch.arange(5))
    Engine(state).run_event(Event.EVAL_BEFORE_FORWARD)
    state.outputs = network(state.batch[0])
    Engine(state).run_event(Event.EVAL_AFTER_FORWARD)
    return state


def test_integers_are_shifted_as_floating_point_numbers_are():
    pixels = (IMAGES * 255).to(torch.uint8)
    assert torch.equal(
        multi_view_forward(lambda views: views.flatten(1).double(), pixels, shift=2),
        multi_view_forward(lambda views: views.flatten(1), pixels.double(), shift=2),
    )


def test_only_the_named_evaluators_have_views():
    algorithm = MultiViewEval(evaluators="with views")
    assert torch.equal(evaluate([algorithm], "without").outputs, NETWORK(IMAGES))
    assert not torch.equal(evaluate([algorithm], "with views").outputs, NETWORK(IMAGES))


@pytest.mark.parametrize("start", [Event.FIT_START, Event.EVAL_START])
def test_labels_of_no_evaluator_are_told_when_training_or_an_evaluation_begins(recwarn, start):
    def begin(*labels):
        method = MultiViewEval(evaluators="views")
        state = State(NETWORK, rank_zero_seed=0, max_duration="1ep", algorithms=[method], dataloader=[0])
        state.evaluators = [Evaluator(label=each, dataloader=[0], device_eval_microbatch_size=1) for each in labels]
        engine = Engine(state)
        for event in (start, Event.EVAL_START):  # once
            engine.run_event(event)

    begin("views", "other")
    begin()
    assert not recwarn
    with pytest.warns(NoEffectWarning, match="the evaluators are 'eval', 'other'") as caught:
        begin("eval", "other")
    assert len(caught) == 1


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(ValueError, match="shift=4 must be less than the height and width of the images"):
        multi_view_forward(NETWORK, IMAGES, shift=4)
    with pytest.raises(ValueError, match="average='mean' is unknown"):
        MultiViewEval(average="mean")
    with pytest.raises(UnsupportedBatchError, match=r"have outputs of shape \(10, 4, 4, 2\)"):
        evaluate([MultiViewEval()], network=NETWORK[0])
