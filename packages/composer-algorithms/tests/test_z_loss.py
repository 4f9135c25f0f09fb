"""`z_loss` against its formula and gradient, and `ZLoss` between the loss and its backward pass."""

import pytest
import torch

from composer_algorithms import CutMix, MixUp, ZLoss
from composer_algorithms.functional import z_loss
from composer_events import Engine, Event, State

LOGITS = torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])


@pytest.mark.parametrize("mask", [None, MASK, MASK.bool()], ids=["all", "integers", "booleans"])
def test_value_and_gradient_are_those_of_the_formula(mask):
    logits = LOGITS.clone().requires_grad_()
    counts = torch.ones(3, 5) if mask is None else mask.double()
    log_z = LOGITS.exp().sum(dim=-1).log()
    found = z_loss(logits, mask)
    torch.testing.assert_close(found.detach(), (log_z**2 * counts).sum() / counts.sum())
    # d log(Z)^2 / dx = 2 log(Z) softmax(x)
    expected = 2 * log_z[..., None] * LOGITS.softmax(dim=-1) * counts[..., None] / counts.sum()
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], expected)


def test_without_tokens_it_is_0_and_large_logits_in_half_precision_are_finite():
    assert z_loss(LOGITS, torch.zeros(3, 5)) == 0
    large = torch.full((2, 3), 300.0, dtype=torch.float16)  # whose square overflows
    torch.testing.assert_close(z_loss(large), (torch.tensor(300.0) + torch.tensor(3.0).log()) ** 2)


class Outputs(dict):
    logits = LOGITS


def make_state(algorithms):
    return State(torch.nn.Identity(), rank_zero_seed=0, max_duration="1ep", algorithms=algorithms, dataloader=[0])


def loss_after(outputs, loss, batch=None):
    state = make_state([ZLoss(0.5)])
    state.outputs, state.loss, state.batch = outputs, loss, batch
    Engine(state).run_event(Event.BEFORE_BACKWARD)
    return state.loss


@pytest.mark.parametrize("outputs", [LOGITS, Outputs()], ids=["tensor", "transformers"])
def test_padding_does_not_count(outputs):
    loss = loss_after(outputs, torch.tensor(2.0), {"attention_mask": MASK})
    torch.testing.assert_close(loss, 2 + 0.5 * z_loss(LOGITS, MASK))


def test_only_tokens_with_a_label_count_in_models_of_any_kind():
    labels = torch.tensor([[-100, 1, 2, -100, 3], [1, -100, 3, 4, 5], [-100] * 5])
    loss = loss_after(LOGITS, torch.tensor(2.0), {"attention_mask": MASK, "labels": labels})
    torch.testing.assert_close(loss, 2 + 0.5 * z_loss(LOGITS, labels != -100))


PIXELS = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))  # three classes
TARGETS = torch.tensor([0, 1, 2, -100]).repeat(10).view(2, 4, 5)


@pytest.mark.parametrize(
    ("logits", "batch", "mask"),
    [
        (PIXELS, (torch.zeros(2, 1, 4, 5), TARGETS), TARGETS != -100),
        (PIXELS, {"labels": TARGETS}, TARGETS != -100),
        (PIXELS, {"labels": TARGETS.repeat(1, 2, 2)}, None),
        (PIXELS.movedim(1, -1), {"labels": TARGETS}, TARGETS != -100),
    ],
    ids=["tuple", "mapping", "other resolution", "classes last"],
)
def test_the_classes_of_pixels_are_found_by_the_shape_of_the_labels(logits, batch, mask):
    loss = loss_after(logits, torch.tensor(2.0), batch)
    torch.testing.assert_close(loss, 2 + 0.5 * z_loss(PIXELS.movedim(1, -1), mask))


def test_four_dims_without_labels_of_pixels_are_refused():
    with pytest.raises(ValueError, match=r"no classes in logits of shape \(2, 3, 4, 5\)"):
        loss_after(PIXELS, torch.tensor(2.0), (torch.zeros(2, 1, 4, 5), torch.zeros(2)))


def test_it_is_part_of_what_is_minimized_however_losses_are_named():
    term, one = 0.5 * z_loss(LOGITS), torch.tensor(1.0)
    assert loss_after(LOGITS, {"total": one, "a": one}) == {"total": 1 + term, "a": one}
    assert loss_after(LOGITS, {"a": one, "b": one}) == {"a": one, "b": one, "z_loss": term}
    assert loss_after(LOGITS, (one, one)) == [one, one, term]


def test_it_adds_to_the_blended_loss():
    algorithms = [ZLoss(), MixUp(interpolate_loss=True), CutMix(interpolate_loss=True)]
    state = make_state(algorithms)
    assert Engine(state).explain().of("before_backward")[-1].algorithm == "ZLoss"


def test_a_negative_coefficient_is_refused_by_name():
    with pytest.raises(ValueError, match=r"coefficient=-1\.0 is not in"):
        ZLoss(-1.0)
